"""Clip the norm of gradients, of all together or of each layer or parameter by itself."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Literal

import torch
from torch import Tensor

from halfstep._scaler import passes, scalars, stepping
from halfstep._scaler.checks import checked_number
from halfstep._scaler.gradients import parameters
from halfstep._scaler.stepping import Preparation

Per = Literal["all", "layer", "parameter"]
LARGEST_P = 8.0
"""The 8th power of any float32 number is one of float64."""


def checked_max_norm(max_norm: object) -> float:
    """Return ``max_norm`` as a float; inf clips nothing.

    Raises:
        TypeError: It is not a number.
        ValueError: It is negative or NaN.
    """
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1 and max_norm.device.type == "cpu":
        max_norm = max_norm.tolist()
    if max_norm == math.inf:
        return math.inf
    number = checked_number("max_norm", max_norm)
    if number < 0:
        raise ValueError(f"max_norm is {number}: it must be >= 0")
    return number


def checked_kind(norm_type: object, per: Per) -> tuple[float, Per]:
    """Return ``norm_type`` as a float, and ``per``.

    Raises:
        TypeError: ``norm_type`` is not a number.
        ValueError: One of them is none of the choices.
    """
    kind = math.inf if norm_type == math.inf else checked_number("norm_type", norm_type)
    if not (1.0 <= kind <= LARGEST_P or kind == math.inf):
        raise ValueError(f"norm_type is {kind}: pass a number from 1 to {LARGEST_P:g}, or math.inf")
    if per not in ("all", "layer", "parameter"):
        raise ValueError(f"per is {per!r}: pass 'all', 'layer' or 'parameter'")
    return kind, per


def target(
    optimizer_or_parameters: torch.optim.Optimizer | Iterable[Tensor] | Tensor,
) -> tuple[torch.optim.Optimizer | None, list[Tensor]]:
    """Return the optimizer, None if there is none, and the parameters."""
    if isinstance(optimizer_or_parameters, Tensor):
        return None, [optimizer_or_parameters]
    if isinstance(optimizer_or_parameters, Iterable):
        params = list(optimizer_or_parameters)
        for param in params:
            if not isinstance(param, Tensor):
                raise TypeError(
                    f"clip_grad_norm_() takes an optimizer or parameters, and one of these is a "
                    f"{type(param).__name__}: pass model.parameters()"
                )
        return None, params
    return optimizer_or_parameters, list(parameters(optimizer_or_parameters))


@torch.no_grad()
def clip_(
    ready: Preparation, max_norm: float, norm_type: float, per: Per, layers: Callable[[], list[str]]
) -> Tensor:
    """Divide gradients by the scale and clip them, in place. Sync: none.

    Args:
        ready: The gradients; 3 G for the 2-norm of all together.
        max_norm: The largest norm.
        norm_type: 2, inf, or another p from 1 to 8.
        per: What the norm is taken of: "all" gradients together, those of each "layer" (module), or
            each "parameter" alone.
        layers: Returns for each gradient the name of its module.

    Returns:
        The norm of all gradients together, unscaled and before clipping; float32 scalar on the
        device of the scale. 0 without gradients.
    """
    groups = _groups(len(ready.gradients.grads), per, layers)
    if not ready.is_looked_at:
        return torch.zeros_like(ready.loss_scale.tensor)
    if norm_type == 2.0:
        stepping.measure(ready)
        assert ready.norm_now is not None
    else:
        stepping.unscale_(ready)
        device = ready.loss_scale.tensor.device
        ready.norm_now = ready.ranks.p_norm(ready.gradients, norm_type, device)
    norm = ready.norm_now
    if per == "all":
        stepping.limit(ready, max_norm, None)
        stepping.multiply_(ready)
    else:
        _clip_groups_(ready, max_norm, norm_type, groups)
    return scalars.to_float32(norm)


def _clip_groups_(
    ready: Preparation, max_norm: float, norm_type: float, groups: list[list[int]]
) -> None:
    device = ready.loss_scale.tensor.device
    inverse = None if ready.scale is None else scalars.reciprocal(ready.scale)
    parts = [ready.gradients.at(positions) for positions in groups]
    if ready.norms_now is None:
        norms = [passes.p_norm(part, norm_type, device) for part in parts]
    else:
        norms = [ready.norms_now.at(positions).total(device) for positions in groups]
    for part, norm in zip(parts, ready.ranks.norms_of_parts(norms, parts, norm_type), strict=True):
        if inverse is not None:
            norm = norm * inverse
        factor = passes.clip_coefficient(norm, max_norm)
        passes.multiply_(part, (factor if inverse is None else factor * inverse).float())
    ready.scale = None


def _groups(count: int, per: Per, layers: Callable[[], list[str]]) -> list[list[int]]:
    if per == "all":
        return [list(range(count))]
    if per == "parameter":
        return [[position] for position in range(count)]
    found: dict[str, list[int]] = defaultdict(list)
    for position, layer in enumerate(layers()):
        found[layer].append(position)
    return list(found.values())
