"""Steps with a closure: scale, backward, unscale and check inside every evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients.gradients import (
    Seen,
    collect_local,
    is_as_seen,
    parameters,
    seen,
)
from halfstep._gradients.optimizers import Closure, handles_scale, is_pytorchs, name, with_closure
from halfstep._scaler.after_step import backup_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Iteration, Stage, Step
from halfstep._scaler.journal import Journal
from halfstep._scaler.outcome import has_its_gradients
from halfstep._scaler.step import (
    clip_coefficient_of,
    gather,
    look,
    measure,
    multiply_,
    read,
    refuse_half,
    remember,
    require_not_stepped,
    unscale_,
)
from halfstep.errors import CallOrderError

CONTRACT = (
    "A closure must zero the gradients, compute the loss, call scaler.scale(loss).backward() and "
    "return the loss"
)


class UnusableEvaluationError(Exception):
    """Raised inside ``optimizer.step`` to leave it when the gradients of a closure are unusable."""


def step_with_closure(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    closure: Closure,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_norm: float | None,
) -> Any:
    """Call ``optimizer.step`` with a closure that yields unscaled, finite gradients.

    Optimizers other than PyTorch's, such as SAM, may use gradients before they call the closure: so
    new ones are unscaled, checked and clipped too. Gradients of an earlier step or evaluation are
    dropped. Non-finite gradients end the step, which returns None; the parameters and the state of
    the optimizer are restored. If the closure raises, they are too, and its gradients are dropped.
    Sync: one for each evaluation, and one for gradients from before the step that are used.
    """
    evaluations = _Evaluations(engine, optimizer, closure, max_norm)
    before = backup_of(optimizer)
    result = None
    try:
        evaluations.begin()
        args, kwargs = with_closure(evaluations, args, kwargs)
        result = optimizer.step(*args, **kwargs)
        evaluations.used()
    except UnusableEvaluationError:
        before.restore()
    except BaseException:
        before.restore()
        engine.buffers.restore(1.0)
        drop_gradients(optimizer)
        raise
    evaluations.finish()
    return result


class _Evaluations:
    """The callable that replaces the user's closure.

    Each evaluation is an iteration of its own, and the last one is merged into the surrounding
    iteration after the step. So a step that raises leaves no trace, and every evaluation may
    unscale the gradients. The earlier ones were finite, which says nothing about the scale.

    Raises:
        CallOrderError: The optimizer has stepped, or its gradients were unscaled.
    """

    def __init__(
        self,
        engine: Engine,
        optimizer: torch.optim.Optimizer,
        closure: Closure,
        max_norm: float | None,
    ) -> None:
        self._last: Step | None = None  # with the gradients that the optimizer uses
        self._iteration: Iteration | None = None  # of the last evaluation
        self._from_before: dict[int, Seen] = {}  # gradients from before the step
        self._has_backward = False  # whether the closure has called it
        self._engine = engine
        self._optimizer = optimizer
        self._call = f"step({name(optimizer)}, closure)"
        self._closure = closure
        self._max_norm = max_norm
        earlier = engine.iteration.step_of(optimizer)
        require_not_stepped(earlier)
        self._is_unscaled = earlier is not None and earlier.stage is Stage.UNSCALED
        if self._is_unscaled and is_pytorchs(optimizer):
            raise self._error(
                f"{Stage.UNSCALED.value} since the last update(), and the closure makes new ones",
                "; call unscale_() or clip_grad_norm_() in it, or step() without a closure",
            )

    def begin(self) -> None:
        """Unscale new gradients for an optimizer that may use them before it calls the closure."""
        engine, optimizer = self._engine, self._optimizer
        if not self._is_unscaled:
            drop_used(engine.journal, optimizer)
        if not engine.loss_scale.is_created:
            drop_gradients(optimizer)
        params = parameters(optimizer)
        if not is_pytorchs(optimizer) and any(param.grad is not None for param in params):
            self._use()
        self._from_before = seen_of(params)

    def __call__(self) -> Any:
        """Evaluate the closure; leave the step if its gradients are unusable."""
        if self._iteration is not None:
            drop_gradients(self._optimizer)
        params = parameters(self._optimizer)
        around, inner = self._engine.iteration, Iteration()
        self._engine.iteration, self._has_backward = inner, False
        self._last, self._iteration = None, inner
        try:
            with before_backward(params, self._before_backward):
                loss = self._evaluate(inner)
            self._require_new(params)
            self._from_before = {}
            self._use()
        finally:
            self._engine.iteration = around
            inner.ledger.close()
        return loss.detach() if isinstance(loss, Tensor) else loss

    def used(self) -> Step:
        """Return the step with the gradients that the optimizer uses; raise if there are none."""
        if self._last is None:
            raise CallOrderError(
                f"{self._call}: the optimizer did not call the closure, and there are no gradients "
                "of a scaled loss. Call scaler.scale(loss).backward() before step(), without a "
                "closure"
            )
        return self._last

    def finish(self) -> None:
        """Record the step, and the losses and checks of the last evaluation."""
        iteration, optimizer, inner = self._engine.iteration, self._optimizer, self._iteration
        if inner is not None:
            # The scale of the closure's losses also applies to other optimizers that use its last
            # gradients.
            iteration.num_losses += inner.num_losses
            iteration.ledger.take_over(inner.ledger.entries)
        plan = self._engine.journal.plan(optimizer)
        is_fused = handles_scale(optimizer)
        remember(self._engine, optimizer, self.used(), plan, is_fused=is_fused)
        plan.stepped_gradients = seen_of(parameters(optimizer))

    def _error(self, problem: str, more: str = "") -> CallOrderError:
        return CallOrderError(f"{self._call}: {problem}. {CONTRACT}{more}")

    @torch.enable_grad()
    def _evaluate(self, inner: Iteration) -> Any:
        """Call the closure; call ``backward`` if it has only returned the loss."""
        loss = self._closure()
        earlier = inner.step_of(self._optimizer)
        has_stepped = earlier is not None and earlier.stage is Stage.STEPPED
        if self._engine.iteration is not inner or has_stepped:
            raise self._error(
                "the closure called step() or update()", "; call update() once, after the step"
            )
        if inner.num_losses:
            return loss
        if self._has_backward:
            raise self._error("the closure called backward() on a loss that was not scaled")
        if not (isinstance(loss, Tensor) and loss.requires_grad):
            raise self._error(
                f"the closure scaled no loss and returned a {type(loss).__name__} without a "
                "gradient"
            )
        self._require_new(parameters(self._optimizer))  # before autograd finds its graph used up
        self._engine.scale(loss).backward()
        return loss

    def _before_backward(self, param: Tensor) -> None:
        self._has_backward = True
        self._require_new([param])

    def _require_new(self, params: list[Tensor]) -> None:
        """Raise if a gradient from before the step is still there."""
        if are_left(self._from_before, params):
            raise self._error(
                "there are gradients from before the step, and the closure keeps them or adds to "
                "them"
            )

    def _use(self) -> None:
        """Unscale, check and clip gradients; leave the step if they are not usable."""
        engine, optimizer = self._engine, self._optimizer
        params = parameters(optimizer)
        step = gather(engine, "step", optimizer, params, optimizer, needs_one=True)
        refuse_half(engine, step)
        if self._max_norm is not None:
            step = measure(step)
        elif step.multiplier is None:
            step = look(engine.iteration.ledger, step)
        else:
            step = unscale_(step)
        self._last, _ = read(step.decide())
        if self._last.skip:
            raise UnusableEvaluationError
        self._last = multiply_(self._last, clip_coefficient_of(step, self._max_norm))


def seen_of(params: list[Tensor]) -> dict[int, Seen]:
    """Return the gradients as they are, by id of the parameter."""
    grads = {id(param): param.grad for param in params if param.grad is not None}
    return dict(zip(grads, seen(grads.values()), strict=True))


def are_left(earlier: dict[int, Seen], params: list[Tensor]) -> bool:
    """Return whether a gradient is still as it was, and not zero. Sync: one if it is as it was."""
    left = [p for p in params if id(p) in earlier and is_as_seen(earlier[id(p)], p.grad)]
    return any(bool(values.any()) for values in collect_local(left).values)


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set all gradients of an optimizer to None."""
    for param in parameters(optimizer):
        param.grad = None


def drop_used(journal: Journal, optimizer: torch.optim.Optimizer) -> None:
    """Set the gradients to None that are still those of the last step. Sync: none."""
    outcome, plan = journal.last(optimizer), journal.plans.get(id(optimizer))
    if plan is None or not plan.stepped_gradients:
        if outcome is not None and has_its_gradients(outcome):
            drop_gradients(optimizer)
        return
    for param in parameters(optimizer):
        earlier = plan.stepped_gradients.get(id(param))
        if earlier is not None and is_as_seen(earlier, param.grad):
            param.grad = None


@contextmanager
def before_backward(params: list[Tensor], function: Callable[[Tensor], None]) -> Iterator[None]:
    """Call a function with each parameter that a backward pass is about to add to."""
    with ExitStack() as hooks:
        for param in params:
            if param.requires_grad:
                hook = partial(lambda param, _: function(param), param)
                hooks.enter_context(param.register_hook(hook))  # type: ignore[no-untyped-call]
        yield
