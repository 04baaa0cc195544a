"""One number for each of many gradients, in one read of them (1 G). Sync: none.

On the CPU small gradients of one shape are reduced together, as the rows of one matrix: what 4,096
small tensors cost is 4,096 calls. Everywhere else PyTorch's fused kernels do it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

ROW = 4096
"""So many entries are added up in float32, the rest in float64. One sum of 64 M equal entries in
float32 (torch.dot) is wrong by 1.6 %, rows of this length by 1e-6, and they take no longer."""

PIECE = 1 << 20
"""So many entries of a bfloat16 or float16 gradient are converted at a time; a multiple of ROW."""

SMALL = 1 << 14
"""Gradients of more entries are reduced alone, without a copy."""

BATCH = 1 << 18
"""So many entries are copied together: they are still in the cache when they are reduced."""

LARGEST = torch.finfo(torch.float64).max

# (entries [rows, columns] of one dtype) -> one number for each row, float64.
RowReduction = Callable[[Tensor], Tensor]


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of the squares of every tensor.

    The square root is good to 1e-5, unless the squares underflow in float32: entries below 1e-19
    may count as zero. A sum that float64 cannot hold is the largest float64.

    Args:
        tensors: Real and strided, on one device, of any shapes and dtypes.

    Returns:
        float64 ``[len(tensors)]`` (float32 on MPS), inf or NaN if and only if that tensor holds inf
        or NaN. Never differentiated.
    """
    sums: Tensor = torch.ops.halfstep.sums_of_squares.default(tensors)
    return sums


def largest_magnitudes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of every tensor, 0 for an empty one.

    Args:
        tensors: Real and strided, on one device, of any shapes and dtypes.

    Returns:
        ``[len(tensors)]``, float64 (float32 on MPS); NaN where a tensor holds NaN.
    """
    if tensors[0].device.type != "cpu":
        return _foreach_norms(tensors, math.inf)
    return _reduce(tensors, _row_magnitudes, _magnitude)


# An operator of its own: on the CPU it looks at values to decide what is left to do, which costs
# nothing there, but neither torch.compile nor a dispatch mode may see it. Defined on the lower
# level of torch.library, a call with 4,096 tensors costs 0.4 ms; as a torch.library.custom_op, 0.9.
_library = torch.library.Library("halfstep", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(  # type: ignore[no-untyped-call]
    "sums_of_squares(Tensor[] tensors) -> Tensor"
)


def _sums_of_squares_cpu(tensors: Sequence[Tensor]) -> Tensor:
    sums = _reduce(tensors, _row_squares, _squares)
    if not math.isfinite(sums.sum().item()):
        for position, is_finite in enumerate(sums.isfinite().tolist()):
            if not is_finite:
                sums[position] = _exact_squares(tensors[position])
    return sums


def _sums_of_squares_elsewhere(tensors: Sequence[Tensor]) -> Tensor:
    return _foreach_norms(tensors, 2).square()


def _sums_of_squares_meta(tensors: Sequence[Tensor]) -> Tensor:
    device = tensors[0].device
    return torch.empty(len(tensors), dtype=_wide(device), device=device)


for _kernel, _key in {
    _sums_of_squares_cpu: "CPU",
    _sums_of_squares_elsewhere: "CompositeExplicitAutograd",
}.items():
    _library.impl("sums_of_squares", _kernel, _key)  # type: ignore[no-untyped-call]
torch.library.register_fake("halfstep::sums_of_squares", _sums_of_squares_meta, lib=_library)


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _foreach_norms(tensors: Sequence[Tensor], p: float) -> Tensor:
    # In float64 the squares of float32 numbers do not overflow.
    wide = _wide(tensors[0].device)
    return torch.stack(torch._foreach_norm(list(tensors), p, dtype=wide))


# --- on the CPU -----------------------------------------------------------------------------------


def _reduce(
    tensors: Sequence[Tensor], rows: RowReduction, alone: Callable[[Tensor], Tensor]
) -> Tensor:
    """Reduce small tensors of one shape together by ``rows``, every other one by ``alone``."""
    alike: dict[tuple[torch.dtype, torch.Size], list[int]] = defaultdict(list)
    order, found = [], []
    for position, tensor in enumerate(tensors):
        if 0 < tensor.numel() <= SMALL:
            alike[tensor.dtype, tensor.shape].append(position)
        else:
            order.append(position)
            found.append(alone(_flat(tensor)).reshape(1))
    for (_, shape), positions in alike.items():
        for some in _batches(positions, max(1, BATCH // shape.numel())):
            order += some
            together = torch.stack([tensors[position] for position in some])
            found.append(rows(together.reshape(len(some), -1)))
    result = torch.empty(len(tensors), dtype=torch.float64)
    result[torch.tensor(order)] = torch.cat(found)
    return result


def _batches(positions: list[int], length: int) -> Iterator[list[int]]:
    for start in range(0, len(positions), length):
        yield positions[start : start + length]


def _flat(tensor: Tensor) -> Tensor:
    """Return all entries in any order; a view if the tensor fills its memory without gaps."""
    if not tensor.is_contiguous():
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(by_stride)
    return tensor.reshape(-1)


def _row_squares(matrix: Tensor) -> Tensor:
    wide = matrix if matrix.dtype.itemsize >= 4 else matrix.float()
    norms: Tensor = torch.linalg.vector_norm(wide, dim=1)
    return norms.double().square_()


def _row_magnitudes(matrix: Tensor) -> Tensor:
    return matrix.abs().amax(1).double()


def _squares(flat: Tensor) -> Tensor:
    """Return the sum of squares of many entries."""
    if flat.dtype.itemsize >= 4:
        return _squares_of_rows(flat)
    scratch = torch.empty(min(PIECE, flat.numel()))
    pieces = (scratch[: len(piece)].copy_(piece) for piece in torch.split(flat, PIECE))
    return torch.stack([_squares_of_rows(piece) for piece in pieces]).sum()


def _squares_of_rows(flat: Tensor) -> Tensor:
    whole = flat.numel() - flat.numel() % ROW
    rows, rest = flat[:whole].view(-1, ROW), flat[whole:].view(1, -1)
    return _row_squares(rows).sum() + _row_squares(rest).sum()


def _magnitude(flat: Tensor) -> Tensor:
    if not flat.numel():
        return flat.new_zeros(1, dtype=torch.float64)
    return torch.stack(torch.aminmax(flat)).abs_().amax().double()


def _exact_squares(tensor: Tensor) -> Tensor:
    """Return the sum of squares of a tensor whose squares overflowed, or which is not finite."""
    wide = tensor.double()
    amax = wide.abs().amax()
    total = (wide / amax).square_().sum() * amax * amax
    return total.clamp(max=LARGEST) if math.isfinite(amax.item()) else amax
