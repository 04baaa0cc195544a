"""Passes over gradients: check, measure, divide, multiply; each in as few as it takes.

One *pass* (G) reads all gradients once or writes them once. Sync: none, in all of these functions.

Source of the clipping: Pascanu et al., "On the difficulty of training recurrent neural networks"
(2013, arXiv:1211.5063), with the epsilon of ``torch.nn.utils.clip_grad_norm_``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep._pytorch.amp import (
    check_and_unscale_,
    increment_version,
    norms_of_each,
    set_grad_enabled,
)
from halfstep._scaler.gradients import Gradients
from halfstep._scaler.reductions import largest_magnitudes, sums_of_squares
from halfstep._scaler.scalars import (
    READABLE,
    Scalar,
    as_tensor,
    is_nonfinite,
    moved,
    reciprocal,
)

CLIP_EPSILON = 1e-6
"""What PyTorch adds to the norm before it divides by it."""

NUM_ASKED = 256
LARGE = 1 << 14
"""From this mean size on, norms on the CPU cost no more than a finite check."""


@dataclass(frozen=True, eq=False)
class Norms:
    """The L2 norm of every gradient, on the devices where the gradients are.

    Attributes:
        params: The parameters, in the order of the norms.
        on_device: For each device the positions of its gradients in ``params``, and the sums of
            their squares.
        scale: What the gradients were multiplied by when they were measured, None for nothing.
    """

    params: list[Tensor]
    on_device: Mapping[torch.device, tuple[Sequence[int], Tensor]]
    scale: Scalar | None

    def total(self, device: torch.device) -> Scalar:
        """Return the norm of all gradients together, not unscaled, for ``device``."""
        squares = self.sum_of_squares(device)
        return math.sqrt(squares.item()) if device.type in READABLE else squares.sqrt()

    def sum_of_squares(self, device: torch.device, shares: Sequence[float] = ()) -> Tensor:
        """Return the sum of all squares, not unscaled, on ``device``; each may count a share."""
        sums = []
        for positions, squares in self.on_device.values():
            if any(share != 1.0 for share in shares):
                own = [shares[position] for position in positions]
                squares = squares * torch.tensor(own, dtype=squares.dtype).to(squares.device)
            sums.append(moved(squares.sum(), device))
        if not sums:  # another rank has all of them
            return torch.zeros((), dtype=torch.float64, device=device)
        return sums[0] if len(sums) == 1 else torch.stack(sums).sum()

    def at(self, positions: list[int]) -> Norms:
        """Return the norms at some positions."""
        wanted = {position: index for index, position in enumerate(positions)}
        on_device = {}
        for device, (here, squares) in self.on_device.items():
            found = [index for index, position in enumerate(here) if position in wanted]
            if found:
                # One by one: an index tensor would have to be copied to the device.
                part = torch.stack([squares[index] for index in found])
                on_device[device] = [wanted[here[index]] for index in found], part
        return Norms([self.params[position] for position in positions], on_device, self.scale)

    def unscaled(self) -> list[float]:
        """Return the unscaled norm of every gradient. Sync: one for each device."""
        scale = 1.0 if self.scale is None else float(self.scale)
        norms = [0.0] * len(self.params)
        for positions, squares in self.on_device.values():
            for position, square in zip(positions, squares.tolist(), strict=True):
                norms[position] = math.sqrt(square) / scale
        return norms


@torch.no_grad()
def measure(gradients: Gradients, scale: Scalar | None) -> Norms:
    """Return the norms of gradients that are multiplied by ``scale``. One read (1 G).

    A norm is inf or NaN if and only if the gradient has such an entry, so this checks them too.
    """
    on_device = {}
    for device, positions in gradients.by_device().items():
        values = gradients.values
        if len(positions) < len(values):
            values = [values[position] for position in positions]
        on_device[device] = positions, sums_of_squares(values)
    return Norms(gradients.params, on_device, scale)


def is_measured_fast(gradients: Gradients) -> bool:
    """Return whether :func:`measure` takes no longer than to check in place.

    Not on the CPU if gradients are float16, which is converted first, or many and small: each
    costs a copy.
    """
    for device, dtype in gradients.by_kind:
        if device.type != "cpu":
            return True
        if dtype is torch.float16:
            return False
    # Some of them tell: to ask thousands takes its time.
    some = gradients.values[:: len(gradients.values) // NUM_ASKED + 1]
    return sum(map(Tensor.numel, some)) >= LARGE * len(some)


def unscale_(
    gradients: Gradients, scale: Scalar, *, can_amplify: bool
) -> dict[torch.device, Tensor]:
    """Divide all gradients by the scale in place, and look for inf and NaN. One read and write.

    Divided by a scale that may be below 1 (``can_amplify``), a finite gradient may become inf: they
    are checked once more.

    Returns:
        For each device a float32 scalar, 1 if an inf or NaN was there before or after, else 0.
    """
    found_inf = multiply_(gradients, reciprocal(scale))
    return check(gradients) if can_amplify else found_inf  # what was inf or NaN before still is


def check(gradients: Gradients) -> dict[torch.device, Tensor]:
    """Look for inf and NaN with the kernel that multiplies: by exactly 1 it only looks."""
    return multiply_(gradients, 1.0)


def multiply_(gradients: Gradients, factor: Scalar) -> dict[torch.device, Tensor]:
    """Multiply all gradients by a float32 number in place. One read and write.

    Returns:
        For each device a float32 scalar, 1 if an inf or NaN was there before, else 0.
    """
    found_inf: dict[torch.device, Tensor] = {}
    factors: dict[torch.device, Tensor] = {}
    # A kernel for the check; but it is also the fastest of PyTorch's that multiply by a scalar on
    # the device: 0.8 ms for 4,096 x 256 entries where _foreach_mul_ takes 1.5.
    is_grad_enabled = torch.is_grad_enabled()
    set_grad_enabled(False)
    try:
        for (device, _), values in gradients.by_kind.items():
            if device not in found_inf:
                found_inf[device] = torch.zeros((), dtype=torch.float32, device=device)
                factors[device] = (
                    moved(factor, device)
                    if isinstance(factor, Tensor)
                    else torch.full((), factor, dtype=torch.float32, device=device)
                )
            # Backwards: the ones read last by an earlier pass are still in the cache.
            check_and_unscale_(values[::-1], found_inf[device], factors[device])
            # The kernel does not count as a change. Enough of them do for who looks for changes.
            increment_version((values[0], values[-1]))
    finally:
        set_grad_enabled(is_grad_enabled)
    return found_inf


@torch.no_grad()
def largest(gradients: Gradients, scale: Scalar, device: torch.device) -> Tensor:
    """Return the largest magnitude of gradients multiplied by ``scale``, unscaled. One read (1 G).

    It is inf or NaN if a gradient is.
    """
    amaxes = [largest_magnitudes(values).amax() for values in gradients.by_kind.values()]
    found = torch.stack([moved(amax, device).float() for amax in amaxes])
    return found.amax() * reciprocal(scale)


@torch.no_grad()
def overflows_when_divided(gradients: Gradients, scale: Scalar) -> list[Tensor]:
    """Return whether a finite gradient becomes inf when divided by a scale below 1. One read (1 G).

    A float32 scalar, 1 or 0, for each device and dtype.
    """
    found = []
    for (device, dtype), values in gradients.by_kind.items():
        amax, by = largest_magnitudes(values).amax(), as_tensor(scale, device)
        # Kernels multiply by the reciprocal or divide. Rounded to the dtype of the gradient, both
        # are what they write.
        unscaled = torch.maximum(amax * reciprocal(by), amax / by).to(dtype)
        found.append(is_nonfinite(unscaled))
    return found


@torch.no_grad()
def p_norm(gradients: Gradients, p: float, device: torch.device) -> Tensor:
    """Return the p-norm of all gradients together, a tensor on ``device``. One read (1 G)."""
    found = []
    wide = torch.float32 if device.type == "mps" else torch.float64  # entries ** p may be large
    for values in gradients.by_kind.values():
        if p == math.inf:
            norms = largest_magnitudes(values)
        else:
            norms = torch.stack(list(norms_of_each(values, p, dtype=wide)))
        found.append(moved(_vector_norm(norms, p).to(wide), device))
    return _vector_norm(torch.stack(found), p)


def _vector_norm(norms: Tensor, p: float) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(norms, p)
    return norm


def clip_coefficient(norm: Scalar, max_norm: float) -> Scalar:
    """Return what gradients of this norm are multiplied by so that it is ``max_norm`` at most.

    1 for a norm that is inf or NaN: a gradient of inf times 0 would be NaN, and what was wrong
    with it could no longer be seen.
    """
    if not isinstance(norm, Tensor):
        # As a tensor divides a number: by its reciprocal.
        return min(1.0 / (norm + CLIP_EPSILON) * max_norm, 1.0) if math.isfinite(norm) else 1.0
    coefficient = (max_norm / (norm + CLIP_EPSILON)).clamp(max=1.0)
    return torch.where((norm * 0.0).eq(0.0), coefficient, 1.0)
