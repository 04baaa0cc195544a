"""Actions after a step: callbacks and schedules that depend on its outcome, and its undoing."""

from __future__ import annotations

import copy
import itertools
import warnings
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep._common.machine import RandomStates
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import evaluates_first, members, name
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.modules import buffers_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.scale_state import Reason
from halfstep.errors import CallOrderError

Count = Literal["updates", "attempts"]

NUM_UNREAD = 64
"""Maximum number of outcomes that stay on the device unread."""


def step_quietly(scheduler: Any, *args: Any) -> None:
    """Call ``scheduler.step(*args)`` without PyTorch's warning about the order of calls."""
    with warnings.catch_warnings():
        # PyTorch's schedulers count calls of optimizer.step and mistake a skipped first step for a
        # forgotten call.
        for message in ("Detected call of `lr_scheduler", "Seems like `optimizer"):
            warnings.filterwarnings("ignore", message, UserWarning)
        scheduler.step(*args)


@dataclass
class _TakenSteps:
    """The number of steps of an optimizer, and the number of the last taken one that is known."""

    count: int = 0
    _last_taken: int = 0
    _unread: list[tuple[int, Outcome]] = field(default_factory=list)

    def add(self, taken: bool | Outcome) -> None:
        self.count += 1
        if isinstance(taken, Outcome):
            self._unread.append((self.count, taken))
            if len(self._unread) >= NUM_UNREAD:
                self.last_taken()
        elif taken:
            self._last_taken = self.count

    def last_taken(self) -> int:
        """Return the number of the last taken step. Sync: one if it is not known yet."""
        found = (number for number, outcome in reversed(self._unread) if outcome.taken)
        self._last_taken = next(found, self._last_taken)
        self._unread = []
        return self._last_taken


class DueSchedules:
    """The schedules that may advance: not if all steps since their last move were skipped."""

    def __init__(self) -> None:
        self._steps: weakref.WeakKeyDictionary[Any, _TakenSteps] = weakref.WeakKeyDictionary()
        self._moved: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def note(self, optimizer: Any, taken: bool | Outcome) -> None:
        """Record a step; an outcome is read only when a schedule needs it. Sync: none.

        A step of a container counts for all its members.
        """
        for member in members(optimizer):
            self._steps.setdefault(member, _TakenSteps()).add(taken)

    def note_move(self, scheduler: Any) -> None:
        self._moved[scheduler] = self._count(scheduler)

    def try_move(self, scheduler: Any) -> bool:
        """Record that a schedule advances, if it may now; return whether it may.

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


# --- undoing --------------------------------------------------------------------------------------


class Backup:
    """Copies of tensor values and of the contents of dicts. Sync: none."""

    def __init__(
        self, tensors: Iterable[Tensor], dicts: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]
    ) -> None:
        self._values = [
            (tensor, tensor.detach().clone()) for tensor in tensors if _is_writable(tensor)
        ]
        self._dicts = list(dicts)

    @torch.no_grad()
    def restore(self) -> None:
        for held, before in self._dicts:
            held.clear()
            held.update(before)
        for tensor, value in self._values:
            tensor.copy_(value)


def backup_of(optimizer: torch.optim.Optimizer) -> Backup:
    """Return a backup of parameters, state and groups, to be restored once.

    It copies all of them; nothing for an optimizer that evaluates its closure before it changes
    anything.
    """
    if evaluates_first(optimizer):
        return Backup([], [])
    params, each_of = parameters(optimizer), members(optimizer)
    groups = [group for each in each_of for group in each.param_groups]
    states = [getattr(each, "state", None) for each in each_of]
    # A wrapper may have no state, and a container's state may be a view of other states.
    held = [*(state for state in states if isinstance(state, dict)), *groups]
    memo = {id(each): each for each in [*params, *(group["params"] for group in groups)]}
    return Backup(
        params,
        [(each, {key: copy.deepcopy(value, memo) for key, value in each.items()}) for each in held],
    )


def _is_writable(tensor: Tensor) -> bool:
    # An expanded tensor cannot be written to, so it has not changed.
    return tensor.layout is not torch.strided or 0 not in tensor.stride() or tensor.numel() < 2


@keep_out_of_graphs
def attempts(engine: Engine, optimizer: torch.optim.Optimizer, times: int) -> Iterator[int]:
    """Yield the attempts: 0, and more while a smaller scale may help; see ``GradScaler.retry``."""
    modules = engine.names.modules()
    params = [*parameters(optimizer), *(p for module in modules for p in module.parameters())]
    randomness = RandomStates({p.device for p in params})
    # As dicts: a module may replace a buffer by another tensor or None.
    held = [buffers_of(part) for module in modules for part in module.modules()]
    tensors = [buffer for each in held for buffer in each.values() if buffer is not None]
    buffers = Backup(tensors, [(each, dict(each)) for each in held])
    for attempt in itertools.count():
        seen = engine.journal.last(optimizer)
        yield attempt
        outcome = engine.journal.last(optimizer)
        if outcome is None or outcome is seen or not outcome.has_ended:
            raise CallOrderError(
                f"retry({name(optimizer)}): the loop must call scaler.step(optimizer) and "
                "scaler.update() for this optimizer, so that it is known whether the step was taken"
            )
        if attempt == times or outcome.reason not in (Reason.OVERFLOW, Reason.LOSS):
            return
        if outcome.scale_after >= outcome.scale:
            return  # a static or tolerant scale, or the smallest one: it would overflow again
        randomness.restore()
        buffers.restore()
        optimizer.zero_grad()
