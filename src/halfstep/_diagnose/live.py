"""Live traces: steps traced as they run, because none can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.kernels import observed_by
from halfstep._autocast.modules import replicated
from halfstep._common.force_eager import eager
from halfstep._common.patches import Patches
from halfstep._diagnose import cure_search
from halfstep._diagnose.blame import ELSEWHERE, OUTSIDE, Blame, BlameTracker
from halfstep._diagnose.diagnosis import BadOp, Cure, Diagnosis, Line, Verdict
from halfstep._diagnose.inspect_op import described, name_of_bad, names_in, needs, operand
from halfstep._diagnose.observer import FoundModules, ObserverMode, OpCall
from halfstep._diagnose.replay import watch_backward
from halfstep._diagnose.undo import UndoLog
from halfstep._diagnose.user_code import user_line
from halfstep._pytorch import distributed, modes
from halfstep._scaler.ranks.group import has_ranks

MOST_INSPECTED = 64
"""The most bad ops of a step that are inspected."""
NOTE = "traced live, not replayed: judged by the op alone, and the cure was not tried"


class LiveTrace:
    """Traces the ops of this thread from :meth:`begin` to :meth:`end`.

    Args:
        model: The model, if it is known.

    Attributes:
        came_from_elsewhere: Whether the bad values came from another rank; known after the end.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.came_from_elsewhere = False
        self._tracker = _LiveBlameTracker(None if model is None else replicated(model))
        self._stack, self._patches = ExitStack(), Patches()
        undo = _NoUndoLog()
        self._mode = ObserverMode(FoundModules(model, undo), undo, self._tracker)
        self._undo = undo

    def begin(self) -> bool:
        """Begin, and return whether that was possible: not inside another dispatch mode."""
        if modes.dispatch_modes():
            return False
        with ExitStack() as stack:
            stack.callback(self._patches.undo)
            watch_backward(self._patches, self._tracker, self._undo)
            self._patches.wrap(torch.autograd, "backward", self._backward)
            stack.enter_context(eager(has_global_hooks=True))
            stack.enter_context(observed_by(self._mode.observe))
            stack.enter_context(self._mode.active())
            self._stack = stack.pop_all()
        return True

    def _backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """Show the gradients of FSDP, whose parameters are not the leaves of the graph."""
        original(*args, **kwargs)
        for param in () if self.model is None else self.model.parameters():
            if distributed.is_dtensor(param) and param.grad is not None:
                with modes.unseen_by_modes():
                    self._tracker.see_gradient(param, distributed.local_part(param.grad.detach()))

    def end(self, scale: float | None) -> Diagnosis | None:
        """End the trace and return the diagnosis, None if nothing was bad."""
        if modes.dispatch_modes()[-1:] == [self._mode]:
            self._stack.close()
        blame = self._tracker.root()
        self.came_from_elsewhere = blame is not None and _is_from_elsewhere(blame)
        found = None if blame is None else self._tracker.inspected.get(blame.reader)
        if blame is None or found is None:
            return None
        bad, tensor = found
        ends = ("loss",) if self._tracker.is_loss_bad else ()
        diagnosis = Diagnosis("unknown", bad, tensor, ends, scale, notes=(NOTE,))
        if blame.number == OUTSIDE:
            return replace(diagnosis, verdict="data")
        verdict, cure = _judge_alone(bad, blame, scale, self.model)
        return replace(diagnosis, verdict=verdict, cure=cure)


def _is_from_elsewhere(blame: Blame) -> bool:
    """Return whether another rank has sent the bad values, or no op of this rank made them."""
    if blame.number == ELSEWHERE:
        return True
    return blame.reader == OUTSIDE and has_ranks()


class _NoUndoLog(UndoLog):
    """Undo log that notes nothing, since the training itself runs."""

    def note_write(self, tensor: Tensor) -> None:
        """Do nothing."""

    def note_model(self, model: nn.Module) -> None:
        """Do nothing."""


class _LiveBlameTracker(BlameTracker):
    """Blame tracker that inspects bad ops at once, since they will not run again."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__(_NoUndoLog())
        self.inspected: dict[int, tuple[BadOp, str | None]] = {}
        self._lines: dict[int, tuple[str, Line | None]] = {}
        self._name_of = names_in(model)

    def before(self, call: OpCall) -> None:
        """Note the line of the op, for its backward pass."""
        super().before(call)
        if call.phase != "backward":
            self._lines[call.number] = (call.name, user_line())

    def found(self, call: OpCall, blame: Blame, bad: list[Tensor]) -> None:
        """Inspect an op that is to blame."""
        if len(self.inspected) >= MOST_INSPECTED:
            return
        inputs = tuple(operand(t, self._name_of(t)) for t in call.given if t.is_floating_point())
        output = operand(bad[0], "")
        needed = None if call.written else needs(call)
        found = described(blame, user_line(), inputs, output, needed)
        if call.phase == "backward":
            op, line = self._lines.get(call.place.number, (None, None))
            found = replace(found, forward_op=op, forward_line=line)
        tensor = None if blame.tensor is None else name_of_bad(call, inputs, blame.tensor)
        self.inspected[call.number] = (found, tensor)


def _judge_alone(
    bad: BadOp, blame: Blame, scale: float | None, model: nn.Module | None
) -> tuple[Verdict, Cure | None]:
    """Return the verdict and the cure of an op, from the op alone."""
    if not bad.is_beyond_its_dtype:
        return "maths", cure_search.edit_of(bad)
    assert bad.needs is not None
    assert bad.limit is not None
    if bad.phase == "backward" and scale is not None:
        smaller = cure_search.power_below(scale * bad.limit / bad.needs / 2)
        if smaller >= cure_search.SMALLEST_SCALE:
            return "scale", replace(cure_search.of_scale(smaller), is_finite=None)
    return "range", cure_search.narrowest_rule(blame, model)
