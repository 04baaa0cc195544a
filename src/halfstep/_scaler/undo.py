"""Steps that may have to be undone: those with a closure, and the attempts of a retry.

With a closure, every evaluation scales a loss, runs backward, unscales and checks.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Iterator
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep._common.machine import RandomStates
from halfstep._gradients.gradients import is_nonzero, parameters
from halfstep._gradients.optimizers import (
    Closure,
    evaluates_first,
    handles_scale,
    is_pytorchs,
    members,
    name,
    with_closure,
)
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.modules import registers_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import STAGES, Step
from halfstep._scaler.outcome import has_its_gradients
from halfstep._scaler.scale_state import Reason
from halfstep._scaler.step import (
    clip_coefficient_of,
    examine,
    gather,
    multiply_,
    read,
    remember,
    require_in_time,
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
    scale. Sync: one for each evaluation, and one for gradients from before the step.
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
        step = gather(engine, "step", optimizer)
        used = read(examine(engine, step, max_norm, is_fused=False).decide())[0]
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
        step = iteration.steps.get(id(optimizer))
        if engine.iteration is not iteration or (step and step.stage is OptState.STEPPED):
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

    earlier = require_in_time(engine, "step", optimizer)
    if earlier is not None and is_pytorchs(optimizer):
        raise broken(
            f"{STAGES[earlier.stage]} since the last update(), and the closure makes new ones",
            "; call unscale_() in it, or step() without a closure",
        )
    last = engine.journal.last(optimizer)
    if last is not None and has_its_gradients(last):
        drop_gradients(optimizer)
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
    remember(engine, used, engine.journal.plan(optimizer), is_fused=handles_scale(optimizer))
    return result


def drop_gradients(optimizer: torch.optim.Optimizer) -> None:
    for param in parameters(optimizer):
        param.grad = None


# --- retries --------------------------------------------------------------------------------------


@keep_out_of_graphs
def attempts(engine: Engine, optimizer: torch.optim.Optimizer, times: int) -> Iterator[int]:
    """Yield the attempts: 0, and more while a smaller scale may help; see ``GradScaler.retry``."""
    modules = engine.names.modules()
    params = [*parameters(optimizer), *(p for module in modules for p in module.parameters())]
    randomness = RandomStates({p.device for p in params})
    # As dicts: a module may replace a buffer by another tensor or None.
    held = [registers_of(part)[1] for module in modules for part in module.modules()]
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
            return  # a static scale, or the smallest one: it would overflow again
        randomness.restore()
        buffers.restore()
        optimizer.zero_grad()


# --- copies ---------------------------------------------------------------------------------------


class Backup:
    """Copies of tensor values and of the contents of dicts. Sync: none."""

    def __init__(
        self, tensors: Iterable[Tensor], dicts: Iterable[tuple[dict[Any, Any], dict[Any, Any]]]
    ) -> None:
        # An expanded tensor cannot be written to, so it has not changed.
        self._values = [
            (tensor, tensor.detach().clone())
            for tensor in tensors
            if tensor.layout is not torch.strided or 0 not in tensor.stride() or tensor.numel() < 2
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
