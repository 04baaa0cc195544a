"""A usual step, by a plan that is made once for an optimizer.

Usual is one step of one optimizer in an iteration, whose first steps are over, at a scale that only
counts, or that the device moves. Anything else takes the long road of :mod:`halfstep._scaler.step`;
so does a usual step from where it finds inf or NaN. Both give the same numbers, bit for bit.
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
from halfstep._gradients.scalars import Scalar
from halfstep._pytorch.distributed import key_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Step
from halfstep._scaler.journal import Plan
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.step import divisor_of, failed, finish, new_check

NOT_USUAL = object()
USUAL_DTYPES = {torch.float32, torch.bfloat16, torch.float64}


def take(engine: Engine, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Any:
    """Take a usual step; return ``NOT_USUAL``, with nothing done, if it is not one.

    Sync: one on an accelerator, none for an optimizer that handles the scale itself.
    """
    plan, loss_scale = engine.journal.plans.get(id(optimizer)), engine.loss_scale
    if plan is None or plan.key is None or not engine.is_usual:
        return NOT_USUAL
    before = loss_scale.calm(is_fused=plan.is_fused)
    if before is None or engine.taken is not None or engine.unused.by_param:
        return NOT_USUAL
    params = _params(plan, optimizer)
    if params is None:
        plan.key = None
        return NOT_USUAL
    device, gradients = loss_scale.device, collect(params)
    if not gradients.by_kind:
        return NOT_USUAL
    for where, dtype in gradients.by_kind:
        if where != device or dtype not in USUAL_DTYPES:
            return NOT_USUAL
    is_fused, is_here, make_step = plan.is_fused, loss_scale.is_here, optimizer.step
    is_known = is_here or not is_fused  # does the host learn whether to skip?
    scale: Scalar = before[0].scale if is_known else loss_scale.number()  # type: ignore[index]
    norms = norm = coefficient = None
    if max_norm is not None or (is_fused and gradients.is_measured_fast()):
        norms = norms_of(gradients, scale, device)
        flag, norm = norms.found_inf, None if max_norm is None else norms.norm
        skip: Scalar = float(not math.isfinite(norms.squares)) if is_here else flag
    else:
        (flag,) = gradients.multiply_(1.0 if is_fused else scalars.reciprocal(scale)).values()
        skip = flag.item() if is_here else flag
    if is_known and not is_here:
        values: dict[str, Scalar] = {"skip": flag} if norm is None else {"skip": flag, "norm": norm}
        read, _ = loss_scale.read_with(values, [])
        skip, norm = read["skip"], read.get("norm")
        if loss_scale.snapshot() != before:  # existing code has written another scale
            if norms is None:
                gradients.multiply_(scale)
            return NOT_USUAL

    left = None if is_known else scale
    scaled = Step(
        optimizer, loss_scale, gradients, scale, left, norms=norms, ranks=plan.ranks, skip=skip
    )
    version = flag._version

    def step(is_scaled: bool = not is_known) -> Step:
        """Return what the long road goes on from."""
        own = new_check(scaled, {device: flag})
        if is_known and not is_here:
            own.read = bool(skip), [version]
        return scaled._replace(multiplier=scale if is_scaled else None, own=own)

    if is_known and skip != 0.0:
        found = step(is_fused or norms is not None)
        return finish(engine, plan, make_step, found, max_norm, is_fused=is_fused)
    if norm is not None and max_norm is not None:
        coefficient = clip_coefficient(norm, max_norm, flag)
    try:
        if is_fused:
            divisor = scalars.as_tensor(divisor_of(scale, coefficient), device)
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
    if not is_known:
        before = loss_scale.snapshot()
        if engine.buffers.watched:
            engine.buffers.restore(skip)
    outcome = Outcome(scaled, engine.names, before, is_fused=is_fused, num_losses=num_losses)
    engine.journal.add(plan, outcome)
    engine.taken = flag, version if is_known else None, outcome, step
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
