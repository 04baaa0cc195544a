"""Two runs side by side."""

import json
import re

import pytest
from tests.report import records
from tests.report.records import summary_of

from halfstep._tools.report.compare_runs import compare_runs
from halfstep._tools.report.text import comparison_json, comparison_text


@pytest.fixture
def skipping(tmp_path):
    return summary_of(records.with_skips(tmp_path / "skipping"))


def written(name, *events, **header):
    """Return a function that writes a run of one step and these events."""
    first = [records.header(**header), records.step(1)]
    return lambda folder: records.write(folder / name, [*first, *events])


def with_policy(name, text, dtype="float16", **header):
    return written(name, records.policy(dtype, text), **header)


def lossy(name, *losses, seconds=0.5, number=100, **values):
    """Return a function that writes a run whose loss falls to one of these, by optimizer."""
    events = [
        records.step(n, number=place, loss=start / n + loss, time=n * seconds)
        for n in range(1, number + 1)
        for place, (start, loss) in enumerate(((4.0, loss) for loss in losses), start=1)
    ]
    first = [records.header(**values), records.model_event(), records.policy()]
    return lambda folder: records.write(folder / name, [*first, *events, records.end(9.0, 100)])


def made(write):
    return lambda folder: write(folder / write.__name__)


HEALTHY, SKIPPING, BF16 = made(records.healthy), made(records.with_skips), made(records.bf16)
NO_POLICY, SOME_POLICY = written("none"), with_policy("some", "standard")
NAN = lossy("bad", float("nan"))
RUNS = {
    "with skips, and a healthy one": (SKIPPING, HEALTHY),
    "what one run lacks has no difference": (HEALTHY, BF16),
    "what both lack is left out": (BF16, BF16),
    "a run against itself": (SKIPPING, SKIPPING),
    "many runs": (HEALTHY, SKIPPING, SKIPPING, SKIPPING),
    "another policy": (
        with_policy("b", "standard; exp:leave; @head:fp32"),
        with_policy("a", "standard"),
    ),
    "a policy of another version": (
        with_policy("b", "standard"),
        with_policy("a", "standard; no_such_op:fp32"),
    ),
    "a policy, and none": (SOME_POLICY, NO_POLICY),
    "none, and a policy": (NO_POLICY, SOME_POLICY),
    "no policies": (NO_POLICY, NO_POLICY),
    "other versions and settings": (
        with_policy("b", "standard", "bfloat16", command=["b.py"]),
        with_policy("a", "standard", torch="2.12.0", command=["a.py"]),
    ),
    "losses of four": [
        lossy(name, loss) for name, loss in zip("abcd", (3.0, 1.005, 1.0, 2.0), strict=True)
    ],
    "a lower loss, and a faster step": (
        lossy("a", 2.0),
        lossy("b", 1.0, seconds=0.25),
        lossy("c", 3.0),
    ),
    "losses that hardly differ": (lossy("a", 2.0), lossy("b", 2.01)),
    "one went bad": (NAN, lossy("good", 2.0)),
    "both went bad": (NAN, NAN),
    "other losses": (lossy("a", 2.0), lossy("b", 90.0)),
    "other numbers of steps": (lossy("a", 2.0), lossy("b", 2.0, number=50)),
    "other optimizers": (lossy("a", 2.0), lossy("b", 2.0, 2.0, 3.0)),
    "other models": [written(str(size), records.model_event(parameters=size)) for size in (10, 20)],
    "other machines": (lossy("a", 2.0), lossy("b", 1.0, seconds=0.1, machine="another")),
    "GANs": (lossy("a", 1.0, 2.0), lossy("b", 1.5, 3.0)),
}


def test_what_is_said_of_runs_side_by_side(tmp_path, golden):
    """``golden/side_by_side.txt`` has it; ``pytest tests/report --accept`` writes it anew."""
    parts = []
    for number, (name, writes) in enumerate(RUNS.items()):
        runs = [summary_of(w(tmp_path / f"{number}{n}")) for n, w in enumerate(writes)]
        parts += [f"== {name}", comparison_text(compare_runs(*runs)), ""]
    golden("side_by_side.txt", re.sub(rf"{tmp_path}/\d+/", "", "\n".join(parts)))


def test_hostile_runs_can_be_compared(tmp_path, skipping):
    comparison = compare_runs(summary_of(records.hostile(tmp_path / "hostile")), skipping)
    assert "\x1b" not in comparison_text(comparison)


def test_json_is_strict(tmp_path, skipping):
    comparison = compare_runs(summary_of(records.failed(tmp_path / "failed")), skipping)
    values = json.loads(json.dumps(comparison_json(comparison), allow_nan=False))
    assert (values["schema"], values["kind"]) == (1, "comparison")
    assert values["verdict"]["text"] == comparison.verdict.text
    assert values["runs"][0]["loss"]["last"] == "nan"
    assert values["runs"][1]["steps"]["num"] == 100
    (skipped,) = [entry for entry in values["entries"] if entry["name"] == "skipped steps"]
    assert skipped["values"] == [3, 5]
