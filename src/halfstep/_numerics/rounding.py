"""Rounding to a format, with the result in float32."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfstep._numerics.formats import Format


def rounded(tensor: Tensor, format: Format, *, saturate: bool) -> Tensor:
    """Return the values of a tensor as a format holds them: to nearest, ties to even.

    The rounding itself is a cast of PyTorch, there and back, of values that the format can hold.
    For those all machines agree, subnormals included: the casts are instructions of IEEE 754, or
    operations on the bits. What is too large, where the casts of float8 differ between versions
    of PyTorch, never reaches them.

    Args:
        tensor: Real floating-point values of any shape.
        format: The format to round to.
        saturate: Whether what is too large, inf too, becomes the largest value of the format, as
            float8 casts of hardware do. If not, it becomes inf, or NaN in e4m3, which has no inf.

    Returns:
        A float32 tensor of the same shape on the same device. NaN stays NaN.

    Sync: none.

    Example:
        >>> from halfstep._numerics.formats import FORMATS
        >>> values = torch.tensor([1.06, 3e-4, 500.0])
        >>> rounded(values, FORMATS["e4m3"], saturate=True).tolist()
        [1.0, 0.0, 448.0]
        >>> rounded(values, FORMATS["e4m3"], saturate=False).tolist()
        [1.0, 0.0, nan]
    """
    values = tensor.float()
    held = values.clamp(-format.largest, format.largest).to(format.dtype).float()
    if saturate:
        return held
    beyond = values * (math.nan if format.name == "e4m3" else math.inf)
    return torch.where(values.abs() > format.last_held, beyond, held)
