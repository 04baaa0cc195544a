"""Whether the values of a tensor are finite, and if not, how bad they are."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep._numerics.measure import float_values


def extremes(tensor: Tensor) -> tuple[float, float] | None:
    """Return the smallest and the largest value; NaN if there is one. Sync: one.

    None for what holds no floating-point numbers, or has no memory of its own.
    """
    values = float_values(tensor)
    if values is None or not values.numel():
        return None
    if values.element_size() == 1:  # float8 has no order in PyTorch
        values = values.float()
    try:
        low, high = torch.stack(torch.aminmax(values)).tolist()
    except RuntimeError:  # zeros of forward-mode AD, which have no data
        return None
    return low, high


MINUS_INF, INF, NAN = range(3)
"""How bad a value is; NaN spreads, and so does inf, and -inf alone may be that of a mask."""


def badness(values: Tensor) -> int | None:
    """Return how bad the worst value is: MINUS_INF, INF or NAN; None for finite. Sync: one."""
    found = extremes(values)
    if found is None or all(map(math.isfinite, found)):
        return None
    if math.isnan(found[1]):
        return NAN
    return INF if found[1] == math.inf else MINUS_INF


def is_finite(tensor: Tensor) -> bool:
    """Say whether a tensor holds no inf and no NaN. Sync: one."""
    return badness(tensor) is None


def is_mask(tensor: Tensor) -> bool:
    """Say whether a tensor is one to be added to scores: -inf and one other number, no more."""
    values = float_values(tensor)
    if values is None:
        return False
    is_inf = values == -math.inf
    rest = values[~is_inf]
    if not rest.numel():
        return values.ndim == 0
    return bool(is_inf.any()) and bool((rest == rest[0]).all()) and math.isfinite(rest[0].item())
