"""Notice gradients that were clipped before they were unscaled.

The scaled norm is then the same small number in every step, and so the update is smaller by the
scale than it should be: training looks stuck, without a word.
"""

from __future__ import annotations

import warnings

import torch

from halfstep._scaler.optimizers import name

NUM_STEPS = 3
"""Steps of each optimizer that are compared: clipping is in the loop from the first step on."""

SMALLEST_MAX_NORM = 1e-3
"""A constant norm below this times the scale means clipping before unscaling: nobody clips unscaled
gradients to less, and clipping scaled ones to ``max_norm * scale``, which is right, leaves more."""


def see_first_norm(
    norms: list[float], optimizer: torch.optim.Optimizer, scaled_norm: float, scale: float
) -> None:
    """Add the finite norm of one of the first steps; warn after the last one if all are the same.

    Two of them are never the same to four digits unless something made them so.

    Args:
        norms: The scaled norms of the steps before.
        optimizer: Whose step it is.
        scaled_norm: The norm of its gradients, still multiplied by the scale.
        scale: The scale.
    """
    norms.append(scaled_norm)
    # In a warm-up that begins at a learning rate of 0 they are the same for another reason.
    has_moved = any(group.get("lr", 1.0) != 0.0 for group in optimizer.param_groups)
    same = has_moved and max(norms) - min(norms) <= 1e-4 * max(norms)
    if len(norms) == NUM_STEPS and same and 0 < max(norms) < SMALLEST_MAX_NORM * scale:
        warnings.warn(
            f"step({name(optimizer)}): the norm of the gradients, still multiplied by the "
            f"scale {scale:g}, was {scaled_norm:.4g} in {NUM_STEPS} steps one after the other. "
            "They seem to be clipped before they are unscaled, which makes every update "
            f"{scale:g} times too small. Call scaler.unscale_(optimizer) before you clip, or "
            "leave the clipping to scaler.step(optimizer, max_norm=...)",
            stacklevel=6,  # the caller of GradScaler.step
        )
