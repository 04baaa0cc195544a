"""Norms of gradients, single and total, each in one read (1 G), and the clip coefficient.

PyTorch's kernel reduces them all at once. Sync: none, in all of these functions.

Source of the clipping: Pascanu et al., "On the difficulty of training recurrent neural networks"
(2013, arXiv:1211.5063), with the epsilon of ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._gradients.gradients import Gradients
from halfstep._gradients.scalars import (
    READABLE,
    Scalar,
    as_tensor,
    flag_nonfinite,
    is_nonfinite,
    reciprocal,
    root,
    scalar,
)
from halfstep._pytorch.amp import norms_of_each, set_grad_enabled
from halfstep._pytorch.devices import has_float64, to_device, widest_float

CLIP_EPSILON = 1e-6
"""The epsilon that PyTorch adds to the norm before it divides by it."""


class Norms(NamedTuple):
    """The L2 norm of every gradient, on the devices where the gradients are."""

    params: list[Tensor]
    on_device: Mapping[torch.device, tuple[Sequence[int], Tensor]]
    """By device: the positions of its gradients in ``params``, and the sums of their squares."""
    scale: Scalar | None
    """The number by which the gradients were multiplied when measured; None if unscaled."""
    squares: Scalar = math.nan
    """The sum of all squares, over all ranks, once it was formed."""
    found_inf: Tensor | None = None
    """1 if that is inf or NaN, else 0, on the device of the scale; None if the host knows it."""

    @property
    def norm(self) -> Scalar:
        """The total norm, unscaled, once the squares were summed."""
        norm = root(self.squares)
        return norm if self.scale is None else norm / self.scale

    def flag(self, device: torch.device) -> Tensor:
        """Return 1 if the sum of all squares is inf or NaN, else 0, on the device of the scale."""
        return flag_nonfinite(self.squares, device) if self.found_inf is None else self.found_inf

    def sum_of_squares(self, device: torch.device, shares: Sequence[float] = ()) -> Tensor:
        """Return the sum of all squares, not unscaled, on ``device``, weighted by ``shares``."""
        sums = []
        for where, (positions, squares) in self.on_device.items():
            if shares:
                own = [shares[position] for position in positions]
                squares = squares * torch.tensor(own, dtype=squares.dtype).to(squares.device)
            total = squares.sum()
            if where != device:
                total = to_device(total if has_float64(device) else total.float(), device)
            sums.append(total)
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


def norms_of(
    gradients: Gradients, scale: Scalar | None, device: torch.device | None = None
) -> Norms:
    """Return the norms of gradients that are multiplied by ``scale``. One read (1 G).

    A norm is inf or NaN if and only if the gradient has such an entry, so this is also a check.
    With a ``device``, that of the scale, the sum of all squares is formed there.
    """
    on_device = {}
    is_grad_enabled = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        for where, positions in gradients.by_device().items():
            values = gradients.values
            if len(positions) < len(values):
                values = [values[position] for position in positions]
            on_device[where] = positions, sums_of_squares(values)
    finally:
        set_grad_enabled(is_grad_enabled)
    norms = Norms(gradients.params, on_device, scale)
    if device is None:
        return norms
    squares = scalar(norms.sum_of_squares(device))
    found_inf = is_nonfinite(squares) if isinstance(squares, Tensor) else None
    return Norms(gradients.params, on_device, scale, squares, found_inf)


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
"""Number of squares that are added up in float32; the norms of the rows are added up in float64."""

SMALL = 1 << 15
"""Number of entries up to which a CPU tensor is converted to float64, which copies it."""


def sums_of_squares(tensors: Sequence[Tensor]) -> Tensor:
    """Return the sum of squares of every tensor.

    The square root has a relative error of 1e-5. Squares may underflow in float32: entries below
    1e-19 may count as zero. A sum that overflows becomes the largest finite number.

    Takes one or more real, strided tensors on one device, of any shapes and dtypes, and returns
    float64 ``[len(tensors)]``, inf or NaN if and only if that tensor contains inf or NaN. On a
    device without float64 it is float32, and inf also for a norm above 1.8e19. The result has no
    gradient.
    """
    device = tensors[0].device
    dtype = widest_float(device)
    shortened = list(tensors)
    if device.type in READABLE and any(map(SMALL.__lt__, map(Tensor.numel, tensors))):
        shortened = list(map(_shortened, tensors))
    sums = torch.stack(norms_of_each(shortened, 2, dtype=dtype)).square_()
    if dtype is torch.float32:
        return sums  # an overflow of the sum is one of the gradients, which could not be clipped
    may_exceed = torch.float64 in map(attrgetter("dtype"), tensors)
    if may_exceed and not (device.type in READABLE and sums.isfinite().all()):
        is_finite = largest_magnitudes(tensors).isfinite()
        sums = torch.where(is_finite, sums.clamp(max=torch.finfo(dtype).max), sums)
    return sums


def largest_magnitudes(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest absolute value of every tensor: 0 if empty, NaN if it contains NaN.

    Takes tensors as above; returns ``[len(tensors)]`` in the widest of their dtypes and float32.
    """
    widest = reduce(torch.promote_types, {tensor.dtype for tensor in tensors}, torch.float32)
    # The kernel rejects an empty tensor.
    filled = [tensor if tensor.numel() else tensor.new_zeros(1) for tensor in tensors]
    return torch.stack(norms_of_each(filled, math.inf, dtype=widest))


def _shortened(tensor: Tensor) -> Tensor:
    """Return a tensor of the same norm: for a large one, the norms of its rows.

    PyTorch's CPU kernel copies what it is to add up in float64, and takes 100 times as long.
    """
    size = tensor.numel()
    if size <= SMALL:
        return tensor
    if not tensor.is_contiguous():  # any order of the entries will do, so that nothing is copied
        by_stride = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        tensor = tensor.permute(by_stride)
    entries, end = tensor.reshape(-1), size - size % ROW
    # In pieces, so that one that is converted stays in the cache.
    pieces = torch.split(entries[:end].view(-1, ROW), ROW)
    return torch.cat([*map(_norms_of_rows, pieces), entries[end:].double()])


def _norms_of_rows(rows: Tensor) -> Tensor:
    wide = torch.promote_types(rows.dtype, torch.float32)
    norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=wide).double()
    is_exceeded = norms.isfinite().logical_not_()
    if is_exceeded.any():  # maybe by the squares alone
        norms[is_exceeded] = torch.linalg.vector_norm(rows[is_exceeded], dim=1, dtype=norms.dtype)
    return norms
