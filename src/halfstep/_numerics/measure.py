"""Values of tensors: the entries to inspect, their extremes, and checks for non-finite ones."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep._pytorch import distributed, modes, storages

LARGE = {"cpu": 2**16}
"""Maximum number of entries that are all counted, by device type: a CPU counts slowly."""
LARGE_ELSEWHERE = 2**24
NUM_ROWS = 16
"""Minimum number of rows in a sample."""
ROW = 1024
"""Length of the rows into which a vector is split."""


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
    if values.layout is not torch.strided:
        values = values.coalesce().values() if values.is_sparse else values.values()
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return values if values.is_floating_point() else None


def _limit(values: Tensor) -> int:
    return LARGE.get(values.device.type, LARGE_ELSEWHERE)


def counted_part(values: Tensor, limit: int | None = None) -> Tensor:
    """Return the counted entries: all, or equally spaced rows of a large tensor.

    Args:
        values: The entries.
        limit: Number of entries above which a tensor is large; None for the limit of its device.
    """
    limit = limit or _limit(values)
    if values.numel() <= limit:
        return values
    if values.ndim < 2:
        flat = values.reshape(-1)
        rows = flat[: flat.numel() // ROW * ROW].view(-1, ROW)
    else:
        # In a convolution weight the last dimension is only a part of a row.
        is_matrix_of_rows = values.shape[-1] > 7
        rows = values.reshape(-1, values.shape[-1]) if is_matrix_of_rows else values.flatten(1)
    sample = rows[:: max(rows.shape[0] // max(limit // rows.shape[1], NUM_ROWS), 1)]
    return sample[:, :: max(sample.numel() // (NUM_ROWS * limit), 1)]  # shortens long rows


def extremes(tensor: Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest value, NaN if there is one. Sync: one.

    None for a tensor without floating-point values or without its own memory.
    """
    values = float_values(tensor)
    if values is None or not values.numel():
        return None
    if values.element_size() == 1:  # PyTorch cannot compare float8
        values = values.float()
    low, high = torch.stack(torch.aminmax(values)).tolist()
    return low, high


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


def is_finite(tensor: Tensor) -> bool:
    """Return whether a tensor contains neither inf nor NaN. Sync: one."""
    return badness(tensor) is None


def is_mask(tensor: Tensor) -> bool:
    """Return whether a tensor is an additive mask, with -inf and one other number."""
    values = float_values(tensor)
    if values is None:
        return False
    is_inf = values == -math.inf
    rest = values[~is_inf]
    if not rest.numel():
        return values.ndim == 0
    return bool(is_inf.any()) and bool((rest == rest[0]).all()) and math.isfinite(rest[0].item())
