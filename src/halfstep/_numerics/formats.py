"""Number formats: where each ends, above and below, and rounding to one.

Sources: IEEE 754-2019 (binary16); P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
arXiv:2209.05433 (E4M3, E5M2). Rounding is to nearest, ties to even, as in casts of PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


@dataclass(frozen=True)
class Format:
    """A floating-point format.

    Attributes:
        name: The name in a record, ``"fp16"``.
        dtype: PyTorch's dtype.
        largest: The largest finite value.
        smallest_normal: The smallest value with full precision.
        smallest_subnormal: The smallest value above zero.
        last_held: The largest float32 that is rounded to a finite value.
    """

    name: str
    dtype: torch.dtype
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    last_held: float

    @property
    def flushed_below(self) -> float:
        """The largest magnitude that is rounded to zero: half the smallest subnormal value."""
        return self.smallest_subnormal / 2


def _format(name: str, dtype: torch.dtype, *, has_inf: bool = True) -> Format:
    info = torch.finfo(dtype)
    subnormal = info.smallest_normal * info.eps
    # The tie with the value that would come next. It is rounded to inf, since the largest finite
    # value is odd; in e4m3, whose last odd value is NaN, it is rounded down.
    ulp = info.eps * 2.0 ** math.floor(math.log2(info.max))
    tie = info.max + ulp / 2
    last_held = math.nextafter(tie, 0.0) if has_inf else tie
    in_float32 = torch.tensor(last_held, dtype=torch.float64).float()
    if in_float32.double() > last_held:
        in_float32 = torch.nextafter(in_float32, torch.tensor(0.0))
    return Format(name, dtype, info.max, info.smallest_normal, subnormal, in_float32.item())


FORMATS = {
    format.name: format
    for format in (
        _format("fp16", torch.float16),
        _format("bf16", torch.bfloat16),
        _format("e4m3", torch.float8_e4m3fn, has_inf=False),
        _format("e5m2", torch.float8_e5m2),
    )
}
"""The formats, by their names in a record."""

FORMATS_BY_DTYPE = {dtype_name(format.dtype): format for format in FORMATS.values()}
"""The formats, by the names of their dtypes, such as ``"float16"``."""


def rounded(tensor: Tensor, format: Format, *, saturate: bool) -> Tensor:
    """Return the values of a tensor as a format holds them: to nearest, ties to even.

    PyTorch casts the values that the format can hold, there and back. All machines agree on those,
    subnormals included: the casts are instructions of IEEE 754, or operations on the bits. Values
    that are too large are never cast, since versions of PyTorch treat them differently in float8.

    Args:
        tensor: Real floating-point values of any shape.
        format: The format to round to.
        saturate: Whether values that are too large, inf included, become the largest value of the
            format, as in the float8 casts of hardware. Otherwise they become inf, or NaN in e4m3,
            which has no inf.

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
