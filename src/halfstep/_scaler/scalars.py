"""Scalars that stay on their devices, and how a message describes a tensor.

Sync: none, in all of these functions, except from another device to the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


def moved(scalar: Tensor, device: torch.device) -> Tensor:
    """Return a scalar on ``device``. Sync: none, except from another device to the CPU."""
    # A copy to the CPU that nobody waits for would be read before it has arrived.
    return scalar.to(device, non_blocking=device.type != "cpu")


def any_of(found: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return one float32 scalar on ``device``: 1 if any of ``found``, all 1 or 0, is 1, else 0."""
    first, *others = (moved(found_inf, device) for found_inf in found)
    return torch.stack([first, *others]).amax() if others else first


def combine(found: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return one float32 scalar on ``device``: 1 if any of ``found`` is 1 or more, else 0.

    Never another number: the fused optimizers of PyTorch 2.13 skip a step only if it is exactly 1,
    and who shares the flag between ranks (``_found_inf_per_device``) may have added it up.
    """
    return any_of(found, device).clamp(max=1.0)


def is_nonfinite(scalar: Tensor) -> Tensor:
    """Return 1.0 if a scalar is inf or NaN, else 0.0, in float32."""
    return (scalar * 0.0).ne(0.0).float()  # torch.isfinite takes four kernels


def to_float32(scalar: Tensor) -> Tensor:
    """Return a scalar in float32; one that is too large for it as the largest number there is."""
    largest = torch.finfo(torch.float32).max
    return torch.where(scalar.isfinite(), scalar.clamp(max=largest), scalar).float()


def reciprocal(scale: Tensor) -> Tensor:
    """Return 1 / scale, rounded once."""
    # Through float64 as in torch.amp: a float32 division may be inexact under some compiler
    # options. MPS has no float64.
    if scale.device.type == "mps":
        return scale.reciprocal()
    return scale.double().reciprocal().float()


def ratio(after: Tensor, before: Tensor) -> Tensor:
    """Return ``after / before``, rounded once, as :func:`reciprocal`."""
    if after.device.type == "mps":
        return after / before
    return (after.double() / before.double()).float()


def describe(tensor: Tensor) -> str:
    """Return dtype, shape and device in a few words: ``float16[4, 8] on cpu``."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{dtype}{list(tensor.shape)} on {tensor.device}"
