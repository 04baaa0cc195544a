"""Watch on a training loop: diagnoses the steps that go bad."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from halfstep._autocast.modules import replicated
from halfstep._common.nested import tensors_in
from halfstep._common.patches import Patches
from halfstep._diagnose import across_ranks
from halfstep._diagnose.capture import Capture
from halfstep._diagnose.diagnose import diagnosis_of
from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._diagnose.live import LiveTrace
from halfstep._diagnose.replay import replaying
from halfstep._numerics.measure import is_finite
from halfstep._pytorch import autograd, modes, optim
from halfstep._pytorch.listeners import listening_to_backward
from halfstep._scaler.access import OBSERVERS, is_in_step, observing
from halfstep._scaler.closures import split_closure
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.scale_state import Reason
from halfstep._scaler.scaler import GradScaler
from halfstep.errors import CallOrderError, DiagnosisWarning, RanksError

START_STEPS = 50
"""The number of steps that count as the start of a run."""
START_SKIPS = 16
"""The most skips at the start that count as the search for a usable scale."""
MOST_DIAGNOSES = 5
"""The most places that are diagnosed in a run."""
MOST_TRIED = 10
"""The most steps that are diagnosed, including those that go bad at a known place."""
MOST_LOSSES = 256
"""The most losses of a step that are checked, the last ones."""
MOST_LIVE = 5
"""The most steps that are traced live after one that cannot be replayed."""


class Watch:
    """Diagnoses the steps of the training loop in a block that go bad.

    A step is bad if its loss is not finite, or if it is skipped for an overflow that is not part of
    dynamic scaling. Overflows at the start of a run, and right after the scale has grown, are part
    of it. A bad step is replayed at once, before its state changes, from the calls of models and
    loss functions that the loop made. If it cannot be replayed, the steps that follow are traced
    live.

    Args:
        scaler: The scaler whose iterations count; None for those of all scalers, and for steps of
            optimizers without a scaler.
        model: The model. If left out, the first module with parameters that is called.
        tell: Called with each new diagnosis and the number of the step, counted from 1. If left
            out, a :class:`halfstep.errors.DiagnosisWarning` is issued.

    Raises:
        TypeError: ``model`` is not a module, or ``tell`` cannot be called.

    Attributes:
        found: The diagnoses, one for each place.
        notes: Remarks for the next diagnosis.

    Sync: one a step.
    """

    def __init__(
        self,
        scaler: GradScaler | None = None,
        model: nn.Module | None = None,
        tell: Callable[[Diagnosis, int], object] | None = None,
    ) -> None:
        if not (model is None or isinstance(model, nn.Module)):
            raise TypeError(f"diagnose(model={type(model).__name__}): pass a torch.nn.Module")
        if not (tell is None or callable(tell)):
            raise TypeError(
                f"diagnose(tell={type(tell).__name__}): pass a function of a diagnosis and a number"
            )
        self.found: list[Diagnosis] = []
        self.notes: list[str] = []
        self._scaler, self._model, self._tell = scaler, model, tell or warn
        self._capture, self._start = Capture(self._is_here), _ExpectedSkips()
        self._live: LiveTrace | None = None
        self._num_live = self._num_steps = self._num_tried = self._bad_step = 0
        self._is_scaled = self._was_finite = self._came_from_elsewhere = False
        self._losses: list[Tensor] = []
        self._stack = ExitStack()
        self._pid, self._thread = os.getpid(), threading.get_ident()

    def __enter__(self) -> Self:
        if self in OBSERVERS:
            raise CallOrderError("this watch is already on; make another one")
        patches = Patches()
        with ExitStack() as stack:
            stack.callback(patches.undo)
            self._capture.install(patches)
            stack.enter_context(listening_to_backward(self._on_backward))
            stack.enter_context(observing(self))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop watching."""
        live, self._live, self._num_live = self._live, None, 1
        try:
            if live is not None:
                self._go_on(live, live.end(None))
        finally:
            self._stack.close()

    # --- events -----------------------------------------------------------------------------------

    def on_loss(self, scaler: GradScaler, outputs: Any) -> None:
        """Note a loss before it is scaled."""
        if self._is_watching(scaler):
            self._is_scaled = True
            self._note_losses(outputs)

    def on_iteration(self, scaler: GradScaler, outcomes: Sequence[Outcome]) -> None:
        """Check the outcomes of an iteration, and diagnose it if it went bad."""
        if not outcomes or not self._is_watching(scaler):
            return
        losses, self._losses = self._losses, []
        bad = [outcome for outcome in outcomes if self._start.is_bad(outcome)]
        skipped = [outcome for outcome in outcomes if not outcome.taken]
        if not bad and skipped and not _are_finite(losses):
            bad = skipped
        if bad and any(outcome.taken for outcome in outcomes):
            self.notes.append("another optimizer has stepped before the replay")
        self._end_step(bad[0].scale if bad else None, is_bad=bool(bad))

    def _on_backward(self, roots: Any) -> None:
        """Note the losses of a step without a scaler."""
        if self._counts_plain_steps() and autograd.backward_number() < 0:
            self._note_losses(roots)

    def _note_losses(self, losses: Any) -> None:
        for loss in tensors_in([losses]):
            self._losses.append(loss.detach())
            self._capture.note_root(loss)
        del self._losses[:-MOST_LOSSES]

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Diagnose a step without a scaler, before it is taken or once its closure has run."""
        if torch.compiler.is_compiling() or not self._counts_plain_steps():
            return None
        if optim.optimizer_step_depth() > 1 or is_in_step():
            return None
        closure, others, kwargs = split_closure(args[1:], kwargs)
        # An optimizer that finds gradients may never evaluate the closure it is given.
        if closure is None or not _are_finite(self._losses):
            self._end_plain_step()
            return None
        if "closure" in kwargs:
            return args, kwargs | {"closure": self._watched(closure)}
        return (args[0], self._watched(closure), *others), kwargs

    def _watched(self, closure: Callable[[], Any]) -> Callable[[], Any]:
        """Return a closure whose first evaluation in a step ends the step for the watch."""
        is_first = True

        def watched() -> Any:
            nonlocal is_first
            result = closure()
            if is_first:  # later ones are trials of a line search
                is_first = False
                self._end_plain_step()
            return result

        return watched

    def _end_plain_step(self) -> None:
        losses, self._losses = self._losses, []
        if losses:
            self._end_step(None, is_bad=not _are_finite(losses))

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._counts_plain_steps():
            return
        if self._losses and not is_in_step():
            self._capture.begin()  # trials of a line search, or a closure that is not known
        self._losses.clear()

    def _is_watching(self, scaler: GradScaler) -> bool:
        return (self._scaler is None or self._scaler is scaler) and self._is_here()

    def _counts_plain_steps(self) -> bool:
        return self._scaler is None and not self._is_scaled and self._is_here()

    def _is_here(self) -> bool:
        """Return whether this is the watched process and thread, and not a replay."""
        is_mine = os.getpid() == self._pid and threading.get_ident() == self._thread
        return is_mine and self in OBSERVERS

    # --- the step ---------------------------------------------------------------------------------

    def _end_step(self, scale: float | None, *, is_bad: bool) -> None:
        self._num_steps += 1
        live, self._live = self._live, None
        try:
            if live is not None:
                self._go_on(live, live.end(scale))
            elif is_bad and len(self.found) < MOST_DIAGNOSES and self._num_tried < MOST_TRIED:
                self._num_tried += 1
                self._diagnose(scale)
            self._was_finite = not is_bad
        finally:
            self._capture.begin()

    def _diagnose(self, scale: float | None) -> None:
        capture = self._capture
        model = capture.model if self._model is None else self._model
        why_not: str | None = "no model was called in it"
        if model is not None:
            why_not = across_ranks.why_together(model) or capture.why_not()
        if model is not None and why_not is None:
            with replaying():  # hides its own scaler too
                found = self._replayed(model, scale)
            if found is not None:
                self._report(found)
                return
            why_not = capture.gap or "its replay was finite"
        self._bad_step = self._num_steps
        self.notes.append(f"step {self._num_steps} was not replayed: {why_not}")
        self._num_live = MOST_LIVE
        self._trace(model)

    def _go_on(self, live: LiveTrace, found: Diagnosis | None) -> None:
        """Report the diagnosis of a traced step, or trace the next step too."""
        self._num_live -= 1
        if found is not None:
            self._report(found)
        elif live.came_from_elsewhere:
            self.notes.append(f"the bad values in step {self._num_steps} came from another rank")
            self._came_from_elsewhere = True
        elif self._num_live:
            self._trace(live.model)
        elif not (self.found or self._came_from_elsewhere):
            note = f"steps {self._bad_step + 1} to {self._num_steps} were traced, and none went bad"
            self._report(Diagnosis("unknown", notes=(note,)), self._bad_step)

    def _trace(self, model: nn.Module | None) -> None:
        if model is not None and across_ranks.is_compiled_together(model):
            self.notes.append(
                "steps were not traced live, since compiled code communicates with other ranks"
            )
            return
        live = LiveTrace(model)
        if live.begin():
            self._live = live
        else:
            self.notes.append("steps were not traced live, since another dispatch mode is active")

    def _replayed(self, model: nn.Module, scale: float | None) -> Diagnosis | None:
        """Return the diagnosis of a replay, None if it was finite or failed."""
        try:
            found = diagnosis_of(self._capture.step(scale), model, with_underflow=False)
        except RanksError:
            self._capture.gap = "the model or the loss waits for other ranks"
            return None
        except Exception as error:  # raised by the user's code
            self.notes.append(f"a replay raised {type(error).__name__}: {error}")
            return None
        if self._capture.gap is not None and found.verdict == "data":
            named = replicated(model)
            # Values computed in the gap are not computed again, and look like data.
            known = {name for name, _ in (*named.named_parameters(), *named.named_buffers())}
            return found if found.tensor in known else None
        return None if found.verdict == "none" else found

    def _report(self, found: Diagnosis, step: int | None = None) -> None:
        notes = tuple(self.notes)
        if found.verdict == "data" and self._was_finite:
            notes = (*notes, f"the loss of step {self._num_steps - 1} was finite")
        found = replace(found, notes=(*found.notes, *notes))
        self.notes.clear()
        if all(_place(found) != _place(known) for known in self.found):
            self.found.append(found)
            self._tell(found, self._num_steps if step is None else step)


class _ExpectedSkips:
    """Distinguishes skips that are part of dynamic scaling from others."""

    def __init__(self) -> None:
        self._num_steps = self._num_skips = 0
        self._last_taken: Outcome | None = None

    def is_bad(self, outcome: Outcome) -> bool:
        """Return whether a finished step went bad. Sync: one for a fused optimizer."""
        self._num_steps += 1
        if outcome.taken:
            self._last_taken = outcome  # its scale is read only if a skip follows
            return False
        if outcome.reason is not Reason.OVERFLOW:
            return outcome.reason is not Reason.NORM
        self._num_skips += 1
        is_start = self._num_steps <= START_STEPS and self._num_skips <= START_SKIPS
        taken = self._last_taken
        has_just_grown = taken is not None and outcome.scale > taken.scale
        return not (is_start or has_just_grown)


def _are_finite(losses: Sequence[Tensor]) -> bool:
    with modes.unseen_by_modes():
        return all(map(is_finite, losses))


def _place(found: Diagnosis) -> tuple[object, ...]:
    bad = found.bad
    return (found.verdict, found.tensor, bad and (bad.op, bad.module, bad.phase))


def warn(found: Diagnosis, step: int) -> None:
    """Issue a :class:`halfstep.errors.DiagnosisWarning`."""
    warnings.warn(f"step {step} went bad\n{found}", DiagnosisWarning, stacklevel=2)
