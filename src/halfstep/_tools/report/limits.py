"""Limits for a run, and their violations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

from halfstep._common.numbers import at_steps, count, listed, number, percent, things
from halfstep._common.text import one_line
from halfstep._tools.report.about_diagnoses import headline, is_matter_of_skips, when
from halfstep._tools.report.about_steps import (
    by_scaling,
    known_origins,
    lacks_end,
    on_error_rank,
    on_ranks,
)
from halfstep._tools.report.about_tensors import are_most_lost
from halfstep._tools.report.summary import Layer, Summary

_Shares: TypeAlias = list[tuple[float, Layer]]
"""Layers, each with the share to compare with a limit."""


@dataclass(frozen=True)
class Limits:
    """The limits of a run; a share of None is not checked.

    Attributes:
        skipped: Largest share of skipped steps, without the normal skips of dynamic scaling, at the
            start and after growth.
        underflow: Largest share of the gradient entries of one parameter that may underflow.
        overflow: Largest share of the entries of one output, or of the weights of one parameter,
            that may be inf, NaN, or too large for their format.
        lost_updates: Largest share of the updates of one weight that rounding may lose.
        allow_nan: Whether the loss and buffers may be inf or NaN, and steps may have gone bad.
        allow_unfinished: Whether the run may lack its end, or have ended with an error.
    """

    skipped: float | None = None
    underflow: float | None = None
    overflow: float | None = None
    lost_updates: float | None = None
    allow_nan: bool = False
    allow_unfinished: bool = False


MOST_LINES = 5
"""The largest number of layers beyond a limit, or of bad places, with a line of their own."""
DEFAULTS = Limits(skipped=0.01, underflow=0.05, overflow=0.0, lost_updates=0.5)
"""The default limits."""


def defaults(summary: Summary) -> Limits:
    """Return the default limits for a run.

    Underflow has no limit if all gradients are float32 and autocast lowered nothing; lost updates
    have none if all weights are float32.
    """
    has_low_updates = any(layer.is_low_weight and layer.updates for layer in summary.layers)
    return replace(
        DEFAULTS,
        underflow=DEFAULTS.underflow if summary.can_underflow else None,
        lost_updates=DEFAULTS.lost_updates if has_low_updates else None,
    )


def violations(summary: Summary, limits: Limits) -> tuple[str, ...]:
    """Return a line for each exceeded limit, with the measured value, the limit and the place."""
    found = (
        *_course(summary, limits),
        *(() if limits.allow_nan else _diagnosed(summary)),
        *_skipped(summary, limits.skipped),
        *_underflow(summary, limits.underflow),
        *_overflow(summary, limits.overflow),
        *_lost_updates(summary, limits.lost_updates),
    )
    return tuple(one_line(line) for line in found)


def pass_line(summary: Summary, limits: Limits) -> str:
    """Return the measured values and the limits of a run that passes."""
    steps = summary.steps
    parts = [things(steps.num, "step")]
    if limits.skipped is not None:
        normal = f", besides {count(steps.num_by_scaling)} {by_scaling(steps)}"
        parts.append(
            f"{percent(steps.share_skipped_later)} skipped"
            f"{normal if steps.num_by_scaling else ''} (limit {percent(limits.skipped)})"
        )
    for limit, layers, what in (
        (limits.underflow, _gradients(summary), summary.underflow_verb),
        (limits.overflow, _held_tensors(summary), "overflow"),
        (limits.lost_updates, _stepped_weights(summary), "of the updates lost"),
    ):
        if limit is not None:
            share = max(share for share, _ in layers)
            parts.append(f"at most {percent(share)} {what} (limit {percent(limit)})")
    return ", ".join(parts)


def _course(summary: Summary, limits: Limits) -> Iterator[str]:
    facts, loss, steps = summary.facts, summary.loss, things(summary.steps.num, "step")
    if not limits.allow_unfinished:
        if facts.error is not None:
            where = on_error_rank(facts)
            yield f"the run ended after {steps}, with an error{where}: {facts.error}"
        elif facts.state == "no end":
            yield (
                f"the record has no end after {steps}: the run was "
                "killed, or is still running (--allow-unfinished)"
            )
        if lacks_end(facts):
            yield f"the record has no end{on_ranks(facts.without_end, facts)} (--allow-unfinished)"
    if not limits.allow_nan and loss is not None and loss.first_non_finite is not None:
        yield (
            f"the loss was inf or NaN in {things(loss.num_non_finite, 'step')}, first in step "
            f"{loss.first_non_finite}{on_ranks(loss.ranks, facts)}, last {number(loss.last)} "
            "(--allow-nan)"
        )
    if not limits.allow_nan and (buffers := summary.buffers) is not None:
        where = on_ranks(buffers.ranks, facts)
        yield (
            f"{things(buffers.num, 'buffer')} of the model stayed inf or NaN from step "
            f"{buffers.step} on{where}: {listed(buffers.names[:3])} (--allow-nan)"
        )
    for note in summary.notes:
        if "ranks disagree" in note.text:
            yield note.text


def _diagnosed(summary: Summary) -> Iterator[str]:
    """Yield the diagnosed places; a too large scale counts under the limit on skips instead."""
    bad = [
        place
        for place in summary.bad_places
        if place.diagnosis.verdict != "none" and not is_matter_of_skips(place, summary)
    ]
    for place in bad[:MOST_LINES]:
        cure = place.diagnosis.cure
        what = "" if cure is None else f"; cure: {cure.text}"
        yield f"{when(place, summary)} went bad: {headline(place.diagnosis)}{what} (--allow-nan)"
    if len(bad) > MOST_LINES:
        yield f"and {things(len(bad) - MOST_LINES, 'more place')} went bad in other steps"


def _skipped(summary: Summary, limit: float | None) -> Iterator[str]:
    steps = summary.steps
    share = steps.share_skipped_later
    if limit is None or share <= limit:
        return
    later = steps.later
    known = [
        f"{origin.module}{on_ranks(origin.ranks, summary.facts)}"
        for origin, _ in known_origins(summary, later)
    ]
    began = f", which began in {listed(known[:3])}" if known else ""
    yield (
        f"skipped: {percent(share)} of the steps, the limit is {percent(limit)}: "
        f"{count(steps.num_skipped_later)} of {count(steps.num)}, {at_steps(later)}{began}"
    )


def _underflow(summary: Summary, limit: float | None) -> Iterator[str]:
    if limit is not None and limit < 1 and are_most_lost(summary):
        yield "underflow: half of the gradients or more are all zeros in every sample"

    def describe(layer: Layer) -> tuple[str, str]:
        worst = f"{percent(layer.share_lost_worst)}, in step {layer.share_lost_step}"
        would = "" if summary.underflows(layer) else ", which was not used"
        return f"gradient of {layer.name} in {layer.format}{would}", f"at worst {worst}"

    yield from _beyond(limit, "underflow", "gradients", _gradients(summary), describe)


def _overflow(summary: Summary, limit: float | None) -> Iterator[str]:
    def describe(layer: Layer) -> tuple[str, str]:
        whose = "output" if layer.kind == "output" else "weight"
        what = f"{whose} {layer.name} is inf, NaN or too large for {layer.format}"
        counts = f"{count(layer.inf)} inf, {count(layer.nan)} NaN"
        return what, f"{counts} in {things(layer.num_samples, 'sample')}"

    held = _held_tensors(summary)
    followed = [x for share, x in held if share and summary.follows_from(x.non_finite_step)]
    if limit is not None and followed:
        first = min(layer.non_finite_step or 0 for layer in followed)
        yield (
            f"overflow: {count(len(followed))} of the outputs and weights held inf or NaN, first "
            f"sampled at step {first}, after step {summary.went_bad_at} had gone bad; the limit is "
            f"{percent(limit)}"
        )
    others = [each for each in held if not any(each[1] is x for x in followed)]
    if others or not held:
        yield from _beyond(limit, "overflow", "outputs and weights", others, describe)


def _lost_updates(summary: Summary, limit: float | None) -> Iterator[str]:
    def describe(layer: Layer) -> tuple[str, str]:
        what = f"updates of {layer.name} in {', '.join(layer.dtypes)}"
        return what, f"{count(layer.lost_updates or 0)} of {count(layer.updates or 0)} counted"

    yield from _beyond(limit, "lost updates", "updates", _stepped_weights(summary), describe)


def _beyond(
    limit: float | None,
    name: str,
    kind: str,
    layers: _Shares,
    describe: Callable[[Layer], tuple[str, str]],
) -> Iterator[str]:
    if limit is None:
        return
    if not layers:
        yield (
            f"{name}: no {kind} were sampled, so the limit of {percent(limit)} cannot be checked: "
            "record with model=, or name other limits only"
        )
    beyond = sorted((each for each in layers if each[0] > limit), key=lambda each: -each[0])
    for share, layer in beyond[:MOST_LINES]:
        what, seen = describe(layer)
        yield f"{name}: {percent(share)} of the {what}, the limit is {percent(limit)}: {seen}"
    if len(beyond) > MOST_LINES:
        yield f"{name}: and {things(len(beyond) - MOST_LINES, 'more layer')} beyond the limit"


def _gradients(summary: Summary) -> _Shares:
    return [(layer.share_lost, layer) for layer in summary.of_kind("parameter_gradient")]


def _held_tensors(summary: Summary) -> _Shares:
    layers = (*summary.of_kind("output"), *summary.of_kind("parameter"))
    return [((x.inf + x.nan + _too_large(x)) / max(x.measured, 1), x) for x in layers]


def _stepped_weights(summary: Summary) -> _Shares:
    shares = ((layer.share_lost_updates, layer) for layer in summary.layers)
    return [(share, layer) for share, layer in shares if share is not None]


def _too_large(layer: Layer) -> int:
    """Return the number of entries of a layer that its format cannot hold.

    Weights are cast to the lower precision; an output in float32 stays float32.
    """
    is_wide = layer.kind == "output" and not {"float32", "float64"}.isdisjoint(layer.dtypes)
    return 0 if is_wide else layer.overflow.get(layer.format, 0)
