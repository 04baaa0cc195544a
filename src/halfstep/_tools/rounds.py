"""Rounds of steps that no scaler counts."""

from __future__ import annotations

import weakref

import torch


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

    def end(self) -> None:
        """End the round: the next step begins one."""
        self._stepped.clear()
        self._has_begun = False
