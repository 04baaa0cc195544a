"""Rounds of steps that no scaler counts."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch

from halfstep._gradients.gradients import parameters
from halfstep._pytorch import autograd


class Rounds:
    """Rounds of steps without a scaler: in a round each optimizer steps once.

    One that has not stepped before begins another round, unless there was only one.
    """

    def __init__(self) -> None:
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._is_first, self._has_begun = True, False

    def __bool__(self) -> bool:
        return len(self._known) > 0

    def add(self, optimizer: torch.optim.Optimizer) -> bool:
        """Note a step; return whether it begins a round."""
        # Those that have stepped may be gone: the last step of a run is reported at its end.
        is_known = optimizer in self._known or (self._is_first and len(self._stepped) > 0)
        begins = not (self._has_begun and is_known and optimizer not in self._stepped)
        if begins:
            self._is_first, self._has_begun = not self._known, True
            self._stepped.clear()
        self._stepped.add(optimizer)
        self._known.add(optimizer)
        return begins

    @property
    def is_open(self) -> bool:
        """Whether some optimizers have stepped in this round, and others are to come."""
        return 0 < len(self._stepped) < len(self._known)

    def is_ahead(self, losses: Iterable[torch.Tensor]) -> bool:
        """Return whether losses belong to the round after an open one.

        That is so if an optimizer steps on them that has stepped in it: one of their weights, and
        of several the one whose gradients are unset. Sync: none.
        """
        if not self.is_open:
            return False
        leaves = set(map(id, autograd.leaves_of(losses)))
        of_each = {each: parameters(each) for each in self._known}
        owners = [each for each, own in of_each.items() if not leaves.isdisjoint(map(id, own))]
        unset = [each for each in owners if all(w.grad is None for w in of_each[each])]
        return bool(owners) and self._stepped.issuperset(unset or owners)

    def end(self) -> None:
        """End the round: the next step begins one."""
        self._stepped.clear()
        self._has_begun = False
