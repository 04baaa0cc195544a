"""The outcomes of all steps, who follows them, and what is remembered of an optimizer."""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from itertools import islice, takewhile
from typing import Any, Protocol

import torch
from torch import Tensor

from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import HANDLES_SCALE, makes_step_of, members, name
from halfstep._pytorch.distributed import default_group
from halfstep._scaler.clipping import EarlyClipping
from halfstep._scaler.outcome import HistoryEntry, Outcome, read_all
from halfstep._scaler.ranks import Alone, Together
from halfstep.errors import CallOrderError

HISTORY_LENGTH = 10_000  # of outcomes at most; each takes a few hundred bytes on the device


class Plan:
    """What outlives an iteration of an optimizer: its last outcome, and how its usual steps go."""

    group: Any  # the process group of all ranks
    flag: object  # by which the optimizer says that it handles the scale
    fused: list[Any]  # what its groups say of that
    is_fused: bool  # whether it does
    ranks: Alone  # who decides
    param_ids: frozenset[int]
    is_measured_fast: bool | None  # whether norms cost no more than a check; None: not known
    versions: list[int]  # those that its last usual call left in the gradients

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer, self.id = weakref.ref(optimizer), id(optimizer)
        self.outcome: Outcome | None = None
        self.early_clipping = EarlyClipping()
        self.params: list[Tensor] | None = None  # None: no usual steps

    def make(self, ranks: Alone | Together, *, is_fused: bool) -> None:
        """Find out what usual steps need not find out again, once the first steps are over."""
        optimizer = self.optimizer()
        if optimizer is None or ranks.is_together or not self.early_clipping.is_over:
            return
        if [*map(id, members(optimizer))] == [id(optimizer)]:  # no container
            self.params, self.group = parameters(optimizer), default_group()
            self.param_ids, self.ranks = frozenset(map(id, self.params)), ranks
            self.is_fused, self.flag = is_fused, getattr(optimizer, HANDLES_SCALE, None)
            self.fused = [group.get("fused") for group in optimizer.param_groups]
            self.is_measured_fast = None


class Journal:
    """The outcomes in the order of the steps. Sync: none, except :meth:`entries`."""

    def __init__(self) -> None:
        # By id of the optimizer, until it no longer exists: data classes are not hashable. In the
        # order of their last steps.
        self.plans: dict[int, Plan] = {}
        self._all: deque[Outcome] = deque(maxlen=HISTORY_LENGTH)
        self.open: list[Outcome] = []  # of the iteration that has not ended

    def plan(self, optimizer: torch.optim.Optimizer) -> Plan:
        """Return the plan of an optimizer, a new one if it is not known."""
        plan = self.plans.get(id(optimizer))
        if plan is None:
            plan = self.plans[id(optimizer)] = Plan(optimizer)
            # The callback must not keep the journal alive as long as the optimizer.
            arguments = weakref.ref(self), id(optimizer), plan
            weakref.finalize(optimizer, _forget, *arguments).atexit = False
        return plan

    def add(self, plan: Plan, outcome: Outcome) -> None:
        if plan.outcome is not None:
            plan.outcome._kept = None
        plan.outcome = outcome
        self.plans.pop(plan.id, None)
        self.plans[plan.id] = plan
        self._all.append(outcome)
        self.open.append(outcome)

    def newest(self, count: int) -> list[Outcome]:
        """Return the last ``count`` outcomes, newest last. Sync: none."""
        return list(islice(reversed(self._all), count))[::-1]

    def of(self, optimizer: torch.optim.Optimizer) -> Outcome:
        """Return the outcome of :meth:`last`; raise CallOrderError if there is none."""
        outcome = self.last(optimizer)
        if outcome is None:
            raise CallOrderError(
                f"outcome({name(optimizer)}): no step of this optimizer has been checked yet. Call "
                "scaler.step(optimizer), or optimizer.step() with a guard, first; on meta and fake "
                "tensors there is nothing to check"
            )
        return outcome

    def last(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        """Return the outcome of the last step of an optimizer, or of a container that holds it."""
        for plan in [*self.plans.values()][::-1]:
            if plan.outcome is not None and makes_step_of(plan.optimizer(), optimizer):
                return plan.outcome
        return None

    def entries(self) -> list[HistoryEntry]:
        """Return all outcomes as history entries, oldest first. Sync: one."""
        return read_all(list(self._all))


def _forget(journal: weakref.ref[Journal], key: int, plan: Plan) -> None:
    if plan.outcome is not None:
        plan.outcome._kept = None
        plan.outcome = None
    alive = journal()
    if alive is not None:
        alive.plans.pop(key, None)


# --- schedules that follow them -------------------------------------------------------------------


class DueSchedules:
    """The schedules that may advance: not if all steps since their last move were skipped."""

    def __init__(self) -> None:
        # The newest steps by optimizer: a number, and whether it was taken, or the outcome.
        self._steps: weakref.WeakKeyDictionary[Any, deque[tuple[int, bool | Outcome]]]
        self._steps = weakref.WeakKeyDictionary()
        self._moved: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def note(self, optimizer: Any, taken: bool | Outcome) -> None:
        """Record a step; an outcome is read only when a schedule needs it. Sync: none.

        A step of a container counts for all its members.
        """
        for member in members(optimizer):
            steps = self._steps.setdefault(member, deque(maxlen=HISTORY_LENGTH))
            steps.append((_last_number(steps) + 1, taken))

    def note_move(self, scheduler: Any) -> None:
        self._moved[scheduler] = _last_number(self._steps.get(scheduler.optimizer, ()))

    def try_move(self, scheduler: Any) -> bool:
        """Record that a schedule advances, if it may; return whether it may. Sync: one at most."""
        before, steps = self._moved.get(scheduler, 0), self._steps.get(scheduler.optimizer, ())
        since = [*takewhile(lambda step: step[0] > before, reversed(steps))]
        if since and not any(each if isinstance(each, bool) else each.taken for _, each in since):
            return False
        self.note_move(scheduler)
        return True


def _last_number(steps: Sequence[tuple[int, bool | Outcome]]) -> int:
    return steps[-1][0] if steps else 0


# --- who is shown them ----------------------------------------------------------------------------


class Observer(Protocol):
    """An observer of the losses and iterations of all scalers. It must not wait for the device."""

    is_diagnosing: bool  # whether it explains what goes bad

    # Scalers stand above this file, so their type has no name here.
    def on_loss(self, scaler: Any, outputs: Any) -> None:
        """Handle the argument of ``scale`` before it is scaled."""

    def on_iteration(
        self, scaler: Any, outcomes: Sequence[Outcome], left_out: Sequence[Outcome]
    ) -> None:
        """Handle the end of an iteration: its steps, and optimizers that were only unscaled."""


OBSERVERS: list[Observer] = []  # the active observers, oldest first


class _Thread(threading.local):
    stepping: Any = None  # the GradScaler, also of a guard, that is stepping an optimizer


THIS_THREAD = _Thread()
