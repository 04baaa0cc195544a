"""All outcomes of a scaler: the last of each optimizer in full, the earlier ones in short."""

from __future__ import annotations

import weakref
from collections import deque
from itertools import islice

import torch

from halfstep._scaler.optimizers import name
from halfstep._scaler.outcome import HistoryEntry, Outcome, read_all
from halfstep.errors import CallOrderError

HISTORY_LENGTH = 10_000
"""So many steps are kept, some hundred bytes each on the device."""


class _Slot:
    """The last outcome of an optimizer."""

    outcome: Outcome | None = None

    def clear(self) -> None:
        """Let go of its parameters: the optimizer is gone."""
        if self.outcome is not None:
            self.outcome.forget_gradients()
            self.outcome = None


class Journal:
    """Outcomes in the order of the steps. Sync: none, but for :meth:`entries`."""

    def __init__(self) -> None:
        self._last: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Slot] = (
            weakref.WeakKeyDictionary()
        )
        self._all: deque[Outcome] = deque(maxlen=HISTORY_LENGTH)
        self._open: list[Outcome] = []

    def add(self, optimizer: torch.optim.Optimizer, outcome: Outcome) -> None:
        """Take note of a step."""
        slot = self._last.get(optimizer)
        if slot is None:
            slot = self._last[optimizer] = _Slot()
            # Without the journal, which must not live as long as the optimizer.
            weakref.finalize(optimizer, slot.clear).atexit = False
        slot.clear()
        slot.outcome = outcome
        self._all.append(outcome)
        self._open.append(outcome)

    @property
    def num_optimizers(self) -> int:
        """How many optimizers have stepped and still exist."""
        return len(self._last)

    def last_outcomes(self) -> list[tuple[torch.optim.Optimizer, Outcome | None]]:
        """Return each optimizer that has stepped with the outcome of its last step."""
        return [(optimizer, slot.outcome) for optimizer, slot in self._last.items()]

    def newest(self, count: int) -> list[Outcome]:
        """Return the last outcomes, newest last. Sync: none."""
        return list(islice(reversed(self._all), count))[::-1]

    def end(self) -> list[Outcome]:
        """End an iteration: its outcomes, which are returned, take note of the new scale."""
        ended, self._open = self._open, []
        for outcome in ended:
            outcome.end()
        return ended

    def of(self, optimizer: torch.optim.Optimizer) -> Outcome:
        """Return the outcome of the last step of an optimizer, or of one that it wraps.

        Raises:
            CallOrderError: ``step`` has not been called for it.
        """
        outcome = self.last(optimizer)
        if outcome is None:
            raise CallOrderError(
                f"outcome({name(optimizer)}): no step() of this optimizer has been seen by this "
                "GradScaler. Call scaler.step(optimizer) first"
            )
        return outcome

    def last(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        """Return the same, None if ``step`` has not been called for it."""
        if optimizer in self._last:
            return self._last[optimizer].outcome
        for stepped, slot in self._last.items():
            if stepped.param_groups is optimizer.param_groups:
                return slot.outcome
        return None

    def entries(self) -> list[HistoryEntry]:
        """Return all outcomes in short, oldest first. Sync: one."""
        return read_all(list(self._all))
