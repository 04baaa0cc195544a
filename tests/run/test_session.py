"""What is around a program, without running one."""

import math
import sys
import warnings
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.report import records

import halfstep
from halfstep import preset
from halfstep._tools.cli import _build_parser
from halfstep._tools.cli.run import _without_folder
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis
from halfstep._tools.record.files import program_in
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import Seen
from halfstep._tools.run import session
from halfstep._tools.run.masters import Additions
from halfstep._tools.run.session import Command, Options, Session, noting_warnings
from halfstep.errors import RecordError

COMMAND = Command("train.py", ["--lr", "1"], is_module=False)


@pytest.fixture
def seen(monkeypatch, tmp_path):
    """What happens, in order; nothing is executed, and at the end is when ``close`` is called."""
    seen = SimpleNamespace(events=[], close=None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["halfstep"])
    monkeypatch.setattr(
        session, "atexit", SimpleNamespace(register=lambda close: setattr(seen, "close", close))
    )
    monkeypatch.setattr(session, "execute", lambda *args, **kwargs: seen.events.append("program"))
    return seen


def options(**changes) -> Options:
    given = {"policy": preset("fp32"), "folder": None, "every": 0, "is_quiet": False, "amp": None}
    return Options(**(given | changes))


def test_amp_is_around_the_program_and_under_the_policy(seen, monkeypatch, capsys):
    @contextmanager
    def mixed_precision(dtype, say, *, policy, products, is_explained):
        seen.events.append((dtype, policy))
        say("a line")
        yield
        seen.events.append("left")

    monkeypatch.setattr("halfstep._tools.run.amp.mixed_precision", mixed_precision)
    Session(COMMAND, options(amp=torch.float16)).run()
    assert seen.events == [(torch.float16, preset("fp32")), "program"]
    assert capsys.readouterr().err == "halfstep: a line\n"
    seen.close()
    assert seen.events[-1] == "left"
    assert torch.autocast.__module__ == "torch.amp.autocast_mode"


@pytest.mark.parametrize(
    ("quiet", "rank", "lines"), [(False, "0", 1), (True, "0", 0), (False, "1", 0)]
)
def test_one_rank_has_the_last_word(quiet, rank, lines, seen, monkeypatch, capsys):
    monkeypatch.setenv("RANK", rank)
    Session(COMMAND, options(is_quiet=quiet)).run()
    seen.close()
    assert capsys.readouterr().err.count("\n") == lines


class FakeWatch:
    """Finds something in each of its steps, of which there are two."""

    misses_threads, stop = False, lambda self, error: None

    def __init__(self, tell, seconds, number):
        self.found, self.notes, self._tell, self._number = [], [], tell, number
        self.misses_threads = False

    def __enter__(self):
        for is_counted in (False, True):
            self.found.append(records.found())
            self._tell(self.found[-1], self._number(is_counted))

    def __exit__(self, *exception):
        self.notes.append("step 3 was not replayed: no model was called in it")


@pytest.mark.parametrize(
    ("quiet", "environ", "names", "last"),
    [
        (False, {}, "", "0 skipped, 2 diagnoses: halfstep report"),
        (False, {"RANK": "1", "WORLD_SIZE": "2"}, "rank 1, ", "no model was called in it"),
        (True, {}, "", ""),
    ],
)
def test_diagnoses_are_recorded_and_printed_unless_quiet(
    quiet, environ, names, last, seen, monkeypatch, capsys, tmp_path
):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("halfstep._tools.watch.watch.Watch", FakeWatch)
    monkeypatch.setattr(halfstep.record, "num_steps", 2)
    monkeypatch.setattr(halfstep.record, "current_step", 3)
    given = {"policy": preset("torch"), "is_quiet": quiet, "folder": tmp_path / "out"}
    Session(COMMAND, options(diagnose_seconds=30.0, **given)).run()
    seen.close()
    err = capsys.readouterr().err
    run = read_run(tmp_path / "out")
    found = records.found(rank=int(environ.get("RANK", 0)))
    assert [(each.rank, each.diagnosis) for each in run.diagnoses] == [(found.rank, found)] * 2
    assert [note.text.partition(":")[0] for note in run.notes] == ["step 3 was not replayed"]
    for step in (2, 3):  # counted, and running
        said = f"halfstep: {names}step {step} went bad:\n{found}\n"
        assert err.count(said) == 1 - quiet
    assert err.count("was not replayed") == 1 - quiet
    assert last in err.rstrip().rpartition("\n")[2]
    assert bool(err) is not quiet


def test_nobody_watches_unless_told_to(seen, monkeypatch):
    monkeypatch.setattr("halfstep._tools.watch.watch.Watch", None)
    Session(COMMAND, options()).run()
    seen.close()


def test_the_last_word_may_go_nowhere(seen, monkeypatch, tmp_path):
    """As after ``halfstep run train.py 2>&1 | head``."""
    with (tmp_path / "closed").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        Session(COMMAND, options()).run()
    seen.close()


def test_the_name_of_the_folder(seen, tmp_path):
    Session(COMMAND, options()).run()
    seen.close()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("train-2")
    assert Command("pkg.sub.fit", [], is_module=True).stem == "fit"
    assert Command("a.b/fit.v2.py", [], is_module=False).stem == "fit.v2"


def go(seen, target):
    Session(replace(COMMAND, target=target), options(folder=Path("x"))).run()
    seen.close()


@pytest.mark.parametrize(
    ("target", "is_same"),
    [
        ("a/train.py", True),
        ("train.py", True),
        ("../elsewhere/a/train.py", True),
        ("/elsewhere/a/train.py", True),
        ("b/train.py", False),
        ("a/eval.py", False),
        ("a.train", False),
    ],
)
def test_a_record_of_another_program_is_not_continued(target, is_same, seen):
    go(seen, "a/train.py")
    refused = pytest.raises(RecordError, match=r"another program, a/train.py: .* -o")
    with nullcontext() if is_same else refused:
        go(seen, target)
    assert program_in(Path("x/rank0.jsonl")) == "a/train.py"
    assert Path("x/rank0.jsonl").read_text().count('"event":"run"') == 1 + is_same


def test_processes_that_a_program_starts_get_its_options(tmp_path, monkeypatch):
    additions = Additions(True, True, math.inf, "alone")
    options = Options(
        policy=preset("fp32"),
        folder=tmp_path,
        every=3,
        is_quiet=True,
        amp=torch.bfloat16,
        diagnose_seconds=9.0,
        additions=additions,
    )
    got = []

    def begin(command, options):
        got.append((command, options))
        return SimpleNamespace(put_in_place=lambda: None)

    monkeypatch.setattr(session, "Session", begin)
    with session.reaching_children(options):
        session.begin_in_child()
    assert got == [(None, options)]


def test_what_the_program_puts_in_place_of_showwarning_stays(monkeypatch):
    def own(*_: object) -> None: ...

    before = warnings.showwarning
    with noting_warnings([].append):
        pass
    assert warnings.showwarning is before
    monkeypatch.setattr(warnings, "showwarning", before)  # puts it back after the test
    with noting_warnings([].append):
        warnings.showwarning = own
    assert warnings.showwarning is own


def test_two_runs_at_once_in_one_folder_are_refused(seen):
    Session(COMMAND, options(folder=Path("x")))
    with pytest.raises(RecordError, match=r"another run records there.* -o"):
        Session(COMMAND, options(folder=Path("x")))
    seen.close()
    go(seen, "train.py")


def with_bad_steps(*steps, norm):
    """Return what is known of a run whose optimizers took steps with a loss that is NaN."""
    seen, event = Seen(), {"share_lost_updates": None, "taken": True, "loss": math.nan}
    for step in steps:
        seen.take(event | {"scale_after": None, "step": step, "norm": norm})
    return seen


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (Seen(), []),
        (Seen(updates=10, lost_updates=9.0), []),  # of float32
        (Seen(updates=100, lost_updates=1.0, has_low_weights=True), []),
        (
            Seen(updates=100, lost_updates=70.0, has_low_weights=True),
            ["70 % of the measured updates were lost to rounding; `M` prevents that"],
        ),
        (
            Seen(bad_buffers=["a", "b", "c", "d"], has_bad_gradients=True),
            ["4 buffers of the model ended with inf or NaN: a, b, c and 1 more; `G` "
             "restores buffers at skipped steps"],
        ),
        (
            with_bad_steps(7, 7, 8, norm=math.inf),
            [
                "an optimizer stepped although the loss was inf or NaN, in 2 steps (first: step 7);"
                " `G` skips steps with inf or NaN gradients"
            ],
        ),
        *(  # the option skips no step whose gradients were finite, or not measured
            (with_bad_steps(3, norm=norm),
             ["an optimizer stepped although the loss was inf or NaN, in 1 step (first: step 3)"])
            for norm in (None, 1.0)
        ),
        (  # gradients in float16 have no guard
            replace(with_bad_steps(3, norm=math.inf), has_float16=True),
            ["an optimizer stepped although the loss was inf or NaN, in 1 step (first: step 3)"],
        ),
        (Seen(first_scale=1.0, scale=1.0), []),  # of a guard
        (
            Seen(first_scale=65536.0, scale=2.0**-126),
            ["the scale began at 2^16 and ended at 2^-126; "
             "`G` brings it back once gradients are finite at a larger one"],
        ),
        (  # gradients that were finite at no scale
            Seen(first_scale=65536.0, scale=2.0**-126, is_last_taken=False),
            ["the scale began at 2^16 and ended at 2^-126"],
        ),
    ],
)  # fmt: skip
def test_what_is_known_at_the_end_is_said(known, said):
    told = list(session.findings(known, guard="G", masters="M"))
    assert told == said
    told = list(session.findings(known, guard="", masters=""))
    assert told == [text.partition(";")[0] for text in said]


def test_no_option_restores_buffers_if_no_step_was_bad():
    """The script leaves its bad batches out by itself."""
    known = Seen(bad_buffers=["a"])
    for num_skipped, more in ((0, ""), (1, "; `G` restores buffers at skipped steps")):
        told = session.findings(known, guard="G", masters="M", num_skipped=num_skipped)
        assert list(told) == [f"1 buffer of the model ended with inf or NaN: a{more}"]


def test_the_command_of_a_later_cure_has_the_rules_of_those_before(tmp_path):
    """Two ops of one line: a run with either command alone would go bad at the other."""
    options = Options(preset("torch"), None, 50, False, None, run_as=("halfstep", "run", "a.py"))
    rules, cures = {}, []
    for op in ("mul", "add", "mul"):
        cure = Cure("policy", "autocast(...)", is_finite=True, policy=f"torch; {op}:fp32")
        found = session._by_option(Diagnosis("range", cure=cure), options, rules).cure
        cures.append((found.text, len(found.remarks)))
    both = "halfstep run '--policy=torch; mul:fp32; add:fp32' a.py"
    assert cures == [("halfstep run '--policy=torch; mul:fp32' a.py", 0), (both, 1), (both, 1)]


def test_a_run_that_could_not_write_says_what_the_record_has():
    text = session.recorded(3000, 1200, Seen(num_written=3000))
    assert text == "3,000 steps recorded, 1,200 skipped"
    assert session.recorded(300, 1, Seen(num_written=16, problem="No space left on device")) == (
        "300 steps, 1 skipped, of which the record has 16, because it could not be written (No "
        "space left on device)"
    )


@pytest.mark.parametrize(
    ("words", "kept"),
    [
        ("train.py -o x", []),
        ("-o x --amp fp16 -q --guard=1.0 -m a.train", ["--amp=fp16", "--guard=1.0", "-m"]),
        ("--output=x --guard --policy fp32 -- train.py", ["--guard", "--policy=fp32"]),
    ],
)
def test_the_command_is_kept_without_its_folder(words, kept):
    given = _build_parser().parse(["run", *words.split()])
    given.command_line = ["run", *words.split()]
    assert list(_without_folder(given)) == kept
