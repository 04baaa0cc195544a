"""Number formats: their limits, and rounding to them.

Sources: IEEE 754-2019 (binary16); P. Micikevicius et al., "FP8 Formats for Deep Learning", 2022,
arXiv:2209.05433 (E4M3, E5M2). Rounding is to nearest, ties to even, as in PyTorch's casts. The
limits are computed from the bit layouts, so that reading a record does not require PyTorch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
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
        dtype_name: PyTorch's name, ``"float16"``.
        largest: The largest finite value.
        smallest_normal: The smallest value with full precision.
        smallest_subnormal: The smallest value above zero.
        last_held: The largest float32 number that rounds to a finite value.
    """

    name: str
    dtype_name: str
    largest: float
    smallest_normal: float
    smallest_subnormal: float
    last_held: float

    @property
    def dtype(self) -> torch.dtype:
        """The PyTorch dtype."""
        import torch

        found = getattr(torch, self.dtype_name)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def flushed_below(self) -> float:
        """The largest magnitude that rounds to zero: half the smallest subnormal."""
        return self.smallest_subnormal / 2


def _format(
    name: str, dtype_name: str, largest: float, first: int, digits: int, *, has_inf: bool = True
) -> Format:
    """Return a format; ``first``: exponent of the smallest normal, ``digits``: stored digits."""
    last = math.floor(math.log2(largest))
    # The tie with the next value beyond. It rounds to inf, since the largest finite value is odd;
    # in e4m3, whose last odd value is NaN, it rounds down.
    tie = largest + 2.0 ** (last - digits) / 2
    last_held = tie - 2.0 ** (last - 23) if has_inf else tie
    return Format(name, dtype_name, largest, 2.0**first, 2.0 ** (first - digits), last_held)


FORMATS = {
    format.name: format
    for format in (
        _format("fp16", "float16", 65504.0, -14, 10),
        _format("bf16", "bfloat16", (2 - 2**-7) * 2.0**127, -126, 7),
        _format("e4m3", "float8_e4m3fn", 448.0, -6, 3, has_inf=False),
        _format("e5m2", "float8_e5m2", 57344.0, -14, 2),
    )
}
"""The formats, by their names in a record."""

FORMATS_BY_DTYPE = {format.dtype_name: format for format in FORMATS.values()}
"""The formats, by the names of their dtypes, such as ``"float16"``."""


def rounded(tensor: Tensor, format: Format, *, saturate: bool) -> Tensor:
    """Return the values of a tensor rounded to a format: to nearest, ties to even.

    PyTorch casts the values within the range of the format, back and forth. These casts agree on
    all machines, including subnormals: they are IEEE 754 instructions or bit operations. Values out
    of range are never cast, since PyTorch versions treat them differently in float8.

    Args:
        tensor: Real floating-point values of any shape.
        format: The format to round to.
        saturate: Whether values out of range, including inf, become the largest value of the
            format, as in the float8 casts of hardware. Otherwise they become inf, or NaN in e4m3,
            which has no inf.

    Returns:
        A float32 tensor of the same shape on the same device. NaN stays NaN.

    Sync: none.

    Example:
        >>> import torch
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
    return beyond.where(values.abs() > format.last_held, held)
