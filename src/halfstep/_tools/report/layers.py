"""Layers: the samples of a run, summed up by parameter or module, and for all gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias

from msgspec import Struct

from halfstep._common.formats import FORMATS, FORMATS_BY_DTYPE, Format
from halfstep._tools.record.run import Kind, Measured, PolicySeen, Sample
from halfstep._tools.report.summary import GradientTotals, Layer, ScaleWindow
from halfstep._tools.statistics import Statistics, merged
from halfstep._tools.trace.rows import grouped

CERTAINLY_WIDER = 2**7
"""Multiple of the smallest subnormal below which a value shows the dtype it was computed in."""


def lower_of(policies: Sequence[PolicySeen]) -> str:
    """Return the format of the last policy's lower precision; fp16 if there is none."""
    format = FORMATS_BY_DTYPE.get(policies[-1].dtype) if policies else None
    return "fp16" if format is None else format.name


class SampledTensor(Struct, frozen=True, gc=False):
    """One tensor of one sample, and how well it fits its format."""

    step: int
    scale: float  # of the gradients in the sample
    measured: Measured
    format: Format  # whose range applies
    lost: int  # number of entries that are lost to underflow; through float16 the least
    # Whether it is the gradient of a parameter that autocast left in a wider dtype, such as that of
    # a norm: no scale makes it overflow or underflow.
    is_held: bool

    @property
    def is_cut(self) -> bool:
        """Whether zeros may be flushed entries, since others are of the smallest subnormal."""
        seen, least = self.measured, FORMATS["fp16"].smallest_subnormal
        is_at_end = seen.flushed is not None and seen.zeros > 0 and seen.amin == least
        return bool(seen.flushed) or is_at_end

    @property
    def headroom(self) -> float | None:
        return self.measured.headroom(self.format)

    @property
    def share_lost(self) -> float:
        return self.measured.share(self.lost)


def sampled(sample: Sample, policies: Sequence[PolicySeen]) -> Iterator[SampledTensor]:
    """Yield the tensors of a sample, each with its fit to its format.

    Before the first policy, or without one, the losses are those that the format would cause.
    """
    so_far = [policy for policy in policies if policy.step <= sample.step]
    lower = FORMATS[lower_of(so_far or policies[:1])]
    is_in_force = bool(so_far) and so_far[-1].dtype in FORMATS_BY_DTYPE
    for measured in sample.tensors:
        format = FORMATS_BY_DTYPE.get(measured.dtype, lower)
        is_cast = measured.kind == "parameter_gradient" and measured.dtype not in FORMATS_BY_DTYPE
        if is_cast and is_in_force:
            # These values have passed through the lower precision: the losses have happened.
            lost = _flushed(measured, format)
            is_held = (
                measured.flushed is None
                and measured.amin is not None
                and measured.amin < CERTAINLY_WIDER * format.smallest_subnormal
            )
        else:
            lost, is_held = measured.lost(format), False
        yield SampledTensor(sample.step, sample.scale, measured, format, lost, is_held)


_ByLayer: TypeAlias = dict[tuple[Kind, str], list[SampledTensor]]


def layers_and_gradients(
    samples: Iterable[Sample], overflows: Mapping[int, float], policies: Sequence[PolicySeen]
) -> tuple[tuple[Layer, ...], GradientTotals | None]:
    """Return the layers in the order of first appearance, and the totals of the gradients.

    ``overflows`` contains the scales of the steps that overflowed, by step.
    """
    seen = (each for sample in samples for each in sampled(sample, policies))
    found = grouped(seen, lambda each: (each.measured.kind, each.measured.name))
    layers = tuple(_layer(*key, alike, overflows) for key, alike in found.items())
    return layers, _gradients(found, layers, overflows)


def _layer(
    kind: Kind, name: str, seen: list[SampledTensor], overflows: Mapping[int, float]
) -> Layer:
    total = merged(each.measured for each in seen)
    last = seen[-1]
    lost = sum(each.lost for each in seen)
    headrooms = [(each.headroom, each.step) for each in seen if each.headroom is not None]
    headroom, headroom_step = min(headrooms, default=(None, None))
    most_lost = max(seen, key=lambda each: each.share_lost)
    bad = (each.step for each in seen if each.measured.nan or each.measured.inf)
    return Layer(
        kind=kind,
        name=name,
        dtypes=tuple(dict.fromkeys(each.measured.dtype for each in seen)),
        format=last.format.name,
        num_samples=len({each.step for each in seen}),
        size=last.measured.size,
        measured=total.measured,
        zeros=total.zeros,
        nan=total.nan,
        inf=total.inf,
        non_finite_step=next(bad, None),
        amax=total.amax,
        amin=total.amin,
        headroom=headroom,
        headroom_step=headroom_step,
        lost=lost,
        share_lost=total.share(lost),
        share_lost_worst=most_lost.share_lost,
        share_lost_step=most_lost.step if most_lost.lost else None,
        flushed=total.flushed,
        underflow=dict(total.underflow),
        overflow=dict(total.overflow),
        updates=total.updates,
        lost_updates=total.lost_updates,
        share_lost_updates=(total.lost_updates or 0) / total.updates if total.updates else None,
        histogram=total.by_exponent(),
        window=_window_of(seen, overflows) if kind == "parameter_gradient" else None,
    )


def _gradients(
    found: _ByLayer, layers: Iterable[Layer], overflows: Mapping[int, float]
) -> GradientTotals | None:
    gradients = _of_kind(found, "parameter_gradient")
    if not gradients:
        return None
    windows = [layer.window for layer in layers if layer.window is not None]
    # A gradient inside the network may be larger than all parameter gradients and overflow.
    inside = _of_kind(found, "output_gradient")
    largest = [
        *(each.largest for each in windows),
        largest_scale((x for x in inside if x.measured.dtype == "float16"), overflows),
        *map(power_below, overflows.values()),
    ]
    window = _window(
        max((each.smallest for each in windows if each.smallest is not None), default=None),
        min((each for each in largest if each is not None), default=None),
        is_at_least=any(each.is_at_least for each in windows),
    )
    scale = max(gradients, key=lambda each: each.step).scale
    best = _best(window, scale)
    measured = sum(gradient.measured.measured for gradient in gradients)
    lost = sum(gradient.lost for gradient in gradients)
    lost_there = None if best is None else sum(_lost_at(best, gradient) for gradient in gradients)
    return GradientTotals(
        scale=scale,
        measured=measured,
        lost=lost,
        share_lost=lost / measured if measured else 0.0,
        window=window,
        best=best,
        share_lost_at_best=None if lost_there is None else lost_there / measured,
    )


def _of_kind(found: _ByLayer, wanted: Kind) -> list[SampledTensor]:
    return [each for (kind, _), seen in found.items() if kind == wanted for each in seen]


def _flushed(statistics: Statistics, format: Format) -> int:
    """Return the least number of flushed entries, which is only known for fp16."""
    return statistics.flushed or 0 if format.name == "fp16" else 0


def _best(window: ScaleWindow, scale: float) -> float | None:
    """Return the scale that loses least; None if all entries were zero.

    It never exceeds the upper end: overflow costs a whole step, underflow only some entries.
    """
    if window.smallest is None:
        return None
    if window.largest is None:
        return max(window.smallest, scale)
    if window.is_empty or window.is_at_least:
        return window.largest
    return min(max(window.smallest, scale), window.largest)


def _lost_at(scale: float, seen: SampledTensor) -> int:
    if seen.is_held:
        return 0
    factor = scale / seen.scale
    flushed = _flushed(seen.measured, seen.format) if factor <= 1 else 0  # above: unknown
    if factor < 1 and seen.measured.flushed is not None:
        factor *= 2  # the largest of these may have been rounded down
    return seen.measured.underflow_if(factor, seen.format) + flushed


# --- limits of the scale --------------------------------------------------------------------------


_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
"""The smallest and largest power of two that a scale, a float32 number, can be."""


def _window_of(gradients: Sequence[SampledTensor], overflows: Mapping[int, float]) -> ScaleWindow:
    # One held sample is enough: others of a norm may have no value small enough to tell.
    has_passed = any(gradient.measured.flushed is not None for gradient in gradients)
    if not has_passed and any(gradient.is_held for gradient in gradients):
        return _window(None, None, is_at_least=False)
    # Values flushed at one scale are only visible in samples at a larger scale.
    flushed = [gradient.scale for gradient in gradients if gradient.is_cut]
    whole = [each.scale for each in gradients if each.measured.amin and not each.is_cut]
    is_at_least = bool(flushed) and max(flushed) >= max(whole, default=0.0)
    largest = largest_scale(gradients, overflows)
    return _window(smallest_scale(gradients), largest, is_at_least=is_at_least)


def _window(smallest: float | None, largest: float | None, *, is_at_least: bool) -> ScaleWindow:
    is_empty = smallest is not None and largest is not None and smallest > largest
    return ScaleWindow(smallest, largest, is_at_least, is_empty)


def smallest_scale(gradients: Iterable[SampledTensor]) -> float | None:
    """Return the smallest power of two at which none of the gradients underflows.

    It is None if all entries are zero. If some were flushed, the true scale may be larger.
    """
    needed = []
    for gradient in gradients:
        measured = gradient.measured
        if measured.amin is not None and not gradient.is_held:
            needed.append(gradient.format.flushed_below / measured.amin * gradient.scale)
        if gradient.is_cut:
            needed.append(gradient.scale)
    return _as_scale(math.frexp(max(needed))[1]) if needed else None  # the power above


def largest_scale(
    gradients: Iterable[SampledTensor], overflows: Mapping[int, float]
) -> float | None:
    """Return the largest power of two at which no gradient overflows; None without a limit.

    An inf puts a limit on the scale only if a smaller scale might have prevented it.
    """
    allowed, too_large = [], []
    for gradient in gradients:
        if gradient.is_held:
            continue
        if gradient.measured.amax:
            allowed.append(gradient.format.largest / gradient.measured.amax * gradient.scale)
        if gradient.measured.inf and gradient.step in overflows:
            too_large.append(gradient.scale)
    powers = [_as_scale(math.frexp(min(allowed))[1] - 1)] if allowed else []  # not above it
    return min([*powers, *map(power_below, too_large)], default=None)


def power_below(value: float) -> float:
    """Return the largest power of two below a value: 4 for 8."""
    mantissa, exponent = math.frexp(value)
    return _as_scale(exponent - (2 if mantissa == 0.5 else 1))


def _as_scale(exponent: int) -> float:
    return min(max(math.ldexp(1.0, exponent), _SMALLEST), _LARGEST)
