"""How a scaler talks to an optimizer: its name, and the scale that it may handle itself."""

from __future__ import annotations

import inspect
from typing import Any

import torch

_HANDLES_SCALE = "_step_supports_amp_scaling"


def name(optimizer: object) -> str:
    """Return what an error message calls the optimizer: its class."""
    return type(optimizer).__name__


def handles_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether ``optimizer.step`` divides by the scale and skips by itself.

    A wrapper that only passes attributes on to a fused optimizer does not count: ``grad_scale`` and
    ``found_inf``, set on the wrapper, would not reach the optimizer, and it would step with both
    forgotten.
    """
    holders = (vars(holder) for holder in (optimizer, *type(optimizer).__mro__))
    found = (names[_HANDLES_SCALE] for names in holders if _HANDLES_SCALE in names)
    return next(found, False) is True


def takes_scaler(optimizer: torch.optim.Optimizer) -> bool:
    """Say whether ``optimizer.step`` wants the scaler itself, the older protocol."""
    return "grad_scaler" in inspect.signature(optimizer.step).parameters


def step_with_scale(
    optimizer: torch.optim.Optimizer,
    scale: torch.Tensor | None,
    found_inf: torch.Tensor,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``optimizer.step`` with ``grad_scale`` and ``found_inf`` set for the time of the call.

    Args:
        optimizer: It divides its gradients by ``grad_scale`` and steps unless ``found_inf`` is 1.
        scale: What its gradients are multiplied by, None if they are not. A ``grad_scale`` that the
            user has set is multiplied with it.
        found_inf: float32 scalar, 1 or 0.
        args: Arguments for ``optimizer.step``.
        kwargs: Keyword arguments for it.

    Sync: none.
    """
    grad_scale = getattr(optimizer, "grad_scale", None)
    if scale is not None:
        grad_scale = scale if grad_scale is None else scale * grad_scale
    optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf  # type: ignore[attr-defined]
    try:
        return optimizer.step(*args, **kwargs)
    finally:
        del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
