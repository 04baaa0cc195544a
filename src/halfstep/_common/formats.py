"""Number formats and their limits.

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
