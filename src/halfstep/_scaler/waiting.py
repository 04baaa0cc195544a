"""Schedules that wait for a step of their optimizer that was taken."""

from __future__ import annotations

import weakref
from typing import Any

from halfstep._scaler.optimizers import members
from halfstep._scaler.outcome import Outcome

NUM_UNREAD = 64
"""At most this many outcomes stay on the device before they are read."""


class _TakenSteps:
    """The number of steps of an optimizer, and the last one that was taken."""

    def __init__(self) -> None:
        self.count = 0
        self._last_taken = 0
        self._unread: list[tuple[int, Outcome]] = []

    def add(self, taken: bool | Outcome) -> None:
        self.count += 1
        if isinstance(taken, Outcome):
            self._unread.append((self.count, taken))
            if len(self._unread) >= NUM_UNREAD:
                self.last_taken()
        elif taken:
            self._last_taken = self.count

    def last_taken(self) -> int:
        """Return the number of the last step that was taken. Sync: one if it is not known yet."""
        for number, outcome in reversed(self._unread):
            if outcome.taken:
                self._last_taken = number
                break
        self._unread = []
        return self._last_taken


class Waiting:
    """Decides which schedules move on: not where all steps since the last move were skipped."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, _TakenSteps] = weakref.WeakKeyDictionary()
        self._moved: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def note(self, optimizer: Any, taken: bool | Outcome) -> None:
        """Note a step; an outcome is read only when a schedule needs it. Sync: none.

        One of a container is one of all that it holds.
        """
        for each in members(optimizer):
            self._steps.setdefault(each, _TakenSteps()).add(taken)

    def note_move(self, scheduler: Any) -> None:
        """Note that a schedule has moved on."""
        self._moved[scheduler] = self._count(scheduler)

    def may_move(self, scheduler: Any) -> bool:
        """Return whether a schedule moves on now; then that is noted.

        Sync: one if the outcome of a step is not known yet.
        """
        before = self._moved.get(scheduler, 0)
        has_stepped = self._count(scheduler) > before
        if has_stepped and self._steps[scheduler.optimizer].last_taken() <= before:
            return False
        self.note_move(scheduler)
        return True

    def _count(self, scheduler: Any) -> int:
        steps = self._steps.get(scheduler.optimizer)
        return 0 if steps is None else steps.count
