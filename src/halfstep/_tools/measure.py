"""Measurement of tensors: statistics in few passes.

Magnitudes are compared as float32 bit patterns, which have the same order as the numbers. One
histogram of their exponents yields almost all counts; entries are compared with a limit only if the
bin that contains it is not empty. A large tensor is read once for its extremes; everything else is
counted in a sample of its rows, and of the entries of long rows.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from halfstep._numerics.formats import FORMATS
from halfstep._numerics.measure import counted_part, float_values
from halfstep._tools.statistics import Statistics, binned

_INF = 0x7F800000  # the bits of inf; those of NaN are larger
_NUM_BINS = 257  # zero, 255 exponents, NaN
_FIRST, _LAST = -126, 128  # exponents of the second bin (magnitudes up to 2**-126) and the last


@torch.no_grad()
def measure(tensor: Tensor, *, is_gradient: bool = False) -> Statistics | None:
    """Return the statistics of a tensor.

    Args:
        tensor: Any shape, dtype and layout. float64 is measured in float32.
        is_gradient: Also count the zeros due to underflow, if the values have passed through
            float16. Rows and columns that are all zero are not counted, since an
            unused embedding or a dead unit produces them. For this reason the count is 0 for a
            vector.

    Returns:
        The statistics; None for a tensor without its own floating-point values, such as one inside
        of ``torch.func.vmap``.

    Sync: two or more.
    """
    values = float_values(tensor)
    if values is None:
        return None
    sample, amax = counted_part(values), None
    if sample is not values:
        low, high = torch.stack(torch.aminmax(values)).tolist()
        amax = max(-low, high)
        if not amax < float("inf"):  # each NaN and inf is counted
            sample, amax = values, None
    sample = sample.float().contiguous()
    statistics = _counted(sample, values.numel(), amax)
    if not is_gradient:
        return statistics
    if not _is_from_float16(values, sample, statistics.amin):
        return statistics
    return replace(statistics, flushed=_zeros_in_live_rows(sample) if sample.ndim > 1 else 0)


def _counted(sample: Tensor, size: int, amax: float | None) -> Statistics:
    bits = sample.view(-1).view(torch.int32) & 0x7FFFFFFF
    if not bits.numel():
        none = dict.fromkeys(FORMATS, 0)
        return Statistics(size, 0, 0, 0, 0, 0.0, None, 0, (), none, none)
    # One less, so that a power of two is the last number of its bin.
    bins = torch.bincount(((bits - 1) >> 23) + 1, minlength=_NUM_BINS)
    zeros, *counts, nan, low, high = torch.cat([bins, torch.stack(torch.aminmax(bits))]).tolist()
    inf = int((bits == _INF).sum()) if counts[-1] else 0
    counts[-1] -= inf  # the last bin includes them
    histogram = {exponent: n for exponent, n in enumerate(counts, start=_FIRST) if n}
    if high >= _INF:
        high = int(torch.where(bits < _INF, bits, 0).max())
    if not histogram:
        low = None
    elif zeros:
        low = int(torch.where(bits == 0, _INF, bits).min())
    above = {name: _count_above(bits, histogram, f.last_held) for name, f in FORMATS.items()}
    held = {name: _count_above(bits, histogram, f.flushed_below) for name, f in FORMATS.items()}
    num_nonzero = sum(histogram.values())
    first, by_bin = binned(histogram)
    return Statistics(
        size=size,
        measured=bits.numel(),
        zeros=zeros,
        nan=nan,
        inf=inf,
        amax=_float(high) if amax is None else amax,
        amin=None if low is None else _float(low),
        first=first,
        histogram=by_bin,
        underflow={name: num_nonzero - count for name, count in held.items()},
        overflow=above,
    )


def _count_above(bits: Tensor, histogram: dict[int, int], limit: float) -> int:
    """Return the number of finite magnitudes above a limit, from the histogram if possible."""
    limit_bits = _bits(limit)
    cut = max(((limit_bits - 1) >> 23) + _FIRST, _FIRST)
    above = sum(count for exponent, count in histogram.items() if exponent > cut)
    ends_bin = limit_bits == (cut - _FIRST + 1) << 23
    if ends_bin or cut not in histogram:
        return above
    end_of_bin = min((cut - _FIRST + 1) << 23, _INF - 1)
    return above + int(((bits > limit_bits) & (bits <= end_of_bin)).sum())


def _is_from_float16(values: Tensor, sample: Tensor, amin: float | None) -> bool:
    """Return whether the values have passed through float16, which may have flushed some."""
    if values.dtype is torch.float16:
        return True
    # Without small values nothing was flushed. Above this limit, bfloat16 values, which have 8
    # bits, are also float16 values.
    if amin is None or amin >= FORMATS["fp16"].smallest_subnormal * 2**7:
        return False
    # float16 values are multiples of the smallest one, and so are their sums.
    multiples = sample / FORMATS["fp16"].smallest_subnormal
    return bool(((multiples == multiples.round()) | ~multiples.isfinite()).all())


def _zeros_in_live_rows(sample: Tensor) -> int:
    is_not_zero = sample.flatten(1) != 0
    live = is_not_zero.any(1).sum() * is_not_zero.any(0).sum()
    return int(live - is_not_zero.sum())


def _bits(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value), "big")


def _float(bits: int) -> float:
    values: Sequence[float] = struct.unpack(">f", bits.to_bytes(4, "big"))
    return values[0]
