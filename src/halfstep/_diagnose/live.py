"""Tracing steps as they run, where none can be replayed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from halfstep._autocast.kernels import observed_by
from halfstep._autocast.module_names import replicated
from halfstep._common.force_eager import eager
from halfstep._common.patches import Patches
from halfstep._diagnose import across_ranks, curing
from halfstep._diagnose.blame import ELSEWHERE, OUTSIDE, Blame, Blames
from halfstep._diagnose.diagnosis import BadOp, Cure, Diagnosis, Line, Verdict
from halfstep._diagnose.lines import user_line
from halfstep._diagnose.looking import described, name_of_bad, names_in, needs, operand
from halfstep._diagnose.replay import watch_backward
from halfstep._diagnose.undo import Undo
from halfstep._diagnose.watcher import FoundModules, OpCall, Watcher
from halfstep._pytorch import distributed, modes
from halfstep._scaler.ranks.group import has_ranks

MOST_LOOKS = 64
"""So many bad ops of a step are looked at closely."""
NOTE = "traced live, not replayed: judged by the op alone, and the cure was not tried"


class Live:
    """Traces what runs in this thread from :meth:`begin` to :meth:`end`.

    Args:
        model: The model, if it is known.

    Attributes:
        came_from_elsewhere: Whether what went bad came from another rank, when it has ended.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model = model
        self.came_from_elsewhere = False
        self._blames = _LiveBlames(None if model is None else replicated(model))
        self._stack, self._patches = ExitStack(), Patches()
        undo = _NoUndo()
        self._watcher = Watcher(FoundModules(model, undo), undo, self._blames)
        self._undo = undo

    def begin(self) -> bool:
        """Begin, and say whether that could be: not inside of somebody else's dispatch mode."""
        if modes.dispatch_modes():
            return False
        with ExitStack() as stack:
            stack.callback(self._patches.undo)
            watch_backward(self._patches, self._blames, self._undo)
            self._patches.wrap(torch.autograd, "backward", self._backward)
            stack.enter_context(eager(has_global_hooks=True))
            stack.enter_context(observed_by(self._watcher.observe))
            stack.enter_context(self._watcher.watching())
            self._stack = stack.pop_all()
        return True

    def _backward(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """See the gradients of FSDP, which come to other tensors than the leaves of the graph."""
        original(*args, **kwargs)
        for param in () if self.model is None else self.model.parameters():
            if distributed.is_dtensor(param) and param.grad is not None:
                with modes.unseen_by_modes():
                    self._blames.see_gradient(param, across_ranks.local_part(param.grad))

    def end(self, scale: float | None) -> Diagnosis | None:
        """Say what was found, None for nothing; and trace no longer."""
        if modes.dispatch_modes()[-1:] == [self._watcher]:
            self._stack.close()
        blame = self._blames.root()
        self.came_from_elsewhere = blame is not None and _is_from_elsewhere(blame)
        found = None if blame is None else self._blames.looked.get(blame.reader)
        if blame is None or found is None:
            return None
        bad, tensor = found
        ends = ("loss",) if self._blames.is_loss_bad else ()
        diagnosis = Diagnosis("unknown", bad, tensor, ends, scale, notes=(NOTE,))
        if blame.number == OUTSIDE:
            return replace(diagnosis, verdict="data")
        verdict, cure = _alone(bad, blame, scale, self.model)
        return replace(diagnosis, verdict=verdict, cure=cure)


def _is_from_elsewhere(blame: Blame) -> bool:
    """Say whether another rank has sent what is bad: it did, or no op of this one has made it."""
    if blame.number == ELSEWHERE:
        return True
    return blame.reader == OUTSIDE and has_ranks()


class _NoUndo(Undo):
    """Keeps nothing: what runs is the training itself."""

    def note_write(self, tensor: Tensor) -> None:
        """Do nothing."""

    def note_model(self, model: nn.Module) -> None:
        """Do nothing."""


class _LiveBlames(Blames):
    """Looks closely at what goes bad when it does, since it will not run again."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__(_NoUndo())
        self.looked: dict[int, tuple[BadOp, str | None]] = {}
        self._lines: dict[int, tuple[str, Line | None]] = {}
        self._name_of = names_in(model)

    def before(self, call: OpCall) -> None:
        """Take note of the line, for the backward pass."""
        super().before(call)
        if call.phase != "backward":
            self._lines[call.number] = (call.name, user_line())

    def found(self, call: OpCall, blame: Blame, bad: list[Tensor]) -> None:
        """Look at an op that is to blame."""
        if len(self.looked) >= MOST_LOOKS:
            return
        inputs = tuple(operand(t, self._name_of(t)) for t in call.given if t.is_floating_point())
        output = operand(bad[0], "")
        needed = None if call.written else needs(call)
        found = described(blame, user_line(), inputs, output, needed)
        if call.phase == "backward":
            op, line = self._lines.get(call.place.number, (None, None))
            found = replace(found, forward_op=op, forward_line=line)
        tensor = None if blame.tensor is None else name_of_bad(call, inputs, blame.tensor)
        self.looked[call.number] = (found, tensor)


def _alone(
    bad: BadOp, blame: Blame, scale: float | None, model: nn.Module | None
) -> tuple[Verdict, Cure | None]:
    """Judge an op by itself."""
    if not bad.is_beyond_its_dtype:
        return "maths", curing.edit_of(bad)
    assert bad.needs is not None
    assert bad.limit is not None
    if bad.phase == "backward" and scale is not None:
        smaller = curing.power_below(scale * bad.limit / bad.needs / 2)
        if smaller >= curing.SMALLEST_SCALE:
            return "scale", replace(curing.of_scale(smaller), is_finite=None)
    return "range", curing.narrowest_rule(blame, model)
