"""Clipping of gradient norms: of all gradients together, or per layer or parameter."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from halfstep._gradients import scalars
from halfstep._gradients.gradients import parameters
from halfstep._gradients.norms import clip_coefficient, p_norm
from halfstep._gradients.optimizers import Names, is_optimizer, name, require_optimizer
from halfstep._gradients.scalars import Scalar, checked_number
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Checked, Gathered, Stage
from halfstep._scaler.step import gather, keep, measure, multiply_, refuse_half, unscale_
from halfstep.errors import CallOrderError

Per = Literal["all", "layer", "parameter"]
LARGEST_P = 8.0
"""Largest p: the 8th power of any float32 number fits in float64."""


def checked_max_norm(max_norm: object) -> float:
    """Return ``max_norm`` as a float; inf means no clipping."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1 and max_norm.device.type == "cpu":
        max_norm = max_norm.tolist()
    if max_norm == math.inf:
        return math.inf
    number = checked_number("max_norm", max_norm)
    if number < 0:
        raise ValueError(f"max_norm is {number}: it must be >= 0")
    return number


def checked_kind(norm_type: object, per: Per) -> tuple[float, Per]:
    """Return ``norm_type`` as a float, and ``per``, both validated."""
    kind = math.inf if norm_type == math.inf else checked_number("norm_type", norm_type)
    if not (1.0 <= kind <= LARGEST_P or kind == math.inf):
        raise ValueError(f"norm_type is {kind}: pass a number from 1 to {LARGEST_P:g}, or math.inf")
    if per not in ("all", "layer", "parameter"):
        raise ValueError(f"per is {per!r}: pass 'all', 'layer' or 'parameter'")
    return kind, per


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
    engine: Engine,
    owner: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float,
    per: Per,
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
    norm, clipped = clip_(gathered, max_norm, norm_type, per, engine.names)
    keep(engine.iteration, clipped, Stage.UNSCALED)
    return norm


@torch.no_grad()
def clip_(
    gathered: Gathered, max_norm: float, norm_type: float, per: Per, names: Names
) -> tuple[Tensor, Checked]:
    """Unscale and clip gradients in place; return the total norm, and what they are now.

    The norm is a float32 scalar on the device of the scale, unscaled and before clipping; 0 without
    gradients. ``names`` assigns gradients to layers. 3 G for the 2-norm of all. Sync: none.
    """
    device, ranks = gathered.loss_scale.device, gathered.ranks
    groups = _groups(gathered, per, names)
    if not gathered.has_gradients:
        return torch.zeros_like(gathered.loss_scale.tensor), Checked(gathered, gathered.multiplier)
    checked = measure(gathered) if norm_type == 2.0 else unscale_(gathered)
    measured = checked.measured
    if measured is not None:
        norm, found_inf = measured.norm, measured.found_inf
    else:
        norm = scalars.scalar(ranks.p_norm(gathered.gradients, norm_type, device))
        found_inf = None
    if per == "all":
        clipped = multiply_(checked, clip_coefficient(norm, max_norm, found_inf))
    else:
        clipped = _clip_groups_(checked, max_norm, norm_type, groups)
    return scalars.as_float32(norm, device), clipped


def _clip_groups_(
    checked: Checked, max_norm: float, norm_type: float, groups: list[list[int]]
) -> Checked:
    gathered, measured = checked.gathered, checked.measured
    device = gathered.loss_scale.device
    inverse = None if checked.multiplier is None else scalars.reciprocal(checked.multiplier)
    parts = [gathered.gradients.at(positions) for positions in groups]
    found: list[Scalar]
    if measured is None:
        found = [p_norm(part, norm_type, device) for part in parts]
    else:
        found = [measured.norms.at(positions).total(device) for positions in groups]
    norms = gathered.ranks.norms_of_parts(found, parts, norm_type)
    for part, norm in zip(parts, norms, strict=True):
        if inverse is not None:
            norm = norm * inverse
        factor = clip_coefficient(norm, max_norm)
        factor = factor if inverse is None else factor * inverse
        part.multiply_(scalars.to_single(factor))
    return replace(checked, multiplier=None)


def _groups(gathered: Gathered, per: Per, names: Names) -> list[list[int]]:
    """Return the positions of the gradients that share a norm."""
    params = gathered.gradients.params
    if per == "all":
        return [list(range(len(params)))]
    if per == "parameter":
        return [[position] for position in range(len(params))]
    found: dict[str, list[int]] = defaultdict(list)
    for position, layer in enumerate(names.layers_of(params, gathered.optimizer)):
        found[layer].append(position)
    return list(found.values())
