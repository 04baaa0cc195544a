"""Optimizers step through the scaler."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer

from halfstep import _torch
from halfstep._common.patches import Patches, watch_steps
from halfstep._run.amp.backward import Backward
from halfstep._run.amp.findings import Findings
from halfstep._run.amp.fresh import Fresh
from halfstep._run.amp.schedules import Schedules
from halfstep._scaler import GradScaler
from halfstep._scaler.closures import Undo, UnusableEvaluationError, split_closure
from halfstep._scaler.gradients import NONE, parameters
from halfstep._scaler.iteration import GradientCheck
from halfstep._scaler.optimizers import handles_scale

Step = Callable[..., Any]


class _Thread(threading.local):
    """Whether the scaler is stepping, and whether it came so far as to call the optimizer."""

    is_stepping = False
    was_called = False


class Steps:
    """Puts itself around ``step`` of every class of optimizers.

    Args:
        scaler: Decides whether a step is taken.
        backward: Knows whether a backward pass is running.
        fresh: Knows what was found in the gradients.
        schedules: Are told of every step.
        findings: Is told what stepped.
    """

    def __init__(
        self,
        scaler: GradScaler,
        backward: Backward,
        fresh: Fresh,
        schedules: Schedules,
        findings: Findings,
    ) -> None:
        self._scaler = scaler
        self._backward = backward
        self._fresh = fresh
        self._schedules = schedules
        self._findings = findings
        self._thread = _Thread()

    def install(self, patches: Patches) -> None:
        """Put ourselves around the steps of the optimizers that there are, and of those to come."""
        watch_steps(patches, self._step, self._fresh.meet)
        patches.wrap(Optimizer, "zero_grad", self._zero_grad)

    def _zero_grad(
        self, original: Callable[..., None], optimizer: Optimizer, *args: Any, **kwargs: Any
    ) -> None:
        original(optimizer, *args, **kwargs)
        if self._findings.is_training:
            self._fresh.forget(optimizer)

    @_torch.keep_out_of_graphs
    def _step(self, original: Step, optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if self._thread.is_stepping:
            self._thread.was_called = True
            return original(optimizer, *args, **kwargs)
        if not self._findings.is_training:
            return original(optimizer, *args, **kwargs)
        closure, rest, others = split_closure(args, kwargs)
        if closure is None:
            return self._take(original, optimizer, args, kwargs)
        if _evaluates_first(optimizer):
            # What it would do, and gradients from before, as in accumulation, are kept.
            with torch.enable_grad():
                loss = closure()
            others = {key: value for key, value in others.items() if key != "closure"}
            self._take(original, optimizer, rest, others)
            return loss
        if self._fresh.has(optimizer):
            return self._take_around(original, closure, optimizer, rest, others)
        return self._take_with(closure, optimizer, rest, others)

    def _take(self, original: Step, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Step unless a gradient is inf or NaN."""
        running = self._backward.running
        if running is not None:  # an optimizer that steps in a hook, while backward runs
            running.unscale_(parameters(optimizer))
        check = self._fresh.take(optimizer)
        if check is None:
            # The script has made the gradients itself, or there are none.
            return original(optimizer, *args, **kwargs)
        self._findings.note_step(optimizer)
        if self._scaler._engine.iteration.step_of(optimizer) is not None:
            self._scaler.update()
        self._add(check, optimizer)
        with self._stepping():
            result = self._scaler.step(optimizer, *args, **kwargs)
            was_called = self._thread.was_called
        check.gradients = NONE  # their memory belongs to the script
        self._finish(optimizer, was_called)
        return result

    def _take_with(self, closure: Step, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        """Step with a closure that may be evaluated many times."""
        self._findings.note_step(optimizer)
        engine = self._scaler._engine
        if engine.iteration.checks:
            self._scaler.update()
        loss = None

        def evaluate() -> Any:
            nonlocal loss
            loss = closure()
            check = self._fresh.take(optimizer)
            if check is not None:
                self._add(check, optimizer)
            return loss

        args, kwargs = _with_closure(evaluate, args, kwargs)
        with self._stepping():
            result = self._scaler.step(optimizer, *args, **kwargs)
        self._finish(optimizer, None)
        # The script may go on with the loss, of a skipped step too.
        return loss if result is None else result

    def _take_around(
        self, original: Step, closure: Step, optimizer: Optimizer, args: Any, kwargs: Any
    ) -> Any:
        """Step with gradients from before and with a closure, as SAM does around another optimizer.

        The scaler would drop the gradients. The other optimizer, if there is one, steps through it.
        """
        self._findings.note_step(optimizer)
        undo = Undo(optimizer)

        def require_finite() -> None:
            check = self._fresh.take(optimizer)
            if check is not None:
                self._add(check, optimizer)
                if any(flag.item() for flag in check.found_inf.values()):
                    raise UnusableEvaluationError

        def evaluate() -> Any:
            loss = closure()
            require_finite()
            return loss

        args, kwargs = _with_closure(evaluate, args, kwargs)
        try:
            require_finite()
            result = original(optimizer, *args, **kwargs)
        except UnusableEvaluationError:
            undo()
            self._scaler.update()
            self._schedules.note(optimizer, False)
            return None
        self._schedules.note(optimizer, True)
        return result

    def _add(self, check: GradientCheck, optimizer: Optimizer) -> None:
        engine = self._scaler._engine
        engine.ranks_of("step", optimizer, list(parameters(optimizer))).agree_on(check)
        engine.iteration.add(check)

    @contextmanager
    def _stepping(self) -> Iterator[None]:
        self._thread.is_stepping, self._thread.was_called = True, False
        try:
            yield
        finally:
            self._thread.is_stepping = False

    def _finish(self, optimizer: Optimizer, was_called: bool | None) -> None:
        """Tell the schedules, and end the iteration if no other optimizer belongs to it."""
        known = None if handles_scale(optimizer) else was_called
        self._schedules.note(optimizer, self._scaler.outcome(optimizer) if known is None else known)
        if self._backward.running is None and not self._fresh.is_waiting():
            self._scaler.update()

    def end(self) -> None:
        """Let the scale move by the last steps."""
        if self._scaler._engine.iteration.checks:
            self._scaler.update()


def _with_closure(closure: Step, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """Put a closure where the script had its own (see :func:`split_closure`)."""
    if "closure" in kwargs:
        return args, kwargs | {"closure": closure}
    return (closure, *args), kwargs


def _evaluates_first(optimizer: Optimizer) -> bool:
    # All of PyTorch's but LBFGS call the closure once, before they do anything else.
    module = type(optimizer).step.__module__
    return module.startswith("torch.optim.") and module != "torch.optim.lbfgs"
