"""What a scaler that is switched off does: nothing is scaled or checked, every step is taken."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from halfstep._gradients.gradients import collect, parameters
from halfstep._gradients.optimizers import name, split_closure, with_closure
from halfstep._scaler import clipping
from halfstep._scaler.engine import Engine, scale_on
from halfstep._scaler.iteration import Step
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.ranks import ALONE
from halfstep._scaler.scale_state import ScaleState, Static
from halfstep._scaler.step import clip_coefficient_of, measure, multiply_
from halfstep.errors import RanksError


def _clip(engine: Engine, optimizer: torch.optim.Optimizer, max_norm: float) -> None:
    params = parameters(optimizer)
    found = collect(params)
    device = found.values[0].device if found.values else torch.device("cpu")
    try:
        ranks = engine.ranks.of("step", params, has_scale=True)
    except RanksError:  # a disabled scaler needs no more than PyTorch's clipping
        ranks = ALONE
    step = measure(Step(optimizer, _one(device), found, ranks=ranks))
    multiply_(step, clip_coefficient_of(step, max_norm))


def step(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_norm: float | None,
) -> Any:
    """Clip if requested, in the closure if there is one, and call ``optimizer.step``."""
    closure, others, _ = split_closure(args, kwargs)
    if closure is None:
        # It may have been switched off with gradients at hand.
        engine.unused.use(f"step({name(optimizer)})", parameters(optimizer))
    if max_norm is not None:
        limit = clipping.checked_max_norm(max_norm)
        if closure is None:
            _clip(engine, optimizer, limit)
        else:

            @torch.enable_grad()
            def clipped() -> Any:
                loss = closure()
                _clip(engine, optimizer, limit)
                return loss

            args, kwargs = with_closure(clipped, others, kwargs)
    return optimizer.step(*args, **kwargs)


def outcome(engine: Engine, optimizer: torch.optim.Optimizer) -> Outcome:
    """Return the outcome of a taken step, with the current gradients."""
    scale = _one(torch.device("cpu"))
    taken = Step(optimizer, scale, collect(parameters(optimizer)), skip=0.0)
    found = Outcome(taken, engine.names)
    found.after = scale.snapshot()
    return found


@cache
def _one(device: torch.device) -> LossScale:
    return scale_on(device, LossScale(ScaleState.first(1.0, Static())))
