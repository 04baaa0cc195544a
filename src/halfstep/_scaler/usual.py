"""A usual step, by a plan that is made once for an optimizer.

Usual is one step of one optimizer in an iteration, whose first steps are over, at a scale on the
CPU that only counts. Anything else takes the long road of :mod:`halfstep._scaler.step`; so does a
usual step from where it finds inf or NaN. Both give the same numbers, bit for bit.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients import scalars
from halfstep._gradients.gradients import collect
from halfstep._gradients.norms import clip_coefficient, norms_of
from halfstep._gradients.optimizers import HANDLES_SCALE, step_with_scale
from halfstep._gradients.scalars import CPU
from halfstep._pytorch.distributed import key_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Step
from halfstep._scaler.journal import Plan
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.step import divisor_of, failed, finish, new_check

NOT_USUAL = object()
USUAL_KINDS = {(CPU, dtype) for dtype in (torch.float32, torch.bfloat16, torch.float64)}


def take(engine: Engine, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Any:
    """Take a usual step; return ``NOT_USUAL``, with nothing done, if it is not one. Sync: none."""
    plan, loss_scale = engine.journal.plans.get(id(optimizer)), engine.loss_scale
    if plan is None or plan.key is None or not engine.is_usual:
        return NOT_USUAL
    before = loss_scale.calm()
    if before is None or engine.taken is not None or engine.unused.by_param:
        return NOT_USUAL
    params = _params(plan, optimizer)
    if params is None:
        plan.key = None
        return NOT_USUAL
    scale = before[0].scale
    gradients, is_fused, make_step = collect(params), plan.is_fused, optimizer.step
    if not gradients.grads or not all(map(USUAL_KINDS.__contains__, gradients.by_kind)):
        return NOT_USUAL
    norms = coefficient = None
    if max_norm is not None or (is_fused and gradients.is_measured_fast()):
        norms = norms_of(gradients, scale, CPU)
        is_finite, flag = math.isfinite(norms.squares), norms.found_inf
    else:
        (flag,) = gradients.multiply_(1.0 if is_fused else scalars.reciprocal(scale)).values()
        is_finite = flag.item() == 0.0

    scaled = Step(optimizer, loss_scale, gradients, scale, norms=norms, ranks=plan.ranks, skip=0.0)

    def step(is_scaled: bool) -> Step:
        """Return what the long road goes on from."""
        own = new_check(scaled, {CPU: flag})
        return scaled._replace(multiplier=scale if is_scaled else None, own=own)

    if not is_finite:
        found = step(is_fused or norms is not None)
        return finish(engine, plan, make_step, found, max_norm, is_fused=is_fused)
    if norms is not None and max_norm is not None:
        coefficient = clip_coefficient(norms.norm, max_norm)
    try:
        if is_fused:
            divisor = scalars.as_tensor(divisor_of(scale, coefficient), CPU)
            result = step_with_scale(optimizer, make_step, divisor, flag)
        else:
            if coefficient is not None:
                factor = scalars.to_single(scalars.reciprocal(scale) * coefficient)
                gradients.multiply_(factor, was_just_read=True)
            result = make_step()
    except BaseException as error:
        failed(engine, plan, step(is_fused), error)
        raise

    num_losses = engine.current.num_losses
    outcome = Outcome(scaled, engine.names, before, is_fused=is_fused, num_losses=num_losses)
    engine.journal.add(plan, outcome)
    engine.taken = flag, outcome, step
    return result


def _params(plan: Plan, optimizer: torch.optim.Optimizer) -> list[Tensor] | None:
    """Return the parameters of an optimizer, None if the plan is not for it as it is now."""
    params: list[Tensor] = []
    is_fused = plan.is_fused
    for group in optimizer.param_groups:
        params += group["params"]
        is_fused = is_fused and group.get("fused", True)
    flag = getattr(optimizer, HANDLES_SCALE, None)
    is_same = is_fused is plan.is_fused and flag is plan.flag and key_of(params) == plan.key
    return params if is_same else None
