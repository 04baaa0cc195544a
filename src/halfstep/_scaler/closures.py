"""Steps with a closure: scale, backward, unscale and check inside every evaluation."""

from __future__ import annotations

from typing import Any
from weakref import ref

import torch
from torch import Tensor

from halfstep._gradients.gradients import is_nonzero, parameters
from halfstep._gradients.optimizers import Closure, handles_scale, is_pytorchs, name, with_closure
from halfstep._scaler.after_step import backup_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Stage, Step
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
    Only the last evaluation is recorded: the earlier ones were finite, which says nothing about the
    scale.

    Raises:
        CallOrderError: The optimizer has stepped, or the closure breaks its contract.

    Sync: one for each evaluation, and one for gradients from before the step.
    """
    call, iteration = f"step({name(optimizer)}, closure)", engine.iteration
    num_checks = len(iteration.checks)
    used: Step | None = None  # with the gradients that the optimizer uses
    from_before: list[tuple[Tensor, ref[Tensor]]] = []  # parameters and unused gradients

    def broken(problem: str, cure: str = "") -> CallOrderError:
        return CallOrderError(f"{call}: {problem}. {CONTRACT}{cure}")

    def use() -> None:
        """Unscale, check and clip the gradients; leave the step if they are not usable."""
        nonlocal used
        used = _checked(engine, optimizer, max_norm)
        if used.skip:
            raise UnusableEvaluationError
        used = multiply_(used, clip_coefficient_of(used, max_norm))

    def drop() -> None:
        """Forget the gradients, and the checks of them that the closure has made."""
        if not from_before:
            drop_gradients(optimizer)
        iteration.steps.pop(id(optimizer), None)
        iteration.ledger.forget(iteration.checks[num_checks:])

    def evaluate() -> Any:
        nonlocal used
        used = None  # a reference to the gradients
        drop()
        num_losses = iteration.num_losses
        with torch.enable_grad():
            loss = closure()
        step = iteration.step_of(optimizer)
        if engine.iteration is not iteration or (step and step.stage is Stage.STEPPED):
            raise broken(
                "the closure called step() or update()", "; call update() once, after the step"
            )
        if iteration.num_losses == num_losses:
            raise broken("the closure scaled no loss")
        if any(param.grad is not None and param.grad is grad() for param, grad in from_before):
            raise broken(
                "there are gradients from before the step, and the closure keeps them or adds to "
                "them",
                ". To use gradients from before, leave the closure out",
            )
        from_before.clear()
        use()
        return loss.detach() if isinstance(loss, Tensor) else loss

    earlier = iteration.step_of(optimizer)
    require_not_stepped(earlier)
    if earlier is not None and is_pytorchs(optimizer):
        raise broken(
            f"{earlier.stage.value} since the last update(), and the closure makes new ones",
            "; call unscale_() or clip_grad_norm_() in it, or step() without a closure",
        )
    _drop_used(engine, optimizer)
    grads = [(param, param.grad) for param in parameters(optimizer) if param.grad is not None]
    before, result = backup_of(optimizer), None
    try:
        if grads and not is_pytorchs(optimizer):
            use()
        elif any(bool(is_nonzero(grad)) for _, grad in grads):
            from_before += [(param, ref(grad)) for param, grad in grads]
        del grads  # references to them
        args, kwargs = with_closure(evaluate, args, kwargs)
        result = optimizer.step(*args, **kwargs)
        if used is None:
            raise CallOrderError(
                f"{call}: the optimizer did not call the closure, and there are no gradients "
                "of a scaled loss. Call scaler.scale(loss).backward() before step(), without a "
                "closure"
            )
    except UnusableEvaluationError:
        before.restore()
    except BaseException:
        before.restore()
        engine.buffers.restore(1.0)
        from_before.clear()
        drop()
        raise
    assert used is not None
    plan = engine.journal.plan(optimizer)
    remember(engine, optimizer, used, plan, is_fused=handles_scale(optimizer))
    return result


def _drop_used(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Drop the gradients that are still those of the last step."""
    outcome = engine.journal.last(optimizer)
    if outcome is not None and has_its_gradients(outcome):
        drop_gradients(optimizer)


def _checked(engine: Engine, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Step:
    """Return the step with the present gradients, checked and decided. Sync: one."""
    params = parameters(optimizer)
    step = gather(engine, "step", optimizer, params, optimizer, needs_one=True)
    refuse_half(engine, step)
    if max_norm is not None:
        step = measure(step)
    elif step.multiplier is None:
        step = look(engine.iteration.ledger, step)
    else:
        step = unscale_(step)
    return read(step.decide())[0]


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Set all gradients of an optimizer to None."""
    for param in parameters(optimizer):
        param.grad = None
