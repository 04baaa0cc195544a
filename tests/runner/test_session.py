"""What is around a program, without running one."""

import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from halfstep import preset
from halfstep.runner import session
from halfstep.runner.session import Options, Program, Session

PROGRAM = Program("train.py", ["--lr", "1"], is_module=False)


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
    def mixed_precision(dtype, say, *, policy):
        seen.events.append((dtype, policy))
        say("a line")
        yield
        seen.events.append("left")

    monkeypatch.setattr("halfstep.runner.mixed_precision.mixed_precision", mixed_precision)
    Session(PROGRAM, options(amp=torch.float16)).run()
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
    Session(PROGRAM, options(is_quiet=quiet)).run()
    seen.close()
    assert capsys.readouterr().err.count("\n") == lines


def test_the_last_word_may_go_nowhere(seen, monkeypatch, tmp_path):
    """As after ``halfstep run train.py 2>&1 | head``."""
    with (tmp_path / "closed").open("w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        Session(PROGRAM, options()).run()
    seen.close()


def test_the_name_of_the_folder(seen, tmp_path):
    Session(PROGRAM, options()).run()
    seen.close()
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("train-2")
    assert Program("pkg.sub.fit", [], is_module=True).stem == "fit"
    assert Program("a.b/fit.v2.py", [], is_module=False).stem == "fit.v2"
