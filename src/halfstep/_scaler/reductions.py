"""One number for each of many gradients, in one read of them (1 G). Sync: none.

On the CPU many small gradients of one shape are reduced together, as the rows of one matrix: what
4,096 small tensors cost is 4,096 calls. Elsewhere, and for few small ones, PyTorch's fused kernels
do it.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from halfstep._pytorch.amp import norms_of_each

ROW = 1 << 10
"""Runs of this many squares are added up in float32, and the runs in float64: a norm is wrong by
4e-6 at most, and it takes no longer. torch.dot, all in float32, is wrong by 3 % for 64 M equal
entries."""

PIECE = 1 << 20
"""The number of float16 or (few) bfloat16 entries converted at a time; a multiple of ROW."""

SMALL = 1 << 15
"""Gradients of more entries are reduced alone, where they are."""

FEW = 16
"""So many gradients, all small, are faster reduced by PyTorch's kernel in float64 than as rows."""

BATCH = 1 << 18
"""The number of entries of small gradients that are copied together: they are still in the cache
when they are reduced. At most half a PIECE."""

# (entries [rows, columns], PIECE float32 numbers to work in) -> one number for each row.
RowReduction = Callable[[Tensor, Tensor], Tensor]

Reduction = Callable[[Sequence[Tensor]], Tensor]


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of every tensor.

    The square root is good to 1e-5; to 2e-3 for large bfloat16 tensors on the CPU, as good as their
    entries are. Squares may underflow in float32: entries below 1e-19 may count as zero. A sum that
    the result cannot hold is the largest number that it can.

    Args:
        tensors: One or more, real and strided, on one device, of any shapes and dtypes.

    Returns:
        float64 ``[len(tensors)]`` (float32 on MPS), inf or NaN if and only if that tensor holds inf
        or NaN. It has no gradient.
    """
    sums: Tensor = torch.ops.halfstep.sums_of_squares.default(tensors)
    return sums


def largest_magnitudes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of every tensor, 0 for an empty one.

    Args:
        tensors: One or more, real and strided, on one device, of any shapes and dtypes.

    Returns:
        ``[len(tensors)]`` in the widest of their dtypes and float32; NaN where a tensor holds NaN.
        It has no gradient.
    """
    magnitudes: Tensor = torch.ops.halfstep.largest_magnitudes.default(tensors)
    return magnitudes


# --- on the CPU -----------------------------------------------------------------------------------


def _sums_of_squares_cpu(tensors: Sequence[Tensor]) -> Tensor:
    if len(tensors) <= FEW and all(tensor.numel() <= SMALL for tensor in tensors):
        return _sums_of_squares_by_kernel(tensors)
    sums = _reduce(tensors, _row_norms).double().square_()
    for position in sums.isinf().nonzero().flatten().tolist():
        sums[position] = _exact_sum(tensors[position])
    return sums


def _largest_magnitudes_cpu(tensors: Sequence[Tensor]) -> Tensor:
    return _reduce(tensors, _row_magnitudes)


def _reduce(tensors: Sequence[Tensor], rows: RowReduction) -> Tensor:
    """Reduce every tensor, each as one row of some matrix."""
    scratch = torch.empty(PIECE)  # costs nothing before it is written to
    order, found = [], []
    for positions in _batches(tensors):
        order += positions
        batch = [tensors[position] for position in positions]
        found.append(rows(_stack(batch, scratch) if len(batch) > 1 else _row(batch[0]), scratch))
    reduced = torch.cat(found)
    where = torch.frombuffer(array("q", order), dtype=torch.int64)  # 8 times faster than tensor()
    return torch.empty_like(reduced).index_copy_(0, where, reduced)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield the positions of small tensors of one dtype and shape, and of single large ones."""
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        alike[tensor.dtype, tensor.shape].append(position)
    for (_, shape), positions in alike.items():
        size = shape.numel()
        length = 1 if size > SMALL else BATCH // max(size, 1)
        for start in range(0, len(positions), length):
            yield positions[start : start + length]


def _row(tensor: Tensor) -> Tensor:
    """Return all entries in any order, ``[1, numel]``; a view, unless the memory has gaps."""
    if not tensor.is_contiguous():
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(by_stride)
    return tensor.reshape(1, tensor.numel())


def _stack(batch: list[Tensor], scratch: Tensor) -> Tensor:
    """Copy tensors of one dtype and shape to the end of ``scratch``, ``[len(batch), numel]``."""
    dtype, shape = batch[0].dtype, batch[0].shape
    size = shape.numel()
    end = scratch.view(dtype)
    end = end[end.numel() - len(batch) * size :]
    torch.stack(batch, out=end.view(len(batch), *shape))
    return end.view(len(batch), size)


def _row_norms(rows: Tensor, scratch: Tensor) -> Tensor:
    runs: list[Tensor] = []
    for piece in _wide(rows, scratch):
        runs += _run_norms(piece)
    norms = runs[0] if len(runs) == 1 else torch.cat(runs, dim=1)
    return norms[:, 0] if norms.shape[1] == 1 else _norms(norms.double(), dim=1)


def _wide(rows: Tensor, scratch: Tensor) -> Iterator[Tensor]:
    """Yield all columns in order in a wide dtype; each overwrites the one before."""
    # The kernel adds up bfloat16 in float32 and as fast as it reads, and rounds each norm at last.
    if rows.dtype.itemsize >= 4 or (rows.dtype is torch.bfloat16 and rows.numel() > BATCH):
        yield rows
        return
    for piece in torch.split(rows, PIECE, dim=1):
        yield scratch[: piece.numel()].view(piece.shape).copy_(piece)


def _run_norms(rows: Tensor) -> Iterator[Tensor]:
    """Yield the norms of all runs of ROW entries, and of the shorter run at the end of each row."""
    num_rows, size = rows.shape
    rest = size % ROW
    if size > rest:
        yield _norms(rows[:, : size - rest].view(num_rows, -1, ROW), dim=2)
    if rest or not size:
        yield _norms(rows[:, size - rest :], dim=1)[:, None]


def _norms(entries: Tensor, dim: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(entries, dim=dim)
    return norms


def _row_magnitudes(rows: Tensor, scratch: Tensor) -> Tensor:
    if rows.numel() == 0:
        largest = rows.new_zeros(len(rows))
    elif len(rows) == 1:
        low, high = torch.aminmax(rows)
        largest = torch.maximum(-low, high).view(1)
    else:
        largest = rows.abs_().amax(1)  # more than one row: our own copy
    return largest.to(_widest([rows]))


def _exact_sum(tensor: Tensor) -> float:
    """Return the sum of squares of a tensor that holds inf, or whose squares overflow."""
    amax: float = largest_magnitudes([tensor]).item()
    if not math.isfinite(amax):
        return amax
    total = 0.0
    for piece in torch.split(_row(tensor), PIECE, dim=1):
        total += (piece.double() / amax).square_().sum().item()
    return min(total * amax * amax, torch.finfo(torch.float64).max)


# --- by PyTorch's kernels, and while tracing ------------------------------------------------------


def _sums_of_squares_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    dtype = _sum_dtype(tensors)
    sums = torch.stack(norms_of_each(list(tensors), 2, dtype=dtype)).square_()
    largest = torch.finfo(dtype).max
    dtypes = {tensor.dtype for tensor in tensors}
    if any(torch.finfo(each).max > math.sqrt(largest) for each in dtypes):
        is_finite = _largest_magnitudes_by_kernel(tensors).isfinite()
        sums = torch.where(is_finite, sums.clamp(max=largest), sums)
    return sums


def _largest_magnitudes_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    # The kernel refuses to look for the largest of no entries.
    tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(norms_of_each(tensors, math.inf, dtype=_widest(tensors)))


def _sums_of_squares_traced(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), dtype=_sum_dtype(tensors))


def _largest_magnitudes_traced(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), dtype=_widest(tensors))


def _sum_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return torch.float32 if tensors[0].device.type == "mps" else torch.float64


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)


# --- the operators --------------------------------------------------------------------------------

# Operators of their own: what is left to do on the CPU depends on values, and to look at them costs
# nothing there; but neither torch.compile nor a dispatch mode may see it. Defined on this lower
# level of torch.library a call with 4,096 tensors costs 0.4 ms; as a custom_op it costs 0.9.
# They stay when halfstep is dropped from sys.modules and imported again: of a name there is one,
# and what is left of the earlier import still calls it. So the namespace holds the library.
_library: Any = vars(torch.ops.halfstep).setdefault(
    "library",
    torch.library.Library("halfstep", "FRAGMENT"),  # type: ignore[no-untyped-call]
)


def _define(name: str, on_cpu: Reduction, by_kernel: Reduction, traced: Reduction) -> None:
    if hasattr(torch.ops.halfstep, name):
        return
    schema = f"{name}(Tensor[] tensors) -> Tensor"
    _library.define(schema, tags=[torch.Tag.pt2_compliant_tag])
    _library.impl(name, on_cpu, "CPU")
    _library.impl(name, by_kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"halfstep::{name}", traced, lib=_library)


_define(
    "sums_of_squares", _sums_of_squares_cpu, _sums_of_squares_by_kernel, _sums_of_squares_traced
)
_define(
    "largest_magnitudes",
    _largest_magnitudes_cpu,
    _largest_magnitudes_by_kernel,
    _largest_magnitudes_traced,
)
