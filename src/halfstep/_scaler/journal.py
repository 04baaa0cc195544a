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


class Memory:
    """What is kept of an optimizer from one iteration to the next.

    Attributes:
        outcome: That of its last step.
        first_norms: The scaled norms of its first steps.
    """

    def __init__(self) -> None:
        self.outcome: Outcome | None = None
        self.first_norms: list[float] = []

    def clear(self) -> None:
        """Let go of its parameters: the optimizer is gone."""
        if self.outcome is not None:
            self.outcome.forget_gradients()
            self.outcome = None


class Journal:
    """Outcomes in the order of the steps. Sync: none, but for :meth:`entries`.

    Attributes:
        open: The outcomes of the iteration that has not ended.
    """

    def __init__(self) -> None:
        self._memories: weakref.WeakKeyDictionary[torch.optim.Optimizer, Memory] = (
            weakref.WeakKeyDictionary()
        )
        self._all: deque[Outcome] = deque(maxlen=HISTORY_LENGTH)
        self.open: list[Outcome] = []

    def memory(self, optimizer: torch.optim.Optimizer) -> Memory:
        """Return what is kept of an optimizer."""
        memory = self._memories.get(optimizer)
        if memory is None:
            memory = self._memories[optimizer] = Memory()
            # Without the journal, which must not live as long as the optimizer.
            weakref.finalize(optimizer, memory.clear).atexit = False
        return memory

    def add(self, memory: Memory, outcome: Outcome) -> None:
        """Add the outcome of a step."""
        if memory.outcome is not None:
            memory.outcome.forget_gradients()
        memory.outcome = outcome
        self._all.append(outcome)
        self.open.append(outcome)

    @property
    def num_optimizers(self) -> int:
        """How many optimizers have stepped and still exist."""
        return len(self._memories)

    def last_outcomes(self) -> list[tuple[torch.optim.Optimizer, Outcome | None]]:
        """Return each optimizer that has stepped with the outcome of its last step."""
        return [(optimizer, memory.outcome) for optimizer, memory in self._memories.items()]

    def newest(self, count: int) -> list[Outcome]:
        """Return the last outcomes, newest last. Sync: none."""
        return list(islice(reversed(self._all), count))[::-1]

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
        memory = self._memories.get(optimizer)
        if memory is not None and memory.outcome is not None:
            return memory.outcome
        for stepped, memory in self._memories.items():
            if stepped.param_groups is optimizer.param_groups and memory.outcome is not None:
                return memory.outcome
        return None

    def entries(self) -> list[HistoryEntry]:
        """Return all outcomes in short, oldest first. Sync: one."""
        return read_all(list(self._all))
