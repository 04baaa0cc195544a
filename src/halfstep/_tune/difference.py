"""How far a tensor is from what it is in float32, as a few numbers that add up."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Difference:
    """Of one tensor, or of several together: differences add up with ``+``.

    Attributes:
        size: Number of entries.
        square_error: Sum of the squares of the errors, where both are finite.
        square_norm: Sum of the squares of float32's values there.
        overflow: How many entries are inf or NaN that are finite in float32.
        flushed: How many are zero that are not in float32.
        nonzero: How many are not zero in float32.
    """

    size: int = 0
    square_error: float = 0.0
    square_norm: float = 0.0
    overflow: int = 0
    flushed: int = 0
    nonzero: int = 0

    def __add__(self, other: Difference) -> Difference:
        return Difference(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def error(self) -> float:
        """The error's norm by that of float32's values; inf after an overflow.

        1 where float32 has zeros only and these are not: there all is error.

        Example:
            >>> Difference(size=2, square_error=1e-4, square_norm=4.0, nonzero=2).error
            0.005
        """
        if self.overflow:
            return math.inf
        if not self.square_norm:
            return 1.0 if self.square_error else 0.0
        return math.sqrt(self.square_error / self.square_norm)

    @property
    def overflow_share(self) -> float:
        """Share of the entries that are inf or NaN, and are finite in float32."""
        return self.overflow / self.size if self.size else 0.0

    @property
    def underflow_share(self) -> float:
        """Share of the entries, not zero in float32, that are zero."""
        return self.flushed / self.nonzero if self.nonzero else 0.0


UNCOMPARABLE = Difference(size=1, square_error=1.0, square_norm=1.0)
"""Of tensors whose shapes differ, since the program took another way: an error of 1."""


@torch.no_grad()
def difference(seen: Tensor, wanted: Tensor, scale: float = 1.0) -> Difference:
    """Compare a tensor with what it is in float32.

    Args:
        seen: Of any floating dtype, multiplied by ``scale``.
        wanted: Of the same shape, in float32 or float64. Where it is not finite itself, as in a
            mask of -inf, nothing is compared.
        scale: A power of two.

    Sync: several.
    """
    if seen.shape != wanted.shape:
        return UNCOMPARABLE
    # Sums of squares of float32 fit into float64, which Apple's GPUs do not have.
    accurate = torch.float32 if wanted.device.type == "mps" else torch.float64
    seen, wanted = _dense(seen).to(accurate) / scale, _dense(wanted).to(accurate)
    square_norm, square_error = _square_sum(wanted), _square_sum(seen - wanted)
    overflow = 0
    if not math.isfinite(square_norm + square_error):
        is_wanted = wanted.isfinite()
        overflow = int((is_wanted & ~seen.isfinite()).sum())
        is_held = is_wanted & seen.isfinite()
        seen, wanted = seen[is_held], wanted[is_held]
        square_norm, square_error = _square_sum(wanted), _square_sum(seen - wanted)
    is_nonzero = wanted != 0
    return Difference(
        size=seen.numel() + overflow,
        square_error=square_error,
        square_norm=square_norm,
        overflow=overflow,
        flushed=int((is_nonzero & (seen == 0)).sum()),
        nonzero=int(is_nonzero.sum()),
    )


def amax(tensor: Tensor) -> float:
    """Return the largest magnitude, 0 of nothing. Sync: one."""
    return float(_dense(tensor).abs().max()) if tensor.numel() else 0.0


def _square_sum(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values)) ** 2


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()
