"""The numbers of a run: steps, skips, scale, loss, where skips began; those of tensors too.

``golden/steps.txt`` and ``tensors.txt`` have, for each run of two tables, what is not as in a usual
run. After a change of what is counted, ``pytest tests/report --accept`` writes them anew.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import pytest
from tests.report import records
from tests.report.records import counted, note, policy, sample, skip, step, summary_of, tensor

from halfstep._tools.json import to_plain
from halfstep._tools.record.read import read_run
from halfstep._tools.report.summarize import summarize

GRADIENT = "parameter_gradient"
STUCK = "non-finite down to min_scale"


def written(*events):
    return lambda folder: records.write(folder, [records.header(), *events])


def in_precision(*events, dtype="float16"):
    """Return a function that writes a step and these events, under a policy with this dtype."""
    return written(*([] if dtype is None else [policy(dtype)]), step(1), *events)


def gradient(histogram, **values):
    return tensor(GRADIENT, "fc.weight", counted(histogram, **values))


def sampled(histogram, scale=1024.0, dtype="float16", **values):
    return in_precision(sample(1, [gradient(histogram, **values)], scale), dtype=dtype)


def of_sgd(number, **values):
    return step(number, optimizer="SGD", **values)


TAKEN = [step(n) for n in range(2, 12)]
REASONS = ["norm", "loss", "loss", "overflow", "loss", "norm"]
SCALES = [1024.0, 512.0, 1.0, 256.0, 256.0]
DOWN = [
    step(n, scale=scale, scale_after=after, taken=after > scale or n > 3)
    for n, (scale, after) in enumerate(pairwise(SCALES), start=1)
]
DIP = [step(n, scale=scale) for n, scale in enumerate((1024.0, 512.0, 1024.0), start=1)]
IN_TURN = [each for n in range(1, 21) for each in (step(n), of_sgd(n))]
IN_TURN[31], IN_TURN[33] = (skip(n, optimizer="SGD") for n in (16, 17))
FLUSHED = gradient({0: 60}, zeros=40, flushed=40)
AMAX = [8.0, 65504.0, 2.0**17, 1.0]
FEW = gradient({-22: 5, 0: 15}, zeros=10, flushed=5)
MANY = gradient({-22: 30, 3: 20}, zeros=20, flushed=10, nan=1, inf=2)
INSIDE = [
    *(gradient({0: 9}), tensor("output_gradient", "fc", counted({14: 1}), "float16")),
    tensor("output_gradient", "loss", counted({30: 1}), "float32"),
]


def several_ranks(folder):
    for rank in range(2):
        events = [records.header(rank=rank), skip(1), records.culprits(1, "head")]
        records.write(folder, events, rank)
    return folder


def restarted(num_starts, factor):
    """Return a function that writes starts that each skip three steps, then take twenty."""

    def write(folder):
        for n in range(num_starts):
            scale = 65536.0 / factor**n
            skips = [skip(i + 1, scale=scale / 2**i) for i in range(3)]
            taken = [step(4 + i, scale=scale / 8, scale_after=scale / 8) for i in range(20)]
            start = records.header(started=f"2026-01-01T{n:02}:00:00+00:00")
            records.write(folder, [start, *skips, *taken])
        return folder

    return write


# --- the runs -------------------------------------------------------------------------------------

RUNS = {
    "healthy": records.healthy,
    "failed": records.failed,
    "killed": records.killed,
    "only a header": records.only_header,
    "with skips: those of the start are told apart": records.with_skips,
    "reasons, the most frequent first": written(
        *(skip(n, reason=reason) for n, reason in enumerate(REASONS, start=1))
    ),
    "skips that never end are no start": written(
        *(skip(n, 65536.0 / 2**k) for k, n in enumerate(range(1, 13)))
    ),
    "a start, and ten steps": written(skip(1, 8.0), *TAKEN),
    "a start, and a skip after ten steps": written(skip(1, 8.0), *TAKEN, skip(12, 4.0), step(13)),
    "a start, and a skip after nine": written(skip(1, 8.0), *TAKEN[:-1], skip(11, 4.0), step(12)),
    "a bad loss is no start": written(skip(1, reason="loss"), step(2)),
    "a start ends at a larger scale": written(skip(1, 8.0), step(2), skip(3, 16.0), step(4)),
    "optimizers that share an iteration": written(*IN_TURN),
    "a scale before a trial is not the smallest": written(*DOWN),
    "a scale that fell without a skip is": written(*DIP),
    "the smallest of two optimizers": written(
        *(event for k in range(3) for event in (DIP[k], of_sgd(k + 1, scale=64.0)))
    ),
    "a scale that stays is the smallest": written(
        *(*DOWN[:2], step(3, scale=1.0), step(4, scale=1.0, scale_after=1.0))
    ),
    "no scale helped": written(step(1), skip(2, 1.0, reason=STUCK)),
    "without a scaler": records.bf16,
    "what nobody measured": written(step(1, loss=None, norm=None)),
    "ranks that saw the same skip": several_ranks,
    "policies that change": written(
        step(1), *(policy(step=n, text=t) for n, t in ((1, "a"), (5, "a"), (9, "b")))
    ),
    "notes are told once": written(step(9), note(3, "compiled"), note(8, "compiled")),
    "each start with a new scaler has a start of its own": restarted(20, 1),
    "a start with the old scaler has none": restarted(3, 8),
}
# Of these the tensors and gradients.
TENSORS = {
    "samples add up": in_precision(sample(1, [FEW]), sample(5, [MANY])),
    "headroom of 0": in_precision(
        *(sample(n, [gradient({1: 1}, amax=x)]) for n, x in enumerate(AMAX[:2], start=1))
    ),
    "headroom below 0": in_precision(
        *(sample(n, [gradient({1: 1}, amax=x)]) for n, x in enumerate(AMAX, start=1))
    ),
    **{
        f"float32 in a run in {dtype}": sampled({-26: 1}, dtype=dtype)
        for dtype in ("float16", "bfloat16", "float32")
    },
    "each sample by the policy of its step": in_precision(
        sample(1, [FLUSHED]), policy("bfloat16", step=5), sample(9, [FLUSHED])
    ),
    "zeros that underflow has made are lost": sampled({0: 60}, zeros=40, flushed=30),
    "what fp16 would lose, without a policy": sampled({-30: 60, 0: 40}, dtype=None),
    "what fp16 would lose, and did not": sampled({-30: 60, 0: 40}),
    "in bf16 no zero is told from another": sampled(
        {-20: 60}, 1.0, "bfloat16", zeros=40, flushed=40
    ),
    "only gradients of parameters have a window": in_precision(
        sample(1, [tensor(kind, "fc", counted({0: 1})) for kind in ("parameter", "output")])
    ),
    "a window does not depend on the scale, 1": sampled({-20: 1, 3: 1}, 1.0, flushed=0),
    "a window does not depend on the scale, 2^10": sampled({-10: 1, 13: 1}),
    "a scale that loses nothing is the best": sampled({-10: 1, 3: 1}),
    "what was flushed needs more": sampled({0: 9}, zeros=1, flushed=1),
    "so does what may be": sampled({-24: 1, 0: 9}, zeros=1, flushed=0, amin=2.0**-24),
    **{
        f"a sample that does not show what was flushed: {name}": in_precision(
            sample(1, [gradient({0: 9}, zeros=1, flushed=1)]), sample(2, [row], scale)
        )
        for name, row, scale in (
            ("the same scale", gradient({-5: 9}, flushed=0), 1024.0),
            ("a smaller one", gradient({-10: 9}, flushed=0), 512.0),
            ("a larger one, but all is zero", gradient({}, zeros=9), 65536.0),
        )
    },
    "gradients that never were in fp16 leave the window as it is": in_precision(
        *(
            sample(n, [gradient({-10: 1, 3: 1}, flushed=0), tensor(GRADIENT, "norm.weight", each)])
            for n, each in enumerate([records.norm_like(), counted({17: 9})], start=1)
        )
    ),
    "what was flushed stays lost at no larger scale": sampled({16: 9}, zeros=1, flushed=1),
    "no scale holds all": sampled({-34: 10, -28: 20, 14: 70}, 1.0, None),
    "no scale holds all, a larger one more": sampled({-36: 10, -26: 20, 9: 70}, 1.0, None),
    "an overflow bounds the window": in_precision(
        skip(2, 64.0), sample(2, [gradient({-24: 5, -23: 4, 0: 9}, inf=1, flushed=0)], 64.0)
    ),
    "a bad loss does not": in_precision(
        skip(2, 64.0, reason="loss"), sample(2, [gradient({0: 9}, inf=1)], 64.0)
    ),
    "an overflow without a sample bounds the window of all": in_precision(
        sample(1, [gradient({0: 9})]), skip(2, 256.0)
    ),
    "gradients inside the network bound the window of all": in_precision(sample(1, INSIDE)),
    "gradients that are all zero": sampled({}, zeros=5),
}


def leaves(value: Any, key: str) -> Iterator[tuple[str, str]]:
    """Yield the places of all numbers and words in a value, and them."""
    if isinstance(value, Mapping):
        for name, each in value.items():
            yield from leaves(each, f"{key}.{name}")
    elif isinstance(value, Sequence) and not isinstance(value, str):
        if all(isinstance(each, Mapping) for each in value):
            for number, each in enumerate(value):
                yield from leaves(each, f"{key}[{number}]")
        else:
            yield key, ", ".join(map(str, value))
    elif value is not None:
        yield key, f"{value:.4g}" if isinstance(value, float) else str(value)


def numbers_of(folder, parts):
    summary = to_plain(asdict(summary_of(folder)))
    return dict(leaf for part in parts for leaf in leaves(summary[part], part))


OF_RUNS = ("facts", "models", "policies", "products", "lower", "steps")
OF_RUNS += ("scale", "loss", "losses", "norm", "origins", "sampled", "notes", "have_weights_moved")


@pytest.mark.parametrize(
    ("runs", "parts", "usual"),
    [(RUNS, OF_RUNS, written(step(1))), (TENSORS, ("layers", "gradients"), sampled({0: 9}))],
    ids=["steps", "tensors"],
)
def test_what_is_counted(runs, parts, usual, tmp_path, golden, request):
    first = numbers_of(usual(tmp_path / "usual"), parts)
    lines = ["== a usual one", *map(": ".join, first.items())]
    for number, (name, write) in enumerate(runs.items()):
        found = numbers_of(write(tmp_path / str(number)), parts)
        keys = [key for key in first | found if found.get(key) != first.get(key)]
        lines += ["", f"== {name}", *(f"{key}: {found.get(key, 'none')}" for key in keys)]
    golden(f"{request.node.callspec.id}.txt", "\n".join([*lines, ""]))


def test_a_summary_is_the_same_twice_and_plain(tmp_path):
    run = read_run(records.with_skips(tmp_path))
    summary = summarize(run)
    assert summary == summarize(run)
    json.dumps(to_plain(asdict(summary)), allow_nan=False)


@pytest.mark.slow
def test_every_layer_of_a_large_run_is_told_with_all_its_samples(tmp_path):
    summary = summary_of(records.huge(tmp_path, num_steps=28, num_layers=200))
    assert len(summary.layers) == 200
    one_round = sum(records.bell(-8 + shift, 2).measured for shift in range(7))
    assert {(layer.num_samples, layer.measured) for layer in summary.layers} == {
        (28, 4 * one_round)
    }
