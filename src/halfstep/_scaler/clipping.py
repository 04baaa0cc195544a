"""Clipping of the L2 norm of all gradients together."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients import scalars
from halfstep._gradients.gradients import parameters
from halfstep._gradients.norms import clip_coefficient
from halfstep._gradients.optimizers import is_optimizer, name, require_optimizer
from halfstep._gradients.scalars import checked_number
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Checked, Gathered, Stage
from halfstep._scaler.step import gather, keep, measure, multiply_, refuse_half
from halfstep.errors import CallOrderError


def checked_max_norm(max_norm: object) -> float:
    """Return ``max_norm`` as a float; inf means no clipping."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1 and max_norm.device.type == "cpu":
        max_norm = max_norm.tolist()
    if isinstance(max_norm, float) and max_norm == math.inf:
        return math.inf
    number = checked_number("max_norm", max_norm)
    if number < 0:
        raise ValueError(f"max_norm is {number}: it must be >= 0")
    return number


def require_l2(norm_type: object) -> None:
    """Raise ValueError for a norm other than the L2 norm."""
    if norm_type != 2.0:
        raise ValueError(
            f"clip_grad_norm_(norm_type={norm_type!r}): a GradScaler clips the L2 norm only, "
            "norm_type=2.0. For another norm call scaler.unscale_(optimizer), and then "
            f"torch.nn.utils.clip_grad_norm_(parameters, max_norm, norm_type={norm_type!r}), or "
            "torch.nn.utils.clip_grad_value_(parameters, clip_value)"
        )


def target(
    optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
) -> tuple[torch.optim.Optimizer | None, list[Tensor]]:
    """Return the optimizer, None for parameters, and the list of parameters."""
    if isinstance(optimizer_or_parameters, Tensor):
        return None, [optimizer_or_parameters]
    # A container may be iterable too.
    if isinstance(optimizer_or_parameters, Iterable) and not is_optimizer(optimizer_or_parameters):
        params = list(optimizer_or_parameters)
        for param in params:
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"clip_grad_norm_() takes an optimizer or parameters, and one of these is a "
                    f"{type(param).__name__}: pass model.parameters()"
                )
        return None, params
    optimizer: Any = optimizer_or_parameters
    require_optimizer("clip_grad_norm_", optimizer)
    return optimizer, parameters(optimizer)


def clip_grad_norm_(
    engine: Engine, owner: torch.optim.Optimizer | Iterable[Tensor] | Tensor, max_norm: float
) -> Tensor:
    """Unscale and clip gradients. Sync: none."""
    optimizer, params = target(owner)
    earlier = None if optimizer is None else engine.iteration.step_of(optimizer)
    if earlier is not None and earlier.stage is Stage.STEPPED:
        raise CallOrderError(
            f"clip_grad_norm_({name(optimizer)}): {earlier.stage.value} since the last "
            "update(). Clip before step()"
        )
    gathered = gather(engine, "clip_grad_norm_", owner, params, optimizer)
    refuse_half(engine, gathered)
    norm, clipped = clip_(gathered, max_norm)
    keep(engine.iteration, clipped, Stage.UNSCALED)
    return norm


@torch.no_grad()
def clip_(gathered: Gathered, max_norm: float) -> tuple[Tensor, Checked]:
    """Unscale and clip gradients in place; return their norm, and what they are now.

    The norm is a float32 scalar on the device of the scale, unscaled and before clipping; 0 without
    gradients. 3 G. Sync: none.
    """
    scale, checked = gathered.loss_scale, measure(gathered)
    measured = checked.measured
    if measured is None:  # there are no gradients
        return torch.zeros_like(scale.tensor), checked
    clipped = multiply_(checked, clip_coefficient(measured.norm, max_norm, measured.found_inf))
    return scalars.as_float32(measured.norm, scale.device), clipped
