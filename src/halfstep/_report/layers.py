"""Layers: the samples of a run, summed up for each parameter and module and for all gradients."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from halfstep._numerics.formats import FORMATS, FORMATS_BY_DTYPE, Format
from halfstep._numerics.statistics import Statistics, merged
from halfstep._record.run import Kind, Measured, Sample
from halfstep._report.summary import GradientTotals, Layer, PolicyInForce, ScaleWindow

CERTAINLY_WIDER = 2**7
"""Values below this multiple of the smallest subnormal tell in which dtype they were computed."""


def format_of(dtype: str, lower: str) -> str:
    """Return the name of the format whose range applies to a tensor.

    Args:
        dtype: Name of its dtype, such as ``"float16"``.
        lower: Name of the format for other dtypes, such as float32.
    """
    format = FORMATS_BY_DTYPE.get(dtype)
    return lower if format is None else format.name


def lower_of(dtype: str) -> str:
    """Return the format of a policy's lower precision; fp16 if it names no lower precision."""
    return format_of(dtype, "fp16")


def lower_at(policies: Sequence[PolicyInForce], step: int) -> tuple[str, bool]:
    """Return the lower precision at a step, and whether it is in force there.

    Before the first policy, or without any, the numbers say what it would lose.
    """
    so_far = [policy for policy in policies if policy.step <= step]
    if so_far:
        return lower_of(so_far[-1].dtype), True
    return (lower_of(policies[0].dtype) if policies else "fp16"), False


class FormatFit(NamedTuple):
    """How well one tensor of one sample fits its format.

    Attributes:
        format: Name of the format.
        headroom: Bits from its largest finite magnitude to the largest value of the format; None if
            there is none.
        lost: Entries that are lost to underflow.
        share_lost: Those as a share of what was measured.
        is_held: Whether it is the gradient of a parameter that autocast left in a wider dtype, such
            as that of a norm: no scale makes it overflow or underflow.
    """

    format: str
    headroom: float | None
    lost: int
    share_lost: float
    is_held: bool


def format_fit(measured: Measured, lower: str, *, is_in_force: bool) -> FormatFit:
    """Return how well one tensor of one sample fits its format.

    Args:
        measured: The tensor.
        lower: The lower precision, see :func:`lower_at`.
        is_in_force: Whether the run uses it. If not, the result says what it would lose.
    """
    name = format_of(measured.dtype, lower)
    format = FORMATS[name]
    lost, is_held = measured.lost(format), False
    is_cast = measured.kind == "parameter_gradient" and measured.dtype not in FORMATS_BY_DTYPE
    if is_cast and is_in_force:
        # Values that passed through the lower precision have already lost what they lose.
        lost = _flushed(measured, format)
        is_held = (
            measured.flushed is None
            and measured.amin is not None
            and measured.amin < CERTAINLY_WIDER * format.smallest_subnormal
        )
    return FormatFit(name, measured.headroom(format), lost, measured.share(lost), is_held)


class SampledTensor(NamedTuple):
    """One tensor of one sample, with its step.

    Attributes:
        step: Number of the step.
        scale: What its gradients are multiplied by.
        is_overflow: Whether the step was skipped and a smaller scale might have saved it. Only then
            does an inf say something about the scale.
        measured: The tensor.
        fit: How well it fits its format.
    """

    step: int
    scale: float
    is_overflow: bool
    measured: Measured
    fit: FormatFit


def seen_by_layer(
    samples: Iterable[Sample], overflows: Mapping[int, float], policies: Sequence[PolicyInForce]
) -> dict[tuple[Kind, str], list[SampledTensor]]:
    """Return the sampled tensors by kind and name, in the order of first appearance.

    Args:
        samples: The samples.
        overflows: The scales of the steps that overflowed, by step.
        policies: The policies in force, in order.
    """
    found: dict[tuple[Kind, str], list[SampledTensor]] = {}
    for sample in samples:
        lower, is_in_force = lower_at(policies, sample.step)
        for measured in sample.tensors:
            fit = format_fit(measured, lower, is_in_force=is_in_force)
            seen = SampledTensor(sample.step, sample.scale, sample.step in overflows, measured, fit)
            found.setdefault((measured.kind, measured.name), []).append(seen)
    return found


def layer_of(kind: Kind, name: str, seen: list[SampledTensor]) -> Layer:
    """Return one kind of tensor of one parameter or module, summed over all samples."""
    total = merged(each.measured for each in seen)
    last = seen[-1]
    lost = sum(each.fit.lost for each in seen)
    with_headroom = [
        (each.fit.headroom, each.step) for each in seen if each.fit.headroom is not None
    ]
    headroom, headroom_step = min(with_headroom, default=(None, None))
    most_lost = max(seen, key=lambda each: each.fit.share_lost)
    return Layer(
        kind=kind,
        name=name,
        dtypes=tuple(dict.fromkeys(each.measured.dtype for each in seen)),
        format=last.fit.format,
        num_samples=len({each.step for each in seen}),
        size=last.measured.size,
        measured=total.measured,
        zeros=total.zeros,
        nan=total.nan,
        inf=total.inf,
        non_finite_step=next((each.step for each in seen if _is_bad(each)), None),
        amax=total.amax,
        amin=total.amin,
        headroom=headroom,
        headroom_step=headroom_step,
        headroom_last=last.fit.headroom,
        lost=lost,
        share_lost=total.share(lost),
        share_lost_worst=most_lost.fit.share_lost,
        share_lost_step=most_lost.step if most_lost.fit.lost else None,
        share_lost_last=last.fit.share_lost,
        flushed=total.flushed,
        underflow=dict(total.underflow),
        overflow=dict(total.overflow),
        histogram=total.by_exponent(),
        window=_window_of(seen) if kind == "parameter_gradient" else None,
    )


def gradients_of(
    found: Mapping[tuple[Kind, str], list[SampledTensor]],
    layers: Iterable[Layer],
    overflows: Mapping[int, float],
) -> GradientTotals | None:
    """Return the gradients of all parameters together, summed over all samples.

    Args:
        found: What :func:`seen_by_layer` returned.
        layers: What :func:`layer_of` returned for them.
        overflows: The scales of the steps that overflowed, by step: no window reaches up to them.
    """
    gradients = _of_kind(found, "parameter_gradient")
    if not gradients:
        return None
    windows = [layer.window for layer in layers if layer.window is not None]
    # A gradient inside the network may be larger than all parameter gradients and overflow.
    inside = (
        _largest(each)
        for each in _of_kind(found, "output_gradient")
        if each.measured.dtype == "float16"
    )
    all_together = window(
        (each.smallest for each in windows),
        (*(each.largest for each in windows), *inside, *map(power_below, overflows.values())),
        is_at_least=any(each.is_at_least for each in windows),
    )
    scale = max(gradients, key=lambda each: each.step).scale
    best = _best(all_together, scale)
    measured = sum(each.measured.measured for each in gradients)
    lost = sum(each.fit.lost for each in gradients)
    lost_there = None if best is None else sum(_lost_at(best, each) for each in gradients)
    return GradientTotals(
        scale=scale,
        measured=measured,
        lost=lost,
        share_lost=lost / measured if measured else 0.0,
        window=all_together,
        best=best,
        share_lost_at_best=None if lost_there is None else lost_there / measured,
    )


def _is_bad(seen: SampledTensor) -> bool:
    return bool(seen.measured.nan or seen.measured.inf)


def _window_of(gradients: Sequence[SampledTensor]) -> ScaleWindow:
    if _is_held_throughout(gradients):
        return window((), (), is_at_least=False)
    flushed_at = [each.scale for each in gradients if each.measured.flushed]
    whole_at = [each.scale for each in gradients if _is_whole(each.measured)]
    # Only a sample at a larger scale shows the values that a smaller scale flushed.
    is_at_least = bool(flushed_at) and max(flushed_at) >= max(whole_at, default=0.0)
    return window(map(_smallest, gradients), map(_largest, gradients), is_at_least=is_at_least)


def _is_held_throughout(gradients: Sequence[SampledTensor]) -> bool:
    """Return whether autocast left this gradient in a wider dtype in all samples.

    Some samples of a norm contain no value small enough to tell; they count as well.
    """
    has_passed = any(each.measured.flushed is not None for each in gradients)
    return not has_passed and any(each.fit.is_held for each in gradients)


def _is_whole(statistics: Statistics) -> bool:
    """Return whether no entry was flushed and not all are zero."""
    return statistics.amin is not None and not statistics.flushed


def _flushed(statistics: Statistics, format: Format) -> int:
    """Return the number of flushed entries; only for fp16 can they be told from other zeros."""
    return statistics.flushed or 0 if format.name == "fp16" else 0


def _smallest(seen: SampledTensor) -> float | None:
    if seen.fit.is_held:
        return None
    return smallest_scale(seen.measured, seen.scale, FORMATS[seen.fit.format])


def _largest(seen: SampledTensor) -> float | None:
    if seen.fit.is_held:
        return None
    format = FORMATS[seen.fit.format]
    statistics = seen.measured
    return largest_scale(statistics, seen.scale, format, is_overflow=seen.is_overflow)


def _best(its: ScaleWindow, scale: float) -> float | None:
    """Return the scale that loses least.

    Overflow costs the whole step, underflow only some entries: never exceed the upper end.
    """
    if its.smallest is None:
        return None
    if its.largest is None:
        return max(its.smallest, scale)
    if its.is_empty or its.is_at_least:
        return its.largest
    return min(max(its.smallest, scale), its.largest)


def _lost_at(scale: float, seen: SampledTensor) -> int:
    if seen.fit.is_held:
        return 0
    statistics = seen.measured
    format = FORMATS[seen.fit.format]
    factor = scale / seen.scale
    flushed = _flushed(statistics, format) if factor <= 1 else 0  # above: unknown
    return statistics.underflow_if(factor, format) + flushed


def _of_kind(
    found: Mapping[tuple[Kind, str], list[SampledTensor]], wanted: Kind
) -> list[SampledTensor]:
    return [each for (kind, _), seen in found.items() if kind == wanted for each in seen]


# --- limits of the scale --------------------------------------------------------------------------


_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
"""The powers of two that a scale, a float32 number, can be."""


def smallest_scale(statistics: Statistics, scale: float, format: Format) -> float | None:
    """Return the smallest power of two at which none of a gradient underflows.

    Args:
        statistics: Of the gradient as in memory.
        scale: What it is multiplied by.
        format: The format that has to hold it.

    Returns:
        A scale; None if all entries are zero. If some were flushed, the true one may be larger.
    """
    needed = []
    if statistics.amin is not None:
        needed.append(_power_above(format.flushed_below / statistics.amin * scale))
    if statistics.flushed:
        needed.append(_power_above(scale))
    return max(needed, default=None)


def largest_scale(
    statistics: Statistics, scale: float, format: Format, *, is_overflow: bool
) -> float | None:
    """Return the largest power of two at which none of a gradient overflows.

    Args:
        statistics: Of the gradient as in memory.
        scale: What it is multiplied by.
        format: The format that has to hold it.
        is_overflow: Whether its step was skipped and a smaller scale might have saved it: only then
            does an inf say something about the scale.

    Returns:
        A scale; None if no limit is visible.
    """
    allowed = []
    if statistics.amax:
        allowed.append(_power_up_to(format.largest / statistics.amax * scale))
    if statistics.inf and is_overflow:
        allowed.append(power_below(scale))
    return min(allowed, default=None)


def window(
    smallest: Iterable[float | None], largest: Iterable[float | None], *, is_at_least: bool
) -> ScaleWindow:
    """Return the scales that satisfy all limits; None is no limit."""
    low = max((x for x in smallest if x is not None), default=None)
    high = min((x for x in largest if x is not None), default=None)
    is_empty = low is not None and high is not None and low > high
    return ScaleWindow(low, high, is_at_least, is_empty)


def power_below(value: float) -> float:
    """Return the largest power of two below a value: 4 for 8."""
    mantissa, exponent = math.frexp(value)
    return _as_scale(exponent - (2 if mantissa == 0.5 else 1))


def _power_up_to(value: float) -> float:
    """Return the largest power of two that is not above a value: 8 for 8."""
    return _as_scale(math.frexp(value)[1] - 1)


def _power_above(value: float) -> float:
    """Return the smallest power of two above a value: 16 for 8."""
    return _as_scale(math.frexp(value)[1])


def _as_scale(exponent: int) -> float:
    return min(max(math.ldexp(1.0, exponent), _SMALLEST), _LARGEST)
