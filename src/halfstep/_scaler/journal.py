"""The outcomes of all steps, and what is remembered of an optimizer from one to the next."""

from __future__ import annotations

import weakref
from collections import deque
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._gradients.gradients import Gradients, Seen, parameters
from halfstep._gradients.optimizers import HANDLES_SCALE, makes_step_of, members, name
from halfstep._scaler.agreement import Alone, Together
from halfstep._scaler.early_clipping import EarlyClipping
from halfstep._scaler.iteration import Iteration, Measured, Remembered, Stage
from halfstep._scaler.ledger import GradientCheck
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import HistoryEntry, Outcome, forget_gradients, read_all
from halfstep._scaler.ranks import key_of
from halfstep.errors import CallOrderError

HISTORY_LENGTH = 10_000
"""Maximum number of outcomes in the history; each takes a few hundred bytes on the device."""


class Memory:
    """The data about an optimizer that outlives an iteration."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.outcome: Outcome | None = None  # of its last step
        self.number = 0  # of that step in the order of all steps
        self.early_clipping = EarlyClipping()
        self.plan: Plan | None = None  # of its usual steps
        # After a step with a closure, by id of the parameter: its gradient and the version of it.
        self.stepped_gradients: dict[int, Seen] = {}

    def clear(self) -> None:
        """Release the parameters: the optimizer no longer exists."""
        if self.outcome is not None:
            forget_gradients(self.outcome)
            self.outcome = None


class Plan(NamedTuple):
    """What a usual step need not find out again.

    Attributes:
        key: A number that changes with the parameters and the ranks of the job.
        flag: The flag by which the optimizer says that it handles the scale.
        is_fused: Whether it does.
        ranks: Who decides.
    """

    key: int
    flag: object
    is_fused: bool
    ranks: Alone


def plan_of(
    optimizer: torch.optim.Optimizer, memory: Memory, ranks: Alone | Together, *, is_fused: bool
) -> Plan | None:
    """Return the plan of an optimizer's usual steps, None if it has none."""
    if ranks.is_together or not memory.early_clipping.is_over:
        return None
    if [*map(id, members(optimizer))] != [id(optimizer)]:  # a container
        return None
    flag = getattr(optimizer, HANDLES_SCALE, None)
    return Plan(key_of(parameters(optimizer)), flag, is_fused, ranks)


class Taken(NamedTuple):
    """The usual step of an iteration.

    Attributes:
        flag: 0, unless a fused optimizer, which gets it, has changed it.
    """

    optimizer: torch.optim.Optimizer
    gradients: Gradients
    plan: Plan
    flag: Tensor
    measured: Measured | None
    outcome: Outcome

    def record(self, iteration: Iteration, loss_scale: LossScale) -> None:
        """Record the step in the iteration, for what is unusual after it."""
        check = GradientCheck(loss_scale, {self.flag.device: self.flag})
        self.plan.ranks.agree_on(check)
        iteration.ledger.mark(self.gradients, check)
        iteration.steps[id(self.optimizer)] = Remembered(
            self.optimizer,
            (check,),
            Stage.STEPPED,
            self.outcome.num_losses,
            self.measured,
            0.0,
            self.plan.ranks,
        )


class Journal:
    """The outcomes in the order of the steps. Sync: none, except :meth:`entries`."""

    def __init__(self) -> None:
        # By id of the optimizer, until it no longer exists: data classes are not hashable.
        self.memories: dict[int, Memory] = {}
        self._all: deque[Outcome] = deque(maxlen=HISTORY_LENGTH)
        self.open: list[Outcome] = []  # of the iteration that has not ended
        self._num_steps = 0

    def memory(self, optimizer: torch.optim.Optimizer) -> Memory:
        memory = self.memories.get(id(optimizer))
        if memory is None:
            memory = self.memories[id(optimizer)] = Memory(optimizer)
            # The callback must not keep the journal alive as long as the optimizer.
            arguments = weakref.ref(self), id(optimizer), memory
            weakref.finalize(optimizer, _forget, *arguments).atexit = False
        return memory

    def add(self, memory: Memory, outcome: Outcome) -> None:
        if memory.outcome is not None:
            forget_gradients(memory.outcome)
        memory.outcome, memory.stepped_gradients = outcome, {}
        self._num_steps += 1
        memory.number = self._num_steps
        self._all.append(outcome)
        self.open.append(outcome)

    def newest(self, count: int) -> list[Outcome]:
        """Return the last ``count`` outcomes, newest last. Sync: none."""
        return list(islice(reversed(self._all), count))[::-1]

    def of(self, optimizer: torch.optim.Optimizer) -> Outcome:
        """Return the outcome of the last step of an optimizer.

        It may be the step of an optimizer that it wraps, or of a container that holds it.

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
        """Return the outcome of the last step of an optimizer, None if there was none."""
        own = self.memories.get(id(optimizer))
        if own is not None and own.number == self._num_steps:  # as with one optimizer
            return own.outcome
        newest = None
        for memory in self.memories.values():
            stepped = memory.optimizer()
            is_newer = newest is None or memory.number > newest.number
            if memory.outcome is not None and is_newer and makes_step_of(stepped, optimizer):
                newest = memory
        return None if newest is None else newest.outcome

    def entries(self) -> list[HistoryEntry]:
        """Return all outcomes as history entries, oldest first. Sync: one."""
        return read_all(list(self._all))


def _forget(journal: weakref.ref[Journal], key: int, memory: Memory) -> None:
    """Forget an optimizer that no longer exists."""
    memory.clear()
    alive = journal()
    if alive is not None:
        alive.memories.pop(key, None)
