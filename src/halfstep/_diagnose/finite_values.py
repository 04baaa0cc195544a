"""Checks of losses and gradients of a loop, unseen by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._numerics.measure import NAN, badness, is_finite
from halfstep._pytorch import amp, modes
from halfstep._scaler.gradients import parameters


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors are finite, as far as they can be asked. Sync: one for each."""
    with modes.unseen_by_modes(), suppress(Exception):  # of a subclass that knows few functions
        return all(map(is_finite, tensors))
    return True


def has_finite_gradients(optimizer: Optimizer) -> bool:
    """Return whether all gradients of an optimizer are finite. Sync: one for each device."""
    with modes.unseen_by_modes(), torch.no_grad():
        grads = [p.grad for p in parameters(optimizer) if p.grad is not None]
        dense = [grad for grad in grads if _is_plain(grad)]
        norms = _values_of(amp.norms_of_each(dense)) if dense else []
        # A norm may overflow, and that of another layout may not be known: these are read again.
        doubtful = [g for g, norm in zip(dense, norms, strict=True) if not math.isfinite(norm)]
        return are_finite([*doubtful, *(g for g in grads if not _is_plain(g))])


def _values_of(norms: Sequence[Tensor]) -> list[float]:
    on_each: dict[torch.device, list[Tensor]] = {}
    for norm in norms:
        on_each.setdefault(norm.device, []).append(norm.float())
    values = {device: iter(torch.stack(some).tolist()) for device, some in on_each.items()}
    return [next(values[norm.device]) for norm in norms]


def _is_plain(grad: Tensor) -> bool:
    return type(grad) is Tensor and grad.layout is torch.strided and grad.is_floating_point()


def has_nan(model: nn.Module) -> bool:
    """Return whether a gradient of a model has a NaN. Sync: one for each gradient."""
    with modes.unseen_by_modes():
        return any(p.grad is not None and badness(p.grad) == NAN for p in model.parameters())
