"""What the page and the lines say of a run."""

import io
import math
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console
from tests.report import records

from halfstep._numerics.statistics import Statistics
from halfstep._record.read import RecordUpdate
from halfstep._record.run import (
    Culprits,
    Diagnosed,
    Header,
    Measured,
    Model,
    Note,
    PolicySeen,
    Run,
    Sample,
    Step,
)
from halfstep._watch.screen import Page
from halfstep._watch.state import live_run
from halfstep._watch.text import end_line, heading, new_lines

NONE_LOST = dict.fromkeys(("fp16", "bf16", "e4m3", "e5m2"), 0)
HEADER = Header(command=("train.py",), machine="EPYC", device="cpu", every=4, world_size=1)


def taken(number, /, **values):
    step = Step(number, number * 0.5, "SGD", True, None, 1024.0, 1024.0, 1.5, 2.5)
    return replace(step, **values)


def skipped(number, **values):
    values = {"reason": "overflow", "scale_after": 512.0, "norm": math.inf} | values
    return taken(number, taken=False, **values)


def tensor(name, amax=1.0, lost=0, nan=0, inf=0, kind="output", dtype="float16"):
    underflow = NONE_LOST | {"fp16": lost}
    statistics = Statistics(100, 100, 0, nan, inf, amax, 0.5, 0, (100,), underflow, NONE_LOST)
    return Measured.of(kind, name, dtype, statistics)


def update(**values):
    run = Run(
        path=Path("runs/x"),
        header=HEADER,
        starts=(1,),
        ranks=(0,),
        models=(),
        policies=(),
        steps=(),
        samples=(),
        buffers=(),
        culprits=(),
        diagnoses=(),
        notes=(),
        left_out=(),
        error=None,
        error_rank=None,
        without_end=(0,),
        trace=None,
    )
    known = {name: values.pop(name) for name in tuple(values) if hasattr(run, name)}
    return RecordUpdate(
        Run(**vars(run) | known), is_anew=False, written=values.pop("written", 100.0)
    )


def draw(known, width=80, height=None, now=100.0, encoding="utf-8", **options):
    file = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=file, width=width, **options)
    console.print(Page(known, now, height))
    file.seek(0)
    return file.read()


def line_of(text, start):
    return next(line for line in text.splitlines() if line.startswith(start))


def test_heading():
    text = draw(
        live_run(
            None,
            update(
                steps=(taken(1), taken(5000, time=3725.5)),
                models=(Model(1, "GPT", 0, ()),),
                policies=(PolicySeen(1, "cpu", "float16", ""),),
            ),
        )
    )
    assert "runs/x  running" in text
    assert "step 5,000 · 1:02:05 · 1.34 steps/s" in text
    assert "train.py · GPT · float16" in text
    assert "EPYC · cpu" in text


@pytest.mark.parametrize(
    ("values", "now", "words"),
    [
        ({"without_end": ()}, 9999.0, "runs/x  ended\n"),
        ({"without_end": (), "error": "ValueError: [red]"}, 0.0, "ended with ValueError: [red]\n"),
        ({}, 129.0, "running"),
        ({}, 131.0, "silent: last event 0:00:31 ago; was it killed?"),
        ({"steps": (taken(1, time=0.0), taken(2, time=60.0))}, 690.0, "running"),
        ({"steps": (taken(1, time=0.0), taken(2, time=60.0))}, 710.0, "last event 0:10:10 ago"),
    ],
)
def test_how_it_stands(values, now, words):
    assert words in "".join(
        f"{line.rstrip()}\n"
        for line in draw(live_run(None, update(**values)), now=now).splitlines()
    )


@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
@pytest.mark.parametrize("width", [8, 11, 16, 20, 80])
@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({}, "running"),
        ({"without_end": ()}, "ended"),
        ({"without_end": (), "error": "ValueError: " + 90 * "x"}, "ended"),
        ({"written": 0.0}, "silent:"),
    ],
)
def test_a_long_path_gives_way_to_how_it_stands(values, word, width, encoding):
    known = live_run(None, update(path=Path("r" * 200), **values))
    first = draw(known, width=width, encoding=encoding).splitlines()[0]
    assert word in first
    assert len(first.rstrip()) <= width
    assert first.startswith("rrr") or width < 16


def test_a_path_that_fits_is_whole():
    known = live_run(None, update(path=Path("r" * 71)))
    assert draw(known).splitlines()[0] == "r" * 71 + "  running"


def test_curves_are_above_each_other_with_the_skips_below():
    steps = (taken(1, loss=8.0), skipped(2, loss=4.0), taken(3, loss=math.nan), taken(4, norm=9.0))
    text = draw(live_run(None, update(steps=steps)), width=100)
    assert line_of(text, "loss ").startswith("loss         2.5  █▄!▁")
    assert line_of(text, "loss ").rstrip().endswith("2.5 to 8")
    assert line_of(text, "scale").startswith("scale       2^10  ▅▅▅▅")
    assert line_of(text, "norm ").startswith("norm           9  ▁ ▁█")  # a gap where it was inf
    assert line_of(text, "skips").rstrip() == "skips          1   x"


@pytest.mark.parametrize("is_gan", [True, False])
def test_losses_of_optimizers_with_losses_of_their_own(is_gan):
    steps = tuple(
        taken(n, number=i, loss=float(n if i == 1 or not is_gan else 100 - n))
        for n in range(1, 9)
        for i in (1, 2)
    )
    seen = update(steps=steps)
    live = live_run(None, seen)
    first, second = (line for line in new_lines(live, seen, 1) if line.startswith("step 8"))
    assert ("loss 8 of SGD " in first, "loss 92 of SGD 2" in second) == (is_gan, is_gan)
    drawn = [line for line in draw(live).splitlines() if line.startswith("loss")]
    assert [line.rsplit("  ", 1)[-1] for line in drawn] == (
        ["SGD", "SGD 2"] if is_gan else ["1 to 8"]
    )


def test_names_of_optimizers_are_safe_for_the_terminal():
    names = ("SGD\u202e", "Adam\x1b[31m")
    steps = (
        taken(n, optimizer=name, loss=n * k) for n in (1, 2) for k, name in enumerate(names, 1)
    )
    drawn = draw(live_run(None, update(steps=tuple(steps))))
    assert r"SGD\u202e" in drawn
    assert r"Adam\x1b[31m" in drawn


def test_lost_updates_have_a_curve_and_the_share_of_the_latest_sample():
    lost = (
        taken(1, share_lost_updates=0.25),
        taken(2),
        taken(3, share_lost_updates=0.97),
        taken(4),
    )
    known = live_run(None, update(steps=lost))
    assert line_of(draw(known), "lost ").startswith("lost        97 %  ▁ █")
    assert new_lines(known, update(steps=lost[:1]), every=1) == [
        "step 1  loss 2.5  scale 2^10  norm 1.5  taken  lost updates 25 %"
    ]


def test_a_norm_that_is_not_finite_in_a_step_that_was_taken_is_marked():
    known = live_run(None, update(steps=(taken(1), taken(2, norm=math.inf))))
    assert "▅!" in line_of(draw(known), "norm")


def test_what_was_never_seen_is_said():
    steps = (taken(1, loss=None, scale=None, scale_after=None, norm=None),)
    text = draw(live_run(None, update(steps=steps)))
    assert line_of(text, "loss").split() == ["loss", "-", "not", "seen"]
    assert line_of(text, "scale").split() == ["scale", "-", "no", "scaler"]
    assert line_of(text, "norm").split() == ["norm", "-", "not", "measured"]


def test_skips_with_reason_and_origin_also_if_it_comes_later():
    known = live_run(None, update(steps=(taken(1), skipped(2), skipped(3, reason="loss"))))
    known = live_run(known, update(culprits=(Culprits(2, "SGD", "blocks.0", ("w",), 1, 0),)))
    text = draw(known)
    assert "2 of 3 steps were skipped" in text
    rows = [line.split() for line in text.splitlines() if "→" in line]
    assert rows == [
        ["3", "loss", "2^10", "→", "2^9", "-"],
        ["2", "overflow", "2^10", "→", "2^9", "blocks.0"],
    ]


def test_the_worst_layers_come_first():
    tensors = (
        tensor("good"),
        tensor("small", lost=40, kind="parameter_gradient"),
        tensor("large", amax=60000.0),
        tensor("broken", nan=2, inf=1, kind="output_gradient"),
    )
    text = draw(live_run(None, update(samples=(Sample(8, 1024.0, tensors),))))
    table = text[text.index("worst layers in step 8") :].splitlines()
    rows = [line.split() for line in table[2:]]
    assert [row[0] for row in rows] == ["broken", "large", "small", "good"]
    assert rows[0][1:] == ["output", "gradient", "16.0", "0", "%", "3"]
    assert rows[1][1:] == ["output", "0.1", "0", "%", "0"]
    assert rows[2][1:] == ["gradient", "16.0", "40", "%", "0"]
    assert "NaN, inf" in table[1]


def test_names_cannot_colour_the_page_or_break_it():
    tensors = (tensor("[red]evil[/red]"), tensor("x\x1b[31m\ny"))
    known = live_run(
        None, update(samples=(Sample(1, 1.0, tensors),), notes=(Note(1, "[/b] a\rb"),))
    )
    text = draw(known)
    assert "[red]evil[/red]" in text
    assert r"x\x1b[31m\ny" in text
    assert r"step 1: [/b] a\rb" in text
    assert "\x1b" not in text


def full():
    tensors = tuple(tensor(f"blocks.{i}.a.rather.long.name.of.a.layer" * 2) for i in range(30))
    return live_run(
        None,
        update(
            steps=tuple(skipped(i) if i % 9 == 0 else taken(i) for i in range(1, 3000)),
            samples=(Sample(1, 1.0, tensors),),
            notes=tuple(Note(i, "something rather long to say " * 5) for i in range(9)),
            diagnoses=(diagnosed(9, "a_rather_long_name" * 9),),
            culprits=tuple(Culprits(i, "SGD", "名" * 90, (), 1, 0) for i in range(2970, 3000)),
            header=replace(HEADER, command=("train.py",) * 50),
        ),
    )


@pytest.mark.parametrize("width", [60, 79, 80, 200])
@pytest.mark.parametrize("height", [10, 16, 24, 60])
def test_it_fits(width, height):
    from rich.cells import cell_len

    drawn = draw(full(), width=width, height=height).splitlines()
    assert len(drawn) <= height
    assert max(cell_len(line) for line in drawn) <= width
    assert any(line.startswith("skips") for line in drawn)
    if height >= 24:
        assert {"worst", "notes"} <= {line.split()[0] for line in drawn if line.strip()}
    # Numbers are never cut: names give way.
    assert not any("headr…" in line for line in drawn)


def test_without_unicode_it_is_drawn_in_ascii():
    known = live_run(None, update(steps=(taken(1, loss=9.0), taken(2), skipped(3))))
    text = draw(known, width=60, encoding="ascii")
    assert text.isascii()
    assert "#__" in line_of(text, "loss")
    assert "2^10 -> 2^9" in text


def test_without_colour_the_marks_stay(monkeypatch):
    known = live_run(None, update(steps=(taken(1), taken(2, loss=math.nan), skipped(3))))
    coloured = draw(known, force_terminal=True, color_system="standard")
    plain = draw(known, force_terminal=True, color_system="standard", no_color=True)
    assert "\x1b[1;31m!" in coloured
    assert "31m" not in plain
    assert "!" in plain


def diagnosed(number, name="linear", **values):
    return Diagnosed(0, number, records.found(bad=records.bad_op(name=name), **values))


def test_the_newest_diagnosis_is_a_line():
    known = live_run(None, update(steps=(taken(1),), diagnoses=(diagnosed(3), diagnosed(7, "exp"))))
    known = live_run(known, update(steps=(taken(2),)))
    assert line_of(draw(known, width=200), "step 7 went bad: range of float16: exp (addmm)")
    assert "step 3" not in draw(known)
    hostile = live_run(None, update(diagnoses=(diagnosed(1, "[b]\x1b[31m"),)))
    assert r"[b]\x1b[31m" in line_of(draw(hostile, width=200), "step 1 went bad")


def test_a_new_record_replaces_what_was_known():
    known = live_run(None, update(steps=(taken(1), skipped(2))))
    new = update(steps=(taken(1),))
    known = live_run(known, RecordUpdate(new.new, is_anew=True, written=1.0))
    assert (known.num_steps, known.num_skipped) == (1, 0)


# --- lines ----------------------------------------------------------------------------------------


def test_lines_are_every_fourth_step_each_skip_and_each_sample():
    new = update(
        steps=(*(taken(i) for i in range(1, 6)), skipped(6), taken(7, loss=math.nan)),
        samples=(Sample(4, 1.0, (tensor("a\nb", lost=12), tensor("good"))),),
        culprits=(Culprits(6, "SGD", "fc", ("fc.weight",), 3, 0),),
        diagnoses=(diagnosed(6),),
        notes=(Note(1, "something"),),
    )
    assert new_lines(live_run(None, new), new, every=None) == [
        "note 1  something",
        "step 1  loss 2.5  scale 2^10  norm 1.5  taken",
        "step 4  loss 2.5  scale 2^10  norm 1.5  taken",
        r"sample 4  headroom 16.0 bits  underflow 12 %  nan 0  inf 0  output a\nb",
        "sample 4  headroom 16.0 bits  underflow 0 %  nan 0  inf 0  output good",
        "step 6  loss 2.5  scale 2^10  norm inf  skipped: overflow, scale now 2^9",
        "skip 6  began in fc  parameters 3  rank 0",
        "diagnosis 6  rank 0  range of float16: linear (addmm) in blocks.1.mlp, forward needs a "
        "wider dtype, in float32 it is finite",
    ]
    numbers = [line.split()[1] for line in new_lines(live_run(None, new), new, every=3)]
    assert numbers == ["1", "1", "3", "4", "4", "6", "6", "6"]


def test_float32_that_no_autocast_lowers_would_underflow():
    new = update(
        steps=(taken(1), taken(2)),
        samples=(Sample(2, 1.0, (tensor("fc", lost=3, dtype="float32"),)),),
    )
    known = live_run(None, new)
    line = "sample 2  headroom 16.0 bits  would underflow in fp16 3 %  nan 0  inf 0  output fc"
    assert line in new_lines(known, new, every=2)
    assert "would underflow in fp16" in draw(known)
    lowered = update(
        steps=new.new.steps,
        samples=new.new.samples,
        policies=(PolicySeen(1, "cpu", "float16", ""),),
    )
    assert line.replace("would underflow in fp16", "underflow") in new_lines(
        live_run(None, lowered), lowered, every=2
    )


def test_first_and_last_line():
    new = update(steps=(taken(1), skipped(2)), without_end=(), ranks=(0, 1))
    known = live_run(None, new)
    assert heading(known) == "run runs/x  train.py, EPYC, cpu, 2 ranks"
    assert end_line(known, 0.0) == "ended  step 2, 0:00:01, 2 steps/s, skipped 1 of 2 (50 %)"
