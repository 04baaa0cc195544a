"""Live traces of steps as they run, for steps that cannot be replayed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._common.module_names import replicated
from halfstep._common.numbers import things
from halfstep._pytorch import distributed, modes
from halfstep._tools.diagnose.diagnose import INNOCENT, judge_alone
from halfstep._tools.diagnose.diagnosis import Diagnosis, source_of
from halfstep._tools.diagnose.inspect_op import InspectingTracker
from halfstep._tools.patches import Patches
from halfstep._tools.replay.blame import ELSEWHERE, OUTSIDE
from halfstep._tools.replay.observer import FoundModules, ObserverMode, is_compiled_together
from halfstep._tools.replay.replay import watch_backward
from halfstep._tools.replay.undo import UndoLog
from halfstep.events import observe_ops

NOTE = "traced live, not replayed: judged by the op alone, and the cure was not tried"
MOST_LIVE = 5  # the largest number of steps that are traced live after one that cannot be replayed
SEE_MORE = (
    "to see more, put the step into a function and call halfstep.diagnose(step): it is then run "
    "as it is"
)


class LiveSearch:
    """Live traces of the steps after one that could not be replayed, until one is bad."""

    def __init__(self, notes: list[str]) -> None:
        self._notes = notes  # for the next diagnosis
        self._trace: LiveTrace | None = None
        self._waiting: list[nn.Module | None] = []  # the model to trace in the next step, if any
        self._num_left = self._bad_step = 0
        self._is_sure = False  # whether no replay of the bad step was finite

    @property
    def is_on(self) -> bool:
        """Whether the running step is traced."""
        return self._trace is not None

    def ask(self, model: nn.Module | None, bad_step: int, *, is_sure: bool) -> None:
        self._waiting, self._num_left, self._bad_step = [model], MOST_LIVE, bad_step
        self._is_sure = is_sure

    def begin(self) -> None:
        while self._waiting:
            trace = LiveTrace(self._waiting.pop())
            why_not = trace.begin()
            if why_not is None:
                self._trace = trace
            else:
                self._notes.append(f"steps were not traced live, since {why_not}")

    def pause(self, *, is_paused: bool) -> None:
        """Pause the trace, as during the step of an optimizer, or resume it."""
        if self._trace is not None:
            self._trace.mode.is_paused = is_paused

    def end(
        self, scale: float | None, step: int, *, is_last: bool
    ) -> Iterator[tuple[Diagnosis, int]]:
        """End the trace of a step; yield a diagnosis with the number of the step it is about."""
        trace, self._trace = self._trace, None
        if trace is None:
            return
        self._num_left = 0 if is_last else self._num_left - 1
        found = trace.end(scale)
        if found is not None:
            is_first = self._is_sure and step == self._bad_step + 1
            self._notes += [f"the op and the numbers are those of step {step}"] * is_first
            yield found, self._bad_step if is_first else step
        elif trace.came_from_elsewhere:
            yield Diagnosis("none", happened=INNOCENT), step
        elif self._num_left:
            self._waiting = [trace.model]
        else:
            note = f"traced {things(step - self._bad_step, 'step')} after it: none went bad"
            yield Diagnosis("unknown", notes=(note, SEE_MORE)), self._bad_step


class LiveTrace:
    """Trace of the ops of this thread from :meth:`begin` to :meth:`end`."""

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.came_from_elsewhere = False  # from another rank; set by end()
        self._tracker = InspectingTracker(
            None if model is None else replicated(model), is_replay=False
        )
        self._stack, self._patches = ExitStack(), Patches()
        undo = _NoUndoLog()
        self.mode = ObserverMode(FoundModules(model, undo), undo, self._tracker)

    def begin(self) -> str | None:
        """Begin the trace, or return why that is impossible."""
        if self.model is not None and is_compiled_together(self.model):
            return "compiled code communicates with other ranks"
        if modes.dispatch_modes():
            return "another dispatch mode is active"
        with ExitStack() as stack:
            stack.callback(self._patches.close)
            watch_backward(self._patches, self._tracker)
            self._patches.wrap(torch.autograd, "backward", self._backward)
            stack.enter_context(observe_ops(self.mode.places.under))
            stack.enter_context(self.mode.active())
            self._stack = stack.pop_all()
        return None

    def _backward(self, original: Callable[..., None], /, *args: Any, **kwargs: Any) -> None:
        """Show the gradients of FSDP parameters, which are not leaves of the graph."""
        original(*args, **kwargs)
        for param in () if self.model is None else self.model.parameters():
            if distributed.is_dtensor(param) and param.grad is not None:
                with modes.unseen_by_modes():
                    self._tracker.see_gradient(param, distributed.local_part(param.grad.detach()))

    def end(self, scale: float | None) -> Diagnosis | None:
        """End the trace and return the diagnosis; None if nothing was bad or no op is to blame."""
        if modes.dispatch_modes()[-1:] == [self.mode]:
            self._stack.close()
        if (blame := self._tracker.root()) is None:
            return None
        # Either another rank sent the inf or NaN, or no op of this rank made them.
        self.came_from_elsewhere = blame.number == ELSEWHERE or (
            blame.reader == OUTSIDE and distributed.has_ranks()
        )
        if (inspection := self._tracker.inspected.get(blame.reader)) is None:
            return None
        bad, tensor = inspection.bad, inspection.tensor
        verdict, cure = judge_alone(bad, blame, scale, self.model)
        ends = ("loss",) if self._tracker.is_loss_bad else ()
        source = source_of(bad)
        return Diagnosis(verdict, bad, tensor, ends, scale, cure, notes=(NOTE,), source=source)


class _NoUndoLog(UndoLog):
    """Undo log that saves no tensors or modules, since the training itself runs."""

    def note_write(self, tensor: Tensor) -> None:
        """Do nothing."""

    def note_model(self, model: nn.Module) -> None:
        """Do nothing."""
