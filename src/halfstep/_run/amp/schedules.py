"""Schedules move on only if a step of their optimizer was taken since they last did.

A schedule that is stepped once in an iteration then waits with its optimizer. One that is stepped
once in an epoch moves on, though the last step of the epoch was skipped.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep._common.patches import Patches, subclasses
from halfstep._pytorch import optim
from halfstep._run.amp.findings import Findings
from halfstep._scaler import Outcome

NUM_UNREAD = 64
"""So many outcomes that lie on the device are kept before they are read."""


class _Steps:
    """The steps of an optimizer: how many there were, and which was the last that was taken."""

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


class Schedules:
    """Puts itself around ``step`` of every class of schedulers."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._steps: weakref.WeakKeyDictionary[Optimizer, _Steps] = weakref.WeakKeyDictionary()
        self._moved: weakref.WeakKeyDictionary[LRScheduler, int] = weakref.WeakKeyDictionary()

    def note(self, optimizer: Optimizer, taken: bool | Outcome) -> None:
        """Take note of a step; an outcome is read when a schedule asks. Sync: none."""
        self._steps.setdefault(optimizer, _Steps()).add(taken)

    def install(self, patches: Patches) -> None:
        """Put ourselves around the schedulers that there are, and those to come."""
        watched: set[type] = set()

        def watch(cls: type) -> None:
            if cls not in watched and "step" in vars(cls):
                watched.add(cls)
                patches.wrap(cls, "step", self._step)

        def init_subclass(cls: type[LRScheduler], /, **kwargs: Any) -> None:
            super(LRScheduler, cls).__init_subclass__(**kwargs)
            watch(cls)

        for cls in (LRScheduler, *subclasses(LRScheduler)):
            watch(cls)
        patches.put(LRScheduler, "__init_subclass__", classmethod(init_subclass))

    def _step(
        self, original: Callable[..., Any], scheduler: LRScheduler, *args: Any, **kwargs: Any
    ) -> Any:
        if self._findings.is_training and not self._may_move(scheduler):
            return None
        return original(scheduler, *args, **kwargs)

    def _may_move(self, scheduler: LRScheduler) -> bool:
        steps = self._steps.get(scheduler.optimizer)
        count = 0 if steps is None else steps.count
        before = self._moved.get(scheduler, 0)
        if not optim.is_being_made(scheduler):
            self._findings.schedules.setdefault(type(scheduler).__name__)
            if steps is not None and count > before and steps.last_taken() <= before:
                return False
        self._moved[scheduler] = count
        return True
