"""Steps with a closure: scale, backward, unscale and check inside every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep._scaler.after_step import snapshot_of
from halfstep._scaler.earlier_norms import NormLimit
from halfstep._scaler.engine import Engine
from halfstep._scaler.gradients import NONE, parameters
from halfstep._scaler.iteration import GradientCheck, Iteration, Stage, Step
from halfstep._scaler.optimizers import handles_scale, is_pytorchs, name
from halfstep._scaler.overrides import is_ready
from halfstep._scaler.step import (
    gather,
    measure_and_limit,
    multiply_,
    read_skip,
    refuse_half,
    remember,
    remember_failure,
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

    Gradients of a loss that was scaled before the call are unscaled, checked and clipped too: SAM
    uses them before it evaluates the closure. Older ones are dropped, and every evaluation starts
    without gradients. Non-finite gradients end the step, which returns None; the parameters and the
    state of the optimizer are restored. They are also restored if the closure raises. Sync: one for
    each evaluation, and one for gradients from before.
    """
    earlier = engine.iteration.step_of(optimizer)
    if earlier is not None:
        require_not_stepped(earlier)
    evaluations = _Evaluations(engine, optimizer, closure, max_norm)
    before = snapshot_of(optimizer)
    result = None
    try:
        evaluations.begin(earlier)
        step, scaler = optimizer.step, engine.owner()
        if "_maybe_opt_step" in scaler._overridden():
            state = scaler._per_optimizer_states[id(optimizer)]
            step = partial(scaler._maybe_opt_step, optimizer, state)
        if "closure" in kwargs:
            result = step(*args, **kwargs | {"closure": evaluations})
        else:
            result = step(evaluations, *args, **kwargs)
        if evaluations.last is None:
            raise CallOrderError(
                f"step({name(optimizer)}, closure): the optimizer did not call the closure, and "
                "there are no gradients of a scaled loss. Call scaler.scale(loss).backward() "
                "before step(), without a closure"
            )
    except UnusableEvaluationError:
        before.restore()
    except BaseException:
        before.restore()
        engine.buffers.restore(1.0)
        evaluations.give_up()
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
        self.last: Step | None = None  # with the gradients that the optimizer uses
        self._iteration = Iteration()  # of the last evaluation
        self._earlier: list[GradientCheck] = []
        # Gradients from before the step, until an evaluation makes others.
        self._held: list[tuple[Tensor, Tensor]] = []
        self._were_unscaled = False
        self._engine = engine
        self._optimizer = optimizer
        self._closure = closure
        self._max_norm = max_norm

    def begin(self, earlier: Step | None) -> None:
        """Prepare the gradients of this iteration's losses for the optimizer; drop older ones."""
        engine, optimizer = self._engine, self._optimizer
        held = [(param, param.grad) for param in parameters(optimizer) if param.grad is not None]
        self._were_unscaled = id(optimizer) in engine.iteration.blocks or (
            earlier is not None and earlier.stage is Stage.UNSCALED
        )
        is_waiting = any(id(param) in engine.unused.waiting for param, _ in held)
        if not (held and (self._were_unscaled or is_waiting or engine.iteration.losses)):
            drop_gradients(optimizer)
            return
        self._unscale_with_overrides()
        step = gather(engine, "step", optimizer, engine.iteration.step_of(optimizer))
        self._use(step, engine.norm_limits.of(optimizer), always_measures=True)
        self._held = list(zip(step.gradients.params, step.gradients.grads, strict=True))

    def __call__(self) -> Any:
        if not self._held:
            self._forget_last_gradients()
        drop_gradients(self._optimizer)
        around = self._engine.iteration
        inner = self._engine.iteration = Iteration()
        try:
            loss = self._backward(inner, around)
            if inner.losses:
                self._use_new_gradients(inner)
            else:
                put_back(self._held)
        finally:
            self._engine.iteration = around
            inner.end()
        return loss.detach() if isinstance(loss, Tensor) else loss

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

    def give_up(self) -> None:
        """Restore the gradients from before a step that raised; drop those of an evaluation."""
        if self._held:
            assert self.last is not None
            put_back(self._held)
            remember_failure(self._engine.iteration, self.last)
        elif self._earlier:
            drop_gradients(self._optimizer)

    def _forget_last_gradients(self) -> None:
        """Forget the gradients in favor of new ones; keep the checks for the scale."""
        checks = self._iteration.checks
        if self.last is not None and self.last.own_check is not None:
            checks.append(self.last.own_check)
        self._earlier += [replace(check, gradients=NONE) for check in checks]
        self.last, self._iteration, self._held = None, Iteration(), []

    @torch.enable_grad()
    def _backward(self, inner: Iteration, around: Iteration) -> Any:
        """Call the closure; unless it has made gradients, or needs none, make them."""
        call = f"step({name(self._optimizer)}, closure)"
        loss = self._closure()
        earlier = inner.step_of(self._optimizer)
        has_stepped = earlier is not None and earlier.stage is Stage.STEPPED
        if self._engine.iteration is not inner or has_stepped:
            raise CallOrderError(
                f"{call}: the closure called step() or update(). Call update() once, after the step"
            )
        if inner.losses:
            return loss
        if any(param.grad is not None for param in parameters(self._optimizer)):
            raise CallOrderError(
                f"{call}: the closure called backward() on a loss that was not scaled. Call "
                "scaler.scale(loss).backward() in it, or only return the loss and leave backward() "
                "to step()"
            )
        if self._held and is_value(loss, around):
            self._require_finite(loss)
        elif isinstance(loss, Tensor):
            self._engine.scale(loss, None).backward()
        else:
            raise TypeError(
                f"{call}: the closure returned {type(loss).__name__} and scaled no loss. Return "
                "the loss, or call scaler.scale(loss).backward() in the closure"
            )
        return loss

    def _require_finite(self, loss: Tensor | float) -> None:
        """Leave the step if a loss by which the optimizer decides is inf or NaN."""
        if not torch.as_tensor(loss).isfinite().all():
            assert self.last is not None
            put_back(self._held)
            scale = self.last.loss_scale
            scale.mark_loss_bad()
            found_inf = {scale.device: torch.ones((), device=scale.device)}
            self.last.own_check = GradientCheck(scale, self.last.gradients, found_inf)
            self.last.decide()
            raise UnusableEvaluationError

    def _use_new_gradients(self, inner: Iteration) -> None:
        engine, optimizer = self._engine, self._optimizer
        if self._were_unscaled and self._held and is_pytorchs(optimizer):
            raise CallOrderError(
                f"step({name(optimizer)}, closure): {Stage.UNSCALED.value} since the last "
                "update(), and the closure makes new ones. Call unscale_(), clip_grad_norm_() or "
                "accumulate() in the closure, or step() without a closure"
            )
        # The norm limit is based on whole steps: inside a step, a line search may go far away.
        is_first = self.last is None and not self._earlier
        if self._held:
            self._forget_last_gradients()
        self._iteration = inner
        self._unscale_with_overrides()
        step = gather(engine, "step", optimizer, inner.step_of(optimizer))
        self._use(step, engine.norm_limits.of(optimizer) if is_first else None)

    def _unscale_with_overrides(self) -> None:
        scaler = self._engine.owner()
        if scaler._overridden() and is_ready(scaler, self._optimizer):
            scaler.unscale_(self._optimizer)

    def _use(self, step: Step, norm_limit: NormLimit | None, always_measures: bool = False) -> None:
        """Unscale, check and clip gradients; leave the step if they are not usable.

        ``always_measures``: leave non-finite gradients unchanged.
        """
        refuse_half(self._engine, step)
        if self._max_norm is None and norm_limit is None and not always_measures:
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


def put_back(held: Iterable[tuple[Tensor, Tensor]]) -> None:
    """Set the gradients of parameters."""
    for param, grad in held:
        param.grad = grad


def is_value(loss: object, around: Iteration) -> bool:
    """Return whether a closure has only computed the loss, for gradients that exist already.

    A line search evaluates losses in ``no_grad``; a Polyak step size takes the loss of the backward
    pass before the step.
    """
    if isinstance(loss, Tensor):
        newest = around.newest_loss
        return not loss.requires_grad or (newest is not None and newest() is loss)
    return isinstance(loss, int | float)
