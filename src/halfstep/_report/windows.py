"""At which scales gradients are lost, above and below."""

from __future__ import annotations

import math
from collections.abc import Iterable

from halfstep._numerics.formats import Format
from halfstep._numerics.statistics import Statistics
from halfstep._report.summary import ScaleWindow

_SMALLEST, _LARGEST = 2.0**-126, 2.0**127
"""The powers of two that a scale, a float32 number, can be."""


def smallest_scale(statistics: Statistics, scale: float, format: Format) -> float | None:
    """Return the smallest power of two at which none of a gradient underflows.

    Args:
        statistics: Of the gradient as in memory.
        scale: What it is multiplied by.
        format: What it has to be kept in.

    Returns:
        A scale; None if all entries are zero. If some were flushed, the right one may be larger.
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
        format: What it has to be kept in.
        is_overflow: Whether its step was skipped and a smaller scale might have saved it: only then
            an entry that is inf says something about the scale.

    Returns:
        A scale; None if there is no limit to be seen.
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
