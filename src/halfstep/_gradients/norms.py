"""Norms of gradients, single and total, each in one read (1 G), and the clip coefficient.

On the CPU, small gradients of the same shape are reduced together, as rows of one matrix, because
4,096 separate calls would dominate the cost. On other devices, and for a few small gradients,
PyTorch's fused kernels are used. Sync: none, in all of these functions.

Source of the clipping: Pascanu et al., "On the difficulty of training recurrent neural networks"
(2013, arXiv:1211.5063), with the epsilon of ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import math
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients.gradients import Gradients
from halfstep._gradients.scalars import (
    Scalar,
    as_tensor,
    is_nonfinite,
    reciprocal,
    root,
    scalar,
)
from halfstep._pytorch.amp import norms_of_each
from halfstep._pytorch.devices import has_float64, to_device, widest_float

CLIP_EPSILON = 1e-6
"""The epsilon that PyTorch adds to the norm before it divides by it."""


@dataclass(frozen=True, eq=False)
class Norms:
    """The L2 norm of every gradient, on the devices where the gradients are."""

    params: list[Tensor]
    on_device: Mapping[torch.device, tuple[Sequence[int], Tensor]]
    """By device: the positions of its gradients in ``params``, and the sums of their squares."""
    scale: Scalar | None
    """The number by which the gradients were multiplied when measured; None if unscaled."""

    def total(self, device: torch.device) -> Scalar:
        """Return the total norm of all gradients, not unscaled, for ``device``."""
        return root(scalar(self.sum_of_squares(device)))

    def unscaled_root(self, squares: Scalar) -> Scalar:
        """Return the norm from a sum of squares of these gradients, without the scale."""
        return root(squares) if self.scale is None else root(squares) / self.scale

    def sum_of_squares(self, device: torch.device, shares: Sequence[float] = ()) -> Tensor:
        """Return the sum of all squares, not unscaled, on ``device``, weighted by ``shares``."""
        sums = []
        for positions, squares in self.on_device.values():
            if any(share != 1.0 for share in shares):
                own = [shares[position] for position in positions]
                squares = squares * torch.tensor(own, dtype=squares.dtype).to(squares.device)
            sums.append(_carried(squares.sum(), device))
        if not sums:  # another rank has all of them
            return torch.zeros((), dtype=widest_float(device), device=device)
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def unscaled(self) -> list[float]:
        """Return the unscaled norm of every gradient. Sync: one for each device."""
        scale = 1.0 if self.scale is None else float(self.scale)
        norms = [0.0] * len(self.params)
        for positions, squares in self.on_device.values():
            for position, square in zip(positions, squares.tolist(), strict=True):
                norms[position] = math.sqrt(square) / scale
        return norms


@torch.no_grad()
def norms_of(gradients: Gradients, scale: Scalar | None) -> Norms:
    """Return the norms of gradients that are multiplied by ``scale``. One read (1 G).

    A norm is inf or NaN if and only if the gradient has such an entry, so this is also a check.
    """
    on_device = {}
    for device, positions in gradients.by_device().items():
        values = gradients.values
        if len(positions) < len(values):
            values = [values[position] for position in positions]
        on_device[device] = positions, sums_of_squares(values)
    return Norms(gradients.params, on_device, scale)


@torch.no_grad()
def largest(gradients: Gradients, scale: Scalar, device: torch.device) -> Tensor:
    """Return the largest magnitude of gradients multiplied by ``scale``, unscaled. One read (1 G).

    The result is inf or NaN if a gradient is.
    """
    amaxes = [largest_magnitudes(values).amax() for values in gradients.by_kind.values()]
    if not amaxes:  # another rank has gradients, and all ranks measure the same steps
        return torch.zeros((), device=device)
    found = torch.stack([to_device(amax, device).float() for amax in amaxes])
    return found.amax() * reciprocal(scale)


@torch.no_grad()
def overflows_when_divided(gradients: Gradients, scale: Scalar) -> list[Tensor]:
    """Return flags for finite gradients that overflow when divided by a scale below 1.

    One float32 scalar, 1 or 0, for each device and dtype. One read (1 G).
    """
    found = []
    for (device, dtype), values in gradients.by_kind.items():
        amax, by = largest_magnitudes(values).amax(), as_tensor(scale, device)
        # Kernels divide or multiply by the reciprocal. Both results, rounded to the gradient's
        # dtype, are what they would write.
        unscaled = torch.maximum(amax * reciprocal(by), amax / by).to(dtype)
        found.append(is_nonfinite(unscaled))
    return found


def _carried(value: Tensor, device: torch.device) -> Tensor:
    return to_device(value if has_float64(device) else value.float(), device)


def clip_coefficient(norm: Scalar, max_norm: float, found_inf: Tensor | None = None) -> Scalar:
    """Return the factor that reduces gradients of this norm to at most ``max_norm``.

    It is 1 for a norm that is inf or NaN: inf times 0 would be NaN and would hide the cause.
    ``found_inf``: 1 if it is, else 0, on the device of the norm, if that is known there.
    """
    if not isinstance(norm, Tensor):
        # PyTorch divides a number by a tensor in this way: by multiplying with the reciprocal.
        return min(1.0 / (norm + CLIP_EPSILON) * max_norm, 1.0) if math.isfinite(norm) else 1.0
    coefficient = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    # fmax ignores a coefficient that is NaN, and 1 is the largest.
    return torch.fmax(coefficient, is_nonfinite(norm) if found_inf is None else found_inf)


# --- reductions -----------------------------------------------------------------------------------

ROW = 1 << 10
"""Number of squares that are added up in float32; these sums are added up in float64. The relative
error of a norm is then at most 4e-6, at no cost in time. torch.dot, all in float32, has an error of
3 % for 64 M equal entries."""

PIECE = 1 << 20
"""Number of float16 or (few) bfloat16 entries converted at a time; a multiple of ROW."""

SMALL = 1 << 15
"""Number of entries above which a gradient is reduced separately, without a copy."""

FEW = 16
"""Number of small gradients up to which PyTorch's float64 kernel is faster than rows."""

BATCH = 1 << 18
"""Number of entries of small gradients that are copied together, so that they are still in the
cache when reduced. At most half a PIECE."""

# (entries [rows, columns], scratch memory of PIECE float32 numbers) -> one number per row.
RowReduction = Callable[[Tensor, Tensor], Tensor]

Reduction = Callable[[Sequence[Tensor]], Tensor]


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of every tensor.

    The square root has a relative error of 1e-5; 2e-3 for large bfloat16 tensors on the CPU, which
    is their own precision. Squares may underflow in float32: entries below 1e-19 may count as zero.
    A sum that overflows becomes the largest finite number.

    Takes one or more real, strided tensors on one device, of any shapes and dtypes, and returns
    float64 ``[len(tensors)]``, inf or NaN if and only if that tensor contains inf or NaN. On a
    device without float64 it is float32, and inf also for a norm above 1.8e19. The result has no
    gradient.
    """
    sums: Tensor = torch.ops.halfstep.sums_of_squares.default(tensors)
    return sums


def largest_magnitudes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of every tensor: 0 if empty, NaN if it contains NaN.

    Takes tensors as above; returns ``[len(tensors)]`` in the widest of their dtypes and float32.
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
    """Reduce every tensor as one row of a matrix."""
    scratch = torch.empty(PIECE)  # not committed until written to
    order, found = [], []
    for positions in _batches(tensors):
        order += positions
        batch = [tensors[position] for position in positions]
        found.append(rows(_stack(batch, scratch) if len(batch) > 1 else _row(batch[0]), scratch))
    reduced = torch.cat(found)
    where = torch.frombuffer(array("q", order), dtype=torch.int64)  # 8 times faster than tensor()
    return torch.empty_like(reduced).index_copy_(0, where, reduced)


def _batches(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Yield positions of small tensors of one dtype and shape, and of single large ones."""
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = defaultdict(list)
    for position, tensor in enumerate(tensors):
        alike[tensor.dtype, tensor.shape].append(position)
    for (_, shape), positions in alike.items():
        size = shape.numel()
        length = 1 if size > SMALL else BATCH // max(size, 1)
        for start in range(0, len(positions), length):
            yield positions[start : start + length]


def _row(tensor: Tensor) -> Tensor:
    """Return all entries in any order, ``[1, numel]``; a view unless the memory has gaps."""
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
    return norms[:, 0] if norms.shape[1] == 1 else _vector_norm(norms.double(), dim=1)


def _wide(rows: Tensor, scratch: Tensor) -> Iterator[Tensor]:
    """Yield all columns in order in a wide dtype; each piece overwrites the previous one."""
    # For bfloat16 the kernel adds up in float32 at memory speed and only rounds the result.
    if rows.dtype.itemsize >= 4 or (rows.dtype is torch.bfloat16 and rows.numel() > BATCH):
        yield rows
        return
    for piece in torch.split(rows, PIECE, dim=1):
        yield scratch[: piece.numel()].view(piece.shape).copy_(piece)


def _run_norms(rows: Tensor) -> Iterator[Tensor]:
    """Yield the norms of all runs of ROW entries, and of the shorter last run of each row."""
    num_rows, size = rows.shape
    rest = size % ROW
    if size > rest:
        yield _vector_norm(rows[:, : size - rest].view(num_rows, -1, ROW), dim=2)
    if rest or not size:
        yield _vector_norm(rows[:, size - rest :], dim=1)[:, None]


def _vector_norm(entries: Tensor, p: float = 2.0, dim: int | None = None) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(entries, p, dim)
    return norm


def _row_magnitudes(rows: Tensor, scratch: Tensor) -> Tensor:
    if rows.numel() == 0:
        largest = rows.new_zeros(len(rows))
    elif len(rows) == 1:
        low, high = torch.aminmax(rows)
        largest = torch.maximum(-low, high).view(1)
    else:
        largest = rows.abs_().amax(1)  # safe in place: several rows are our own copy
    return largest.to(_widest([rows]))


def _exact_sum(tensor: Tensor) -> float:
    """Return the sum of squares of a tensor that contains inf, or whose squares overflow."""
    amax: float = largest_magnitudes([tensor]).item()
    if not math.isfinite(amax):
        return amax
    total = 0.0
    for piece in torch.split(_row(tensor), PIECE, dim=1):
        total += (piece.double() / amax).square_().sum().item()
    return min(total * amax * amax, torch.finfo(torch.float64).max)


# --- PyTorch's kernels, and tracing ---------------------------------------------------------------


def _sums_of_squares_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    dtype = _sum_dtype(tensors)
    sums = torch.stack(norms_of_each(list(tensors), 2, dtype=dtype)).square_()
    if dtype is torch.float32:
        return sums  # an overflow of the sum is one of the gradients, which could not be clipped
    largest = torch.finfo(dtype).max
    dtypes = {tensor.dtype for tensor in tensors}
    if any(torch.finfo(each).max > math.sqrt(largest) for each in dtypes):
        is_finite = _largest_magnitudes_by_kernel(tensors).isfinite()
        sums = torch.where(is_finite, sums.clamp(max=largest), sums)
    return sums


def _largest_magnitudes_by_kernel(tensors: Sequence[Tensor]) -> Tensor:
    # The kernel rejects an empty tensor.
    tensors = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(norms_of_each(tensors, math.inf, dtype=_widest(tensors)))


def _sums_of_squares_traced(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), dtype=_sum_dtype(tensors))


def _largest_magnitudes_traced(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0].new_empty(len(tensors), dtype=_widest(tensors))


def _sum_dtype(tensors: Sequence[Tensor]) -> torch.dtype:
    return widest_float(tensors[0].device)


def _widest(tensors: Sequence[Tensor]) -> torch.dtype:
    return reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)


# --- the operators --------------------------------------------------------------------------------

# Custom operators: the CPU implementation branches on values, which is free there, but must be
# opaque to torch.compile and dispatch modes. Through this low-level API of torch.library a call
# with 4,096 tensors costs 0.4 ms, and as a custom_op 0.9.
# The operators survive dropping halfstep from sys.modules and importing it again: each name can
# exist only once, and code from the earlier import still calls it. So the op namespace holds the
# library.
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
