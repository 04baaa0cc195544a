"""Steps with a closure: scale, backward, unscale and check inside every evaluation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from halfstep._scaler.after_step import snapshot_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.gradients import NONE, parameters
from halfstep._scaler.iteration import GradientCheck, Iteration, Stage, Step
from halfstep._scaler.optimizers import handles_scale, name
from halfstep._scaler.step import (
    gather,
    measure_and_limit,
    multiply_,
    read_skip,
    refuse_half,
    remember,
    require_not_stepped,
    unscale_,
)
from halfstep.errors import CallOrderError

Closure = Callable[[], Any]


class UnusableEvaluationError(Exception):
    """Raised inside ``optimizer.step`` to leave it when the gradients of a closure are unusable."""


def split_closure(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Closure | None, tuple[Any, ...], dict[str, Any]]:
    """Separate the closure from the other arguments of ``optimizer.step``.

    A closure passed by name also stays in ``kwargs``; otherwise it is the first argument, as in
    every PyTorch optimizer. accelerate passes None there, which is no closure.
    """
    if callable(kwargs.get("closure")):
        return kwargs["closure"], args, kwargs
    if args and callable(args[0]):
        return args[0], args[1:], kwargs
    return None, args, kwargs


def step_with_closure(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    closure: Closure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_norm: float | None,
) -> Any:
    """Call ``optimizer.step`` with a closure that yields unscaled, finite gradients.

    Every evaluation starts without gradients. An evaluation with non-finite gradients ends the step
    and returns None; the parameters and the state of the optimizer are restored. They are also
    restored if the closure raises. Sync: one for each evaluation.
    """
    earlier = engine.iteration.step_of(optimizer)
    if earlier is not None:
        require_not_stepped(earlier)
    is_unscaled = earlier is not None and earlier.stage is not Stage.SCALED
    if is_unscaled or id(optimizer) in engine.iteration.blocks:
        raise CallOrderError(
            f"step({name(optimizer)}, closure): {Stage.UNSCALED.value} since the last update(), "
            "and the closure makes new ones. Call unscale_(), clip_grad_norm_() or accumulate() "
            "in the closure, or step() without a closure"
        )
    evaluations = _Evaluations(engine, optimizer, closure, max_norm)
    before = snapshot_of(optimizer)
    result = None
    try:
        drop_gradients(optimizer)
        if "closure" in kwargs:
            result = optimizer.step(*args, **kwargs | {"closure": evaluations})
        else:
            result = optimizer.step(evaluations, *args, **kwargs)
        if evaluations.last is None:
            raise CallOrderError(
                f"step({name(optimizer)}, closure): the optimizer did not call the closure. Call "
                "step() without one"
            )
    except UnusableEvaluationError:
        before.restore()
    except BaseException:
        before.restore()
        raise
    evaluations.finish()
    return result


class _Evaluations:
    """The callable that replaces the user's closure.

    Each evaluation is an iteration of its own, and is merged into the surrounding iteration after
    the step. So a step that raises leaves no trace, and every evaluation may unscale the gradients.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        closure: Closure,
        max_norm: float | None,
    ) -> None:
        self.last: Step | None = None  # with the gradients of the last evaluation
        self._iteration = Iteration()
        self._earlier: list[GradientCheck] = []
        self._engine = engine
        self._optimizer = optimizer
        self._closure = closure
        self._max_norm = max_norm

    def __call__(self) -> Any:
        is_first = self.last is None
        self._forget_last_gradients()
        around = self._engine.iteration
        self._iteration = self._engine.iteration = Iteration()
        try:
            loss = self._backward()
            self._unscale(is_first)
        finally:
            self._engine.iteration = around
            self._iteration.end()
        return loss

    def finish(self) -> None:
        """Record the step, and the closure's losses and checks, in the surrounding iteration."""
        assert self.last is not None
        iteration = self._engine.iteration
        # The scale of the closure's losses also applies to other optimizers that use its last
        # gradients.
        iteration.count_losses_of(self._iteration)
        for check in [*self._earlier, *self._iteration.checks]:
            iteration.add(check)
        is_fused = handles_scale(self._optimizer)
        memory = self._engine.journal.memory(self._optimizer)
        remember(self._engine, self._optimizer, self.last, memory, is_fused=is_fused)

    def _forget_last_gradients(self) -> None:
        """Drop the gradients before the next evaluation; keep the checks for the scale."""
        checks = self._iteration.checks
        if self.last is not None and self.last.own_check is not None:
            checks.append(self.last.own_check)
        self._earlier += [replace(check, gradients=NONE) for check in checks]
        self.last = None
        drop_gradients(self._optimizer)

    @torch.enable_grad()
    def _backward(self) -> Any:
        loss = self._closure()
        earlier = self._iteration.step_of(self._optimizer)
        has_stepped = earlier is not None and earlier.stage is Stage.STEPPED
        if self._engine.iteration is not self._iteration or has_stepped:
            raise CallOrderError(
                f"step({name(self._optimizer)}, closure): the closure called step() or update(). "
                "Call update() once, after the step"
            )
        if not self._iteration.losses:
            self._require_no_gradients()
            if not isinstance(loss, Tensor):
                raise TypeError(
                    f"step({name(self._optimizer)}, closure): the closure returned "
                    f"{type(loss).__name__} and scaled no loss. Return the loss, or call "
                    "scaler.scale(loss).backward() in the closure"
                )
            self._engine.scale(loss, None).backward()
        return loss.detach() if isinstance(loss, Tensor) else loss

    def _require_no_gradients(self) -> None:
        if any(param.grad is not None for param in parameters(self._optimizer)):
            raise CallOrderError(
                f"step({name(self._optimizer)}, closure): the closure called backward() on a "
                "loss that was not scaled. Call scaler.scale(loss).backward() in it, or only "
                "return the loss and leave backward() to step()"
            )

    def _unscale(self, is_first: bool) -> None:
        engine, optimizer = self._engine, self._optimizer
        step = gather(engine, "step", optimizer, self._iteration.step_of(optimizer))
        refuse_half(engine, step)
        # The norm limit is based on whole steps: inside a step, a line search may go far away.
        norm_limit = engine.norm_limits.of(optimizer) if is_first else None
        if self._max_norm is None and norm_limit is None:
            unscale_(step)
        else:
            measure_and_limit(step, self._max_norm, norm_limit)
        step.decide()
        self.last = step
        if read_skip(step):
            raise UnusableEvaluationError
        multiply_(step)


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set all gradients of an optimizer to None."""
    for param in parameters(optimizer):
        param.grad = None
