"""Comparisons of runs: a verdict, numbers and versions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from halfstep._common.numbers import NONE, count, listed, number, percent, power, seconds
from halfstep._common.text import Code, Sentence, say
from halfstep._common.text import names as names_in_text
from halfstep._tools.report.summary import Summary

ALIKE = 0.02  # the relative difference up to which losses, times and lengths are about the same
_SAME_LOSS = 2.0  # the factor above which first losses belong to different tasks or units


@dataclass(frozen=True)
class ComparedNumber:
    """One number of each run, as text and as a value: ``"-"`` and None if a run lacks it.

    The difference is the first run minus the second; it is empty for more than two runs, or if one
    lacks the number.
    """

    name: str
    texts: tuple[str, ...]
    values: tuple[float | None, ...]
    difference: str


@dataclass(frozen=True)
class RunComparison:
    """A comparison of the first run, the one of interest, with the others.

    Attributes:
        names: A short name for each run.
        verdict: Which run is better, or why this is unknown.
        versions: The policy, versions, machine, command and so on that differ: name, and a text per
            run.
    """

    runs: tuple[Summary, ...]
    names: tuple[str, ...]
    verdict: Sentence
    entries: tuple[ComparedNumber, ...]
    versions: tuple[tuple[str, tuple[str, ...]], ...]


@dataclass(frozen=True)
class _Number:
    """A compared number: its name, its key in a summary, and its format as text."""

    name: str
    key: str
    text: Callable[[Any], str]


_LOSSES = (
    _Number("last loss", "last", number),
    _Number("mean of the last 20 losses", "recent", number),
    _Number("smallest loss", "min", number),
)
_NUMBERS = (
    _Number("steps", "steps.num", count),
    _Number("skipped steps", "steps.num_skipped", count),
    _Number("skipped other than by dynamic scaling", "steps.num_skipped_later", count),
    _Number("share skipped", "steps.share_skipped", percent),
    _Number("skipped in a row", "steps.longest_in_a_row", count),
    _Number("steps with inf or NaN as loss", "loss.num_non_finite", count),
    _Number("last scale", "scale.last", power),
    _Number("smallest scale", "scale.min", power),
    _Number("mean of the last 20 norms", "norm.recent", number),
    _Number(
        "gradient entries known to underflow (of float32: in fp16)", "gradients.share_lost", percent
    ),
    _Number("of the worst parameter", "worst_share_lost", percent),
    _Number("lost updates of the last 20 sampled steps", "lost_updates.recent", percent),
    _Number("of the worst weight", "worst_share_lost_updates", percent),
    _Number("time per step", "facts.seconds_per_step", seconds),
    _Number("duration", "facts.duration", seconds),
)


def compare_runs(*runs: Summary) -> RunComparison:
    """Compare two or more runs; the first is the one of interest."""
    names, why_not = _names(runs), tuple(_why_not(runs))
    facts = [_facts(run) for run in runs]
    versions = ((name, tuple(each[name] for each in facts)) for name in facts[0])
    return RunComparison(
        runs=runs,
        names=names,
        verdict=_verdict(runs, names, why_not),
        entries=tuple(_entries(runs)),
        versions=tuple(each for each in versions if len(set(each[1])) > 1),
    )


def _names(runs: Sequence[Summary]) -> tuple[str, ...]:
    """Return the names of the folders; letters if these are not unique."""
    names = tuple(PurePath(run.path).name for run in runs)
    are_different = all(names) and len(set(names)) == len(names)
    return names if are_different else tuple(chr(ord("A") + n) for n in range(len(runs)))


# --- the verdict ----------------------------------------------------------------------------------


def _verdict(runs: Sequence[Summary], names: Sequence[str], why_not: Sequence[str]) -> Sentence:
    """Return which run is best: a failed run loses to others; among these, the loss decides."""
    good = [n for n, run in enumerate(runs) if not _has_failed(run)]
    bad = [name for n, name in enumerate(names) if n not in good]
    if bad and good:
        better = _listed([names[n] for n in good])
        what = f"{' is' if len(good) == 1 else ' are'} better: "
        end = " went bad: its loss, weights or skips did not recover."
        return say("warning", *better, what, *_listed(bad), end)
    if bad:
        return say(
            "bad", "All of these runs went bad: their loss, weights or skips did not recover."
        )
    if why_not:
        return say("warning", f"The losses of these runs cannot be compared: {listed(why_not)}.")
    losses = [run.loss.recent if run.loss and not run.losses else None for run in runs]
    known = [loss for loss in losses if loss is not None]
    if len(known) < len(runs):
        return say("notice", "The losses of several optimizers do not say which run is better.")
    limit = min(known) + ALIKE * max(map(abs, known))
    ascending = sorted(range(len(runs)), key=known.__getitem__)  # as the numbers are read
    best = [n for n in ascending if known[n] <= limit]
    others = [n for n in ascending if n not in best]
    said: list[str | Code] = [*_listed([names[n] for n in best])]
    if not others:
        said = ["The losses of ", *said, " are about the same"]
    else:
        have = "has" if len(best) == 1 else "have"
        said += [f" {have} a lower loss than ", *_listed([names[n] for n in others])]
    order = (*best, *others)
    values, times = listed([number(known[n]) for n in order]), _times([runs[n] for n in order])
    of = "the last 20" if any(run.steps.num > 20 for run in runs) else "all steps"
    return say("good", *said, f" ({values}, means of {of}){times}.")


def _listed(names: Sequence[str]) -> Iterator[str | Code]:
    return names_in_text(names, most=len(names))


def _has_failed(run: Summary) -> bool:
    return not run.has_recovered or run.steps.num_taken == 0


def _why_not(runs: Sequence[Summary]) -> Iterator[str]:
    if len({(model.name, model.num_parameters) for run in runs for model in run.models}) > max(
        len(run.models) for run in runs
    ):
        yield "their models differ"
    if any(run.loss is None for run in runs):
        yield "not every run has one"
    if len({tuple(loss.optimizer for loss in run.losses) for run in runs}) > 1:
        yield "their optimizers differ"
    first = [abs(run.loss.first) for run in runs if run.loss]
    if first and all(map(math.isfinite, first)) and max(first) > _SAME_LOSS * min(first):
        begin = listed([number(run.loss.first) for run in runs if run.loss])
        yield f"they begin at {begin}, so they are not the same loss"
    lengths = {run.steps.num for run in runs}
    if max(lengths) > (1 + ALIKE) * min(lengths):
        yield f"the runs have {listed([count(run.steps.num) for run in runs])} steps"


def _times(runs: Sequence[Summary]) -> str:
    """Return how long a step took; which run is faster depends on how much that varies."""
    times = [run.facts.seconds_per_step or 0.0 for run in runs]
    headers = [(run.facts.header, run.facts.world_size) for run in runs]
    if len({(header.device, header.machine, num) for header, num in headers}) > 1:
        return "; their times cannot be compared"
    return f"; a step took {listed(list(map(seconds, times)))} (medians)" if all(times) else ""


# --- numbers --------------------------------------------------------------------------------------


def _entries(runs: Sequence[Summary]) -> Iterator[ComparedNumber]:
    """Yield the numbers that any run has, with a loss per optimizer if these differ."""
    head, *rest = _NUMBERS
    yield from _compared(head.name, head, [run.at(head.key) for run in runs])
    optimizers = dict.fromkeys(loss.optimizer for run in runs for loss in run.losses)
    for name in optimizers:
        curves = [next((x.curve for x in run.losses if x.optimizer == name), None) for run in runs]
        for each in _LOSSES:
            values = [None if curve is None else getattr(curve, each.key) for curve in curves]
            yield from _compared(f"{each.name} of {name}", each, values)
    for each in () if optimizers else _LOSSES:
        yield from _compared(each.name, each, [run.at(f"loss.{each.key}") for run in runs])
    for each in rest:
        if each.key != "norm.recent" or all(run.num_optimizers == 1 for run in runs):
            yield from _compared(each.name, each, [run.at(each.key) for run in runs])


def _compared(name: str, what: _Number, values: Sequence[Any]) -> Iterator[ComparedNumber]:
    known = [value for value in values if value is not None]
    if not known:
        return
    is_pair = len(known) == len(values) == 2
    yield ComparedNumber(
        name,
        texts=tuple(NONE if value is None else what.text(value) for value in values),
        values=tuple(values),
        difference=_difference(values[0], values[1], what.text) if is_pair else "",
    )


def _difference(first: float, second: float, text: Callable[[Any], str]) -> str:
    difference = first - second
    if difference == 0:
        return "0"
    if text is power and second:
        return f"x {power(first / second)}"
    return ("+" if difference > 0 else "-" if difference < 0 else "") + text(abs(difference))


# --- versions -------------------------------------------------------------------------------------


def _facts(summary: Summary) -> dict[str, str]:
    facts, header, policy = summary.facts, summary.facts.header, summary.policy
    where = ("halfstep", "torch", "python", "device", "machine", "cores")
    return {name: str(getattr(header, name)) for name in where} | {
        "processes": str(facts.world_size),
        "command": " ".join(header.command),
        "samples every": str(header.every),
        "lower precision": policy.dtype if policy else NONE,
        "policy": policy.text if policy else NONE,
        "scaler": "no" if summary.scale is None else "yes",
        "models": ", ".join(model.name for model in summary.models),
        "ended": facts.error or facts.state,
    }
