"""A comparison of two runs: numbers, layers, policies and versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

from halfstep._common import numbers
from halfstep._record.run import Kind
from halfstep._report.summary import Layer, PolicyInForce, Summary

MOST_LAYERS = 20
_Format: TypeAlias = Callable[[float], str]


@dataclass(frozen=True)
class ComparedNumber:
    """One line of a comparison.

    Attributes:
        name: What it is, such as ``"last loss"``.
        first: Of the first run, as text; ``"-"`` if it has none.
        second: Of the second run, as text.
        difference: First minus second, as text; empty where there is nothing to subtract.
        values: The two numbers; None where there is none.
    """

    name: str
    first: str
    second: str
    difference: str
    values: tuple[float | None, float | None]


@dataclass(frozen=True)
class LayerPair:
    """A layer that is in both runs.

    Attributes:
        first: In the first run.
        second: In the second run.
    """

    first: Layer
    second: Layer


@dataclass(frozen=True)
class RunComparison:
    """Two runs side by side.

    Attributes:
        first: The run of interest.
        second: The run it is compared with.
        entries: The numbers.
        layers: At most 20 layers of both runs that differ most in underflow or headroom, the most
            different first.
        only_first: Kind and name of layers that only the first has.
        only_second: Kind and name of layers that only the second has.
        policy: How the first policy differs from the second, as text; empty if it does not.
        versions: The versions, machine, command and so on that differ: name, first, second.
    """

    first: Summary
    second: Summary
    entries: tuple[ComparedNumber, ...]
    layers: tuple[LayerPair, ...]
    only_first: tuple[tuple[Kind, str], ...]
    only_second: tuple[tuple[Kind, str], ...]
    policy: str
    versions: tuple[tuple[str, str, str], ...]


def compare_runs(first: Summary, second: Summary) -> RunComparison:
    """Compare two runs; differences are the first minus the second."""
    mine = {(layer.kind, layer.name): layer for layer in first.layers}
    its = {(layer.kind, layer.name): layer for layer in second.layers}
    pairs = [LayerPair(layer, its[key]) for key, layer in mine.items() if key in its]
    pairs = sorted((pair for pair in pairs if _distance(pair)), key=_distance, reverse=True)
    return RunComparison(
        first=first,
        second=second,
        entries=tuple(_entries(first, second)),
        layers=tuple(pairs[:MOST_LAYERS]),
        only_first=tuple(key for key in mine if key not in its),
        only_second=tuple(key for key in its if key not in mine),
        policy=_policy_difference(first, second),
        versions=tuple(_versions(first, second)),
    )


def _distance(pair: LayerPair) -> float:
    """Return how different a layer is: 1 % more underflow counts as 1 bit less headroom."""
    first, second = pair.first, pair.second
    distance = 100 * abs(first.share_lost - second.share_lost)
    is_alike = first.format == second.format
    if is_alike and first.headroom is not None and second.headroom is not None:
        distance += abs(first.headroom - second.headroom)
    return distance


def _entries(first: Summary, second: Summary) -> Iterator[ComparedNumber]:
    mine, its = _numbers(first), _numbers(second)
    for name, (value, text) in mine.items():
        other = its[name][0]
        if value is None and other is None:
            continue
        yield ComparedNumber(
            name,
            numbers.NONE if value is None else text(value),
            numbers.NONE if other is None else text(other),
            "" if value is None or other is None else _difference(value, other, text),
            (value, other),
        )


def _difference(value: float, other: float, text: _Format) -> str:
    difference = value - other
    if difference == 0:
        return "0"
    return ("+" if difference > 0 else "-" if difference < 0 else "") + text(abs(difference))


def _numbers(summary: Summary) -> dict[str, tuple[float | None, _Format]]:
    """Return the numbers to compare, each with its format."""
    steps, loss, norm, scale = summary.steps, summary.loss, summary.norm, summary.scale
    gradients = summary.gradients
    lost = [layer.share_lost for layer in summary.of_kind("parameter_gradient")]
    return {
        "steps": (steps.num, _whole),
        "skipped steps": (steps.num_skipped, _whole),
        "skipped out of the ordinary": (steps.num_skipped_later, _whole),
        "share skipped": (steps.share_skipped, numbers.percent),
        "skipped in a row": (steps.longest_in_a_row, _whole),
        "last loss": (loss.last if loss else None, numbers.number),
        "mean of the last 20 losses": (loss.recent if loss else None, numbers.number),
        "smallest loss": (loss.min if loss else None, numbers.number),
        "steps with inf or NaN as loss": (loss.num_non_finite if loss else None, _whole),
        "last scale": (scale.last if scale else None, numbers.power),
        "smallest scale": (scale.min if scale else None, numbers.power),
        "mean of the last 20 norms": (norm.recent if norm else None, numbers.number),
        "gradient entries that underflow": (
            gradients.share_lost if gradients else None,
            numbers.percent,
        ),
        "of the worst parameter": (max(lost, default=None), numbers.percent),
        "time per step": (summary.facts.seconds_per_step, numbers.seconds),
        "duration": (summary.facts.duration, numbers.seconds),
    }


def _whole(value: float) -> str:
    return numbers.count(int(value))


# --- policies and versions ------------------------------------------------------------------------


def _policy_difference(first: Summary, second: Summary) -> str:
    mine, its = _policy(first), _policy(second)
    if mine is None or its is None or mine.text == its.text:
        return "" if (mine and mine.text) == (its and its.text) else _lines(mine, its)
    from halfstep._autocast.policy import Policy  # PyTorch, which most reports do without

    try:
        difference = str(Policy.parse(its.text).diff(Policy.parse(mine.text)))
    except ValueError:  # rules of another version: the texts have to do
        return _lines(mine, its)
    return difference


def _policy(summary: Summary) -> PolicyInForce | None:
    return summary.policies[-1] if summary.policies else None


def _lines(mine: PolicyInForce | None, its: PolicyInForce | None) -> str:
    lines = [f"{sign} {policy.text}" for sign, policy in (("-", its), ("+", mine)) if policy]
    return "\n".join(lines)


def _versions(first: Summary, second: Summary) -> Iterator[tuple[str, str, str]]:
    mine, its = _facts(first), _facts(second)
    for name, value in mine.items():
        if value != its[name]:
            yield name, value, its[name]


def _facts(summary: Summary) -> dict[str, str]:
    facts, policy = summary.facts, _policy(summary)
    return {
        "halfstep": facts.halfstep,
        "torch": facts.torch,
        "python": facts.python,
        "device": facts.device,
        "machine": facts.machine,
        "cores": str(facts.cores),
        "processes": str(facts.world_size),
        "command": " ".join(facts.command),
        "samples every": str(facts.every),
        "lower precision": policy.dtype if policy else numbers.NONE,
        "policy": policy.text if policy else numbers.NONE,
        "scaler": "yes" if summary.has_scaler else "no",
        "models": ", ".join(model.name for model in summary.models),
        "ended": facts.error or facts.state,
    }
