"""Measurement of tensors: non-finite values, and statistics in few passes.

Magnitudes are compared as float32 bit patterns, which have the same order as the numbers. One
histogram of their exponents yields almost all counts; entries are compared with a limit only if the
bin that contains it is not empty. A large tensor is read once for its extremes; everything else is
counted in a sample of its rows, and of the entries of long rows.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache

import torch
from msgspec.structs import replace
from torch import Tensor

from halfstep._common.formats import FORMATS
from halfstep._gradients.scalars import joined
from halfstep._master_weights.lost_updates import looked_at
from halfstep._pytorch import distributed, modes, storages
from halfstep._tools.statistics import Statistics, binned

LARGE = {"cpu": 2**16}
"""Maximum number of entries that are all counted, by device type: a CPU counts slowly."""
LARGE_ELSEWHERE = 2**24


def float_values(tensor: Tensor) -> Tensor | None:
    """Return the floating-point values of a tensor of any layout, None if it has none.

    A tensor of integers has none, nor has one inside of ``torch.func.vmap`` or one without data, as
    the zeros of forward-mode AD: to read those ends a CUDA context.
    For a DTensor the result is the local part; there is no communication.
    """
    values = tensor.detach()
    values = distributed.local_part(values)
    if modes.is_inside_functorch(values) or not storages.has_data(values):
        return None
    if values.layout is not torch.strided or values.is_nested:
        values = values.coalesce().values() if values.is_sparse else values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values if values.is_floating_point() else None


def extremes(tensor: Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest value, NaN if there is one. Sync: one.

    None for a tensor without floating-point values or without its own memory.
    """
    values = float_values(tensor)
    if values is None or not values.numel():
        return None
    if values.element_size() == 1:  # PyTorch cannot compare float8
        values = values.float()
    return ends_of(values)


def ends_of(values: Tensor) -> tuple[float, float]:
    """Return the smallest and the largest of some values, NaN if there is one. Sync: one."""
    low, high = joined(torch.aminmax(values)).tolist()
    return low, high


_MASKED = -1e3  # the largest number that takes the place of -inf in an additive mask
MINUS_INF, INF, NAN = range(3)
"""Severities of non-finite values: NaN and inf propagate; -inf alone may come from a mask."""


def badness(values: Tensor) -> int | None:
    """Return the worst severity: MINUS_INF, INF or NAN; None if all are finite. Sync: one."""
    found = extremes(values)
    if found is None or all(map(math.isfinite, found)):
        return None
    if math.isnan(found[1]):
        return NAN
    return INF if found[1] == math.inf else MINUS_INF


def bytes_of(tensor: Tensor) -> int:
    """Return the size of a tensor in bytes, of a sparse one as if it were dense."""
    return tensor.numel() * tensor.element_size()


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor contains neither inf nor NaN. Sync: one."""
    return badness(tensor) is None


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor is an additive mask: -inf, or as far below 0, and one other number.

    A single -inf is one too. Sync: two.
    """
    values, found = float_values(tensor), extremes(tensor)
    if values is None or found is None or found[0] > _MASKED:
        return False
    low, high = found
    is_single = values.ndim == 0 and low == -math.inf
    return is_single or (low < high < math.inf and bool(((values == low) | (values == high)).all()))


LARGE_DATA = 50.0  # the size of a value from which on it is large for an input or a target


def is_large_in_most(tensor: Tensor) -> bool:
    """Return whether the median of a column is large, so that no single row is an outlier."""
    sizes = tensor.float().abs()
    columns = sizes if tensor.dim() == 2 else sizes.reshape(-1, 1)
    return float(columns.median(0).values.amax()) >= LARGE_DATA


# --- statistics -----------------------------------------------------------------------------------

_INF = 0x7F800000  # the bits of inf; those of NaN are larger
_LARGEST = torch.finfo(torch.float32).max
_NUM_BINS = 257  # zero, 255 exponents, NaN
_FIRST, _LAST = -126, 128  # exponents of the second bin (magnitudes up to 2**-126) and the last


@torch.no_grad()
def measure(tensor: Tensor, *, is_gradient: bool = False) -> Statistics | None:
    """Return the statistics of a tensor.

    Args:
        tensor: Any shape, dtype and layout. float64 is measured in float32.
        is_gradient: Also estimate how many zeros are due to underflow, if the values have passed
            through float16. Other zeros come from unused embeddings, dead units and masks.

    Returns:
        The statistics; None for a tensor without its own floating-point values, such as one inside
        of ``torch.func.vmap``.

    Sync: two or more.
    """
    values = float_values(tensor)
    if values is None:
        return None
    sample, amax = looked_at(values, LARGE.get(values.device.type, LARGE_ELSEWHERE)), None
    if sample is not values:
        low, high = ends_of(values)
        amax = max(-low, high)
        if not amax < float("inf"):  # each NaN and inf is counted
            sample, amax = values, None
    if sample.dtype is torch.float64:  # numbers that are too large for float32 are finite
        if amax is None and sample.numel():
            amax = float(sample.nan_to_num(0.0, 0.0, 0.0).abs().amax())
        sample = torch.where(sample.isinf(), sample, sample.clamp(-_LARGEST, _LARGEST))
    sample = sample.float().contiguous()
    statistics = _counted(sample, values.numel(), amax)
    if not is_gradient:
        return statistics
    if not _is_from_float16(values, sample, statistics.amin):
        return statistics
    low, high = ends_of(sample.nan_to_num(0.0, 0.0, 0.0))
    if low * high >= 0 and statistics.amax <= FORMATS["fp16"].smallest_normal:
        return replace(statistics, flushed=0)  # as of counts, whose zeros are exact
    return replace(statistics, flushed=_least_flushed(statistics))


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


def _least_flushed(statistics: Statistics) -> int:
    """Return a lower bound of the zeros due to underflow, two standard deviations subtracted.

    If entries are equally dense at zero, half as many round to zero as to the smallest subnormal;
    more if they get denser towards zero, fewer, by the square of a ratio, if their density falls.
    """
    smallest = round(math.log2(FORMATS["fp16"].smallest_subnormal))
    left, second = [statistics.by_exponent().get(smallest + n, 0) for n in range(2)]
    flat = min((n - 2 * math.sqrt(n)) / of for n, of in ((left, 2), (left + second, 4)))
    ratio = min(left / second, 1.0) if second else 0.0  # of few levels no density is known
    return min(int(max(flat, 0.0) * ratio**2), statistics.zeros)


@cache
def _bits(value: float) -> int:
    return int.from_bytes(struct.pack(">f", value), "big")


def _float(bits: int) -> float:
    values: Sequence[float] = struct.unpack(">f", bits.to_bytes(4, "big"))
    return values[0]
