"""Notice gradients that were clipped before they were unscaled.

The scaled norm is then the same small number in every step, and so the update is smaller by the
scale than it should be: training looks stuck, without a word.
"""

from __future__ import annotations

import warnings
import weakref

import torch

from halfstep._scaler.optimizers import name

NUM_LOOKS = 3
"""So many steps of each optimizer are looked at: clipping is in the loop from the first step on."""

SMALLEST_MAX_NORM = 1e-3
"""Nobody clips unscaled gradients to less; whoever clips scaled ones to ``max_norm * scale``, which
is right, leaves a larger norm than this."""


class EarlyClipping:
    """Compares the scaled norms of the first steps of each optimizer.

    Two of them are never the same to four digits unless something made them so.
    """

    def __init__(self) -> None:
        self._norms: weakref.WeakKeyDictionary[torch.optim.Optimizer, list[float]] = (
            weakref.WeakKeyDictionary()
        )

    def is_looking(self, optimizer: torch.optim.Optimizer) -> bool:
        """Say whether the scaled norm of this optimizer's next step is still of interest."""
        return len(self._norms.get(optimizer, ())) < NUM_LOOKS

    def see(self, optimizer: torch.optim.Optimizer, scaled_norm: float, scale: float) -> None:
        """Take note of a finite norm; warn after the last one if all are the same."""
        norms = self._norms.setdefault(optimizer, [])
        norms.append(scaled_norm)
        # In a warm-up that begins at a learning rate of 0 they are the same for another reason.
        has_moved = any(group.get("lr", 1.0) != 0.0 for group in optimizer.param_groups)
        same = has_moved and max(norms) - min(norms) <= 1e-4 * max(norms)
        if len(norms) == NUM_LOOKS and same and 0 < max(norms) < SMALLEST_MAX_NORM * scale:
            warnings.warn(
                f"step({name(optimizer)}): the norm of the gradients, still multiplied by the "
                f"scale {scale:g}, was {scaled_norm:.4g} in {NUM_LOOKS} steps one after the other. "
                "They seem to be clipped before they are unscaled, which makes every update "
                f"{scale:g} times too small. Call scaler.unscale_(optimizer) before you clip, or "
                "leave the clipping to scaler.step(optimizer, max_norm=...)",
                stacklevel=7,  # the caller of GradScaler.step
            )
