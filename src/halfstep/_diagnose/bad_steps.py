"""Signs of a bad step: losses and gradients that are not finite, and unexpected skips."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn

from halfstep._numerics.measure import NAN, badness, is_finite
from halfstep._pytorch import amp, modes
from halfstep._scaler import Outcome, Reason

START_STEPS = 50
"""The number of steps that count as the start of a run."""
START_SKIPS = 16
"""The largest number of skips at the start that count as the search for a usable scale."""
MOST_SKIPPED = 0.75
"""The largest share of skipped steps that counts as the search for a usable scale."""


class ExpectedSkips:
    """Classifier of skips as part of dynamic scaling or not."""

    def __init__(self) -> None:
        self._num_steps = self._num_skips = 0
        self._last_taken: Outcome | None = None

    def is_bad(self, outcome: Outcome) -> bool:
        """Return whether a finished step is bad. Sync: one for a fused optimizer."""
        self._num_steps += 1
        if outcome.taken:
            self._last_taken = outcome  # the scale is read only if a skip follows
            return False
        if outcome.reason is not Reason.OVERFLOW:
            return outcome.reason is not Reason.NORM
        self._num_skips += 1
        if self._num_skips <= START_SKIPS and self._num_steps <= START_STEPS:
            return False
        taken = self._last_taken
        has_just_grown = taken is not None and outcome.scale > taken.scale
        is_rare = self._num_skips <= max(START_SKIPS, MOST_SKIPPED * self._num_steps)
        return not (has_just_grown and is_rare)


# --- checks of losses and gradients, hidden from the loop -----------------------------------------


def are_finite(tensors: Iterable[Tensor]) -> bool:
    """Return whether all tensors are finite; True if that cannot be told. Sync: one for each."""
    with modes.unseen_by_modes(), suppress(Exception):  # a subclass may lack the functions
        return all(map(is_finite, tensors))
    return True


def have_finite_gradients(weights: Iterable[Tensor]) -> bool:
    """Return whether all gradients of weights are finite. Sync: one for each device."""
    with modes.unseen_by_modes(), torch.no_grad():
        grads = [weight.grad for weight in weights if weight.grad is not None]
        dense = [grad for grad in grads if _is_plain(grad)]
        norms = _values_of(amp.norms_of_each(dense)) if dense else []
        # A norm may overflow although all entries are finite, and other layouts may have no norm:
        # check the entries of these gradients.
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
    """Return whether a gradient of a model contains a NaN. Sync: one for each gradient."""
    with modes.unseen_by_modes():
        return any(p.grad is not None and badness(p.grad) == NAN for p in model.parameters())
