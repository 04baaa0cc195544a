"""A comparison of two runs: numbers, layers, policies and versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from halfstep._common.numbers import NONE, count, number, percent, power, seconds
from halfstep._record.run import Kind, PolicySeen
from halfstep._report.summary import Layer, Summary

MOST_LAYERS = 20


@dataclass(frozen=True)
class ComparedNumber:
    """A number of both runs, as text and as it is; None, ``"-"``, where there is none.

    The difference is the first minus the second, empty where there is nothing to subtract.
    """

    name: str
    first: str
    second: str
    difference: str
    values: tuple[float | None, float | None]


@dataclass(frozen=True)
class LayerPair:
    """A layer that is in both runs."""

    first: Layer
    second: Layer


@dataclass(frozen=True)
class RunComparison:
    """The run of interest beside the run it is compared with.

    Attributes:
        layers: At most 20 layers of both runs that differ most in underflow, headroom or lost
            updates, the most different first.
        only_first: Kind and name of layers that only the first has, as for the second.
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


_NUMBERS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("steps", "steps.num", count),
    ("skipped steps", "steps.num_skipped", count),
    ("skipped out of the ordinary", "steps.num_skipped_later", count),
    ("share skipped", "steps.share_skipped", percent),
    ("skipped in a row", "steps.longest_in_a_row", count),
    ("last loss", "loss.last", number),
    ("mean of the last 20 losses", "loss.recent", number),
    ("smallest loss", "loss.min", number),
    ("steps with inf or NaN as loss", "loss.num_non_finite", count),
    ("last scale", "scale.last", power),
    ("smallest scale", "scale.min", power),
    ("mean of the last 20 norms", "norm.recent", number),
    ("gradient entries that underflow (of float32: in fp16)", "gradients.share_lost", percent),
    ("of the worst parameter", "worst_share_lost", percent),
    ("mean of the last 20 shares of lost updates", "lost_updates.recent", percent),
    ("of the worst weight", "worst_share_lost_updates", percent),
    ("time per step", "facts.seconds_per_step", seconds),
    ("duration", "facts.duration", seconds),
)
"""What is compared: its name, its place in a summary, and how it is written."""


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
        policy=_policy_difference(first.policy, second.policy),
        versions=tuple(_versions(first, second)),
    )


def _distance(pair: LayerPair) -> float:
    """Return how different a layer is: 1 % more is lost, or 1 bit of headroom, counts as 1."""
    first, second = pair.first, pair.second
    distance = 100 * abs(first.share_lost - second.share_lost)
    if first.share_lost_updates is not None and second.share_lost_updates is not None:
        distance += 100 * abs(first.share_lost_updates - second.share_lost_updates)
    is_alike = first.format == second.format
    if is_alike and first.headroom is not None and second.headroom is not None:
        distance += abs(first.headroom - second.headroom)
    return distance


def _entries(first: Summary, second: Summary) -> Iterator[ComparedNumber]:
    for name, key, text in _NUMBERS:
        mine, its = first.at(key), second.at(key)
        if mine is None and its is None:
            continue
        yield ComparedNumber(
            name,
            first=NONE if mine is None else text(mine),
            second=NONE if its is None else text(its),
            difference="" if mine is None or its is None else _difference(mine - its, text),
            values=(mine, its),
        )


def _difference(difference: float, text: Callable[[Any], str]) -> str:
    if difference == 0:
        return "0"
    return ("+" if difference > 0 else "-" if difference < 0 else "") + text(abs(difference))


# --- policies and versions ------------------------------------------------------------------------


def _policy_difference(mine: PolicySeen | None, its: PolicySeen | None) -> str:
    if (mine and mine.text) == (its and its.text):
        return ""
    if mine is not None and its is not None:
        from halfstep._autocast.policy import Policy  # PyTorch, which most reports do without

        with suppress(ValueError):  # rules of another version: the texts have to do
            return str(Policy.parse(its.text).diff(Policy.parse(mine.text)))
    return "\n".join(f"{sign} {seen.text}" for sign, seen in (("-", its), ("+", mine)) if seen)


def _versions(first: Summary, second: Summary) -> Iterator[tuple[str, str, str]]:
    mine, its = _facts(first), _facts(second)
    for name, value in mine.items():
        if value != its[name]:
            yield name, value, its[name]


def _facts(summary: Summary) -> dict[str, str]:
    facts, policy = summary.facts, summary.policy
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
        "lower precision": policy.dtype if policy else NONE,
        "policy": policy.text if policy else NONE,
        "scaler": "yes" if summary.has_scaler else "no",
        "models": ", ".join(model.name for model in summary.models),
        "ended": facts.error or facts.state,
    }
