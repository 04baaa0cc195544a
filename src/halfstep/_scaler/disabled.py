"""What a scaler that is switched off does: nothing is scaled or checked, every step is taken."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients.gradients import collect, parameters
from halfstep._gradients.optimizers import name, split_closure, with_closure
from halfstep._scaler import clipping
from halfstep._scaler.agreement import ALONE
from halfstep._scaler.closures import (
    are_left,
    before_backward,
    drop_used,
    seen_of,
)
from halfstep._scaler.engine import Engine, scale_on
from halfstep._scaler.iteration import Step
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.schedules import Static
from halfstep.errors import RanksError


def clip_grad_norm_(
    engine: Engine,
    optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
    max_norm: float,
) -> Tensor:
    """Clip unscaled gradients; see :meth:`GradScaler.clip_grad_norm_`."""
    optimizer, params = clipping.target(optimizer_or_parameters)
    found = collect(params)
    device = found.values[0].device if found.values else torch.device("cpu")
    try:
        ranks = engine.ranks.of("clip_grad_norm_", params, has_scale=True)
    except RanksError:  # a disabled scaler needs no more than PyTorch's clipping
        ranks = ALONE
    return clipping.clip_(Step(optimizer, _one(device), found, ranks=ranks), max_norm)[0]


def step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_norm: float | None,
) -> Any:
    """Clip if requested, and call ``optimizer.step``, with the closure if there is one."""
    closure, args, kwargs = split_closure(args, kwargs)
    if closure is None:
        # It may have been switched off with gradients at hand.
        engine.unused.use(f"step({name(optimizer)})", parameters(optimizer))
        if max_norm is not None:
            clip_grad_norm_(engine, optimizer, clipping.checked_max_norm(max_norm))
        return optimizer.step(*args, **kwargs)
    plan = engine.journal.plan(optimizer)

    @torch.enable_grad()
    def evaluate() -> Any:
        params = parameters(optimizer)
        reached: list[Tensor] = []
        before = seen_of(params)
        with before_backward(params, reached.append):
            loss = closure()
        if isinstance(loss, Tensor) and loss.requires_grad and not reached:
            drop_used(engine.journal, optimizer)
            if not are_left(before, params):  # the closure leaves backward() to the scaler
                loss.backward()  # type: ignore[no-untyped-call]
        if max_norm is not None:
            clip_grad_norm_(engine, optimizer, clipping.checked_max_norm(max_norm))
        plan.stepped_gradients = seen_of(params)
        return loss

    args, kwargs = with_closure(evaluate, args, kwargs)
    result = optimizer.step(*args, **kwargs)
    plan.stepped_gradients = seen_of(parameters(optimizer))
    return result


def outcome(engine: Engine, optimizer: torch.optim.Optimizer) -> Outcome:
    """Return the outcome of a taken step, with the current gradients."""
    scale = _one(torch.device("cpu"))
    taken = Step(optimizer, scale, collect(parameters(optimizer)), skip=0.0)
    found = Outcome(taken, engine.names, scale.snapshot())
    found.after = scale.snapshot()
    return found


@cache
def _one(device: torch.device) -> LossScale:
    return scale_on(device, LossScale(ScaleState.first(1.0, Static())))
