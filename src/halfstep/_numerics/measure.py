"""Looking at a tensor: what :class:`halfstep._numerics.statistics.Statistics` holds, in few passes.

Magnitudes are taken as bit patterns of float32, which are ordered as the numbers are. Almost all
counts follow from one histogram of their exponents; entries are compared with a limit only if some
lie in the bin that the limit cuts. A large tensor is read once for its extremes, and the rest is
counted in a sample of its rows, and of their entries where rows are long.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from msgspec.structs import replace
from torch import Tensor

from halfstep._numerics.formats import FORMATS
from halfstep._numerics.statistics import Statistics, binned
from halfstep._pytorch import distributed, modes

LARGE = {"cpu": 2**16}
"""More entries than this are sampled, by device type: counting is slow on a CPU."""
LARGE_ELSEWHERE = 2**24
NUM_ROWS = 16
"""A sample has at least so many rows."""
ROW = 1024
"""What has no rows is cut into rows of this length."""

_INF = 0x7F800000  # the bits of inf; those of NaN are above
_NUM_BINS = 257  # zero, 255 exponents, NaN
_FIRST, _LAST = -126, 128  # exponents of the second bin, magnitudes up to 2**-126, and the last


@torch.no_grad()
def measure(tensor: Tensor, *, is_gradient: bool = False) -> Statistics | None:
    """Look at the values of a tensor.

    Args:
        tensor: Of any shape, dtype and layout. float64 is looked at in float32.
        is_gradient: Also take the norm, and count the zeros that underflow has made, if the values
            have passed through float16: those in rows and columns that are not all zero, since a
            whole row or column of zeros is what an unused embedding or a dead unit leaves. Of a
            vector none can be told.

    Returns:
        None for a tensor that holds no floating-point numbers of its own, such as one inside of
        ``torch.func.vmap``.

    Sync: two or more.
    """
    values = float_values(tensor)
    if values is None:
        return None
    sample, amax = values, None
    if values.numel() > _limit(values):
        low, high = torch.stack(torch.aminmax(values)).tolist()
        if max(abs(low), abs(high)) < float("inf"):  # else each NaN and inf is counted
            sample, amax = _rows_of(values), max(-low, high)
    sample = sample.float().contiguous()
    statistics = _counted(sample, values.numel(), amax)
    if not is_gradient:
        return statistics
    norm = torch.linalg.vector_norm(values, dtype=torch.float32).item()
    flushed = None
    if _is_from_float16(values, sample, statistics.amin):
        flushed = _zeros_in_live_rows(sample) if sample.ndim > 1 else 0
    return replace(statistics, flushed=flushed, square_sum=norm**2)


def float_values(tensor: Tensor) -> Tensor | None:
    """Return the floating-point numbers that a tensor of any layout holds, None if it has none.

    So it is with whole numbers, inside of ``torch.func.vmap``, and where there are no values. Of a
    DTensor it is the part that this rank has: no other rank is asked.
    """
    values = tensor.detach()
    values = distributed.local_part(values)
    if modes.is_inside_functorch(values) or values.is_meta or modes.is_fake(values):
        return None
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.is_sparse else values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values if values.is_floating_point() else None


def _limit(values: Tensor) -> int:
    return LARGE.get(values.device.type, LARGE_ELSEWHERE)


def _rows_of(values: Tensor) -> Tensor:
    """Return rows at equal distances, with about as many entries as are counted."""
    if values.ndim < 2:
        flat = values.reshape(-1)
        rows = flat[: flat.numel() // ROW * ROW].view(-1, ROW)
    else:
        # Of the weights of a convolution the last dimension is a few entries of a row.
        is_matrix_of_rows = values.shape[-1] > 7
        rows = values.reshape(-1, values.shape[-1]) if is_matrix_of_rows else values.flatten(1)
    limit = _limit(values)
    sample = rows[:: max(rows.shape[0] // max(limit // rows.shape[1], NUM_ROWS), 1)]
    return sample[:, :: max(sample.numel() // (NUM_ROWS * limit), 1)]  # of rows that are too long


def _counted(sample: Tensor, size: int, amax: float | None) -> Statistics:
    bits = sample.view(-1).view(torch.int32) & 0x7FFFFFFF
    if not bits.numel():
        none = dict.fromkeys(FORMATS, 0)
        return Statistics(size, 0, 0, 0, 0, 0.0, None, 0, [], none, none)
    # One less, so that a power of two counts with what is smaller: it ends a bin.
    bins = torch.bincount(((bits - 1) >> 23) + 1, minlength=_NUM_BINS)
    zeros, *counts, nan, low, high = torch.cat([bins, torch.stack(torch.aminmax(bits))]).tolist()
    inf = int((bits == _INF).sum()) if counts[-1] else 0
    counts[-1] -= inf  # they stood with the largest finite numbers
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
    first, counts = binned(histogram)
    return Statistics(
        size=size,
        measured=bits.numel(),
        zeros=zeros,
        nan=nan,
        inf=inf,
        amax=_float(high) if amax is None else amax,
        amin=None if low is None else _float(low),
        first=first,
        histogram=counts,
        underflow={name: num_nonzero - count for name, count in held.items()},
        overflow=above,
    )


def _count_above(bits: Tensor, histogram: dict[int, int], limit: float) -> int:
    """Return how many finite magnitudes are larger; looks at them only if it has to."""
    limit_bits = _bits(limit)
    cut = max(((limit_bits - 1) >> 23) + _FIRST, _FIRST)
    above = sum(count for exponent, count in histogram.items() if exponent > cut)
    ends_bin = limit_bits == (cut - _FIRST + 1) << 23
    if ends_bin or cut not in histogram:
        return above
    end_of_bin = min((cut - _FIRST + 1) << 23, _INF - 1)
    return above + int(((bits > limit_bits) & (bits <= end_of_bin)).sum())


def _is_from_float16(values: Tensor, sample: Tensor, amin: float | None) -> bool:
    """Say whether the values have passed through float16, which may have flushed some of them."""
    if values.dtype is torch.float16:
        return True
    # Where there is nothing small nothing was flushed; and down to there bfloat16's values, with
    # their 8 bits, are values of float16 too.
    if amin is None or amin >= FORMATS["fp16"].smallest_subnormal * 2**7:
        return False
    # Those of float16 are multiples of its smallest one, and so are their sums.
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
