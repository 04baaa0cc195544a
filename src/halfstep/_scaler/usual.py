"""A usual step, by a plan that is made once for an optimizer.

Usual is one step of an optimizer in an iteration, also after ``unscale_``, whose first steps are
over, at a scale that only counts, or that the device moves. Several share no parameters. Anything
else takes the long road of :mod:`halfstep._scaler.step`; so does a usual step that finds inf or
NaN, from there on. Both give the same numbers, bit for bit.
"""

from __future__ import annotations

from operator import is_
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep._gradients.gradients import Gradients, collect, grad_of, version_of
from halfstep._gradients.norms import clip_coefficient, norms_of
from halfstep._gradients.optimizers import HANDLES_SCALE
from halfstep._gradients.scalars import Scalar, any_of, reciprocal, scalar
from halfstep._pytorch.distributed import has_process_group, key_of
from halfstep._scaler.engine import Engine, Usual
from halfstep._scaler.iteration import Check, Step
from halfstep._scaler.journal import Plan
from halfstep._scaler.loss_scale import Snapshot
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.step import failed, finish, multiply_, nonfinite, read, step_fused

NOT_USUAL = object()
USUAL_DTYPES = {torch.float32, torch.bfloat16, torch.float64}


def unscale_(engine: Engine, optimizer: torch.optim.Optimizer) -> bool:
    """Divide gradients by the scale; return False, with nothing done, if that is not usual.

    Sync: none.
    """
    found = None if id(optimizer) in engine.usual else _gather(engine, optimizer)
    if found is None:
        return False
    plan, before, gradients = found
    is_here = engine.loss_scale.is_here
    scale = before[0].scale if is_here else engine.loss_scale.tensor  # type: ignore[index]
    step = Step(
        optimizer,
        engine.loss_scale,
        gradients,
        own=Check(gradients.multiply_(reciprocal(scale))),
        ranks=plan.ranks,
        stage=OptState.UNSCALED,
        num_losses=engine.current.num_losses,
    )
    engine.usual[id(optimizer)] = Usual(plan, step, list(map(version_of, gradients.grads)))
    return True


def take(engine: Engine, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Any:
    """Take a usual step; return ``NOT_USUAL``, with nothing done, if it is not one.

    Sync: one on an accelerator, none for an optimizer that handles the scale itself.
    """
    unscaled = engine.usual.get(id(optimizer))
    found = _gather(engine, optimizer) if unscaled is None or max_norm is None else None
    if found is None:
        return NOT_USUAL
    plan, before, gradients = found
    loss_scale, is_fused, make_step = engine.loss_scale, plan.is_fused, optimizer.step
    if unscaled is None:
        step = _checked(engine, optimizer, *found, is_measured=max_norm is not None)
    else:
        step = _checked_again(unscaled)
    norm = None if step.norms is None or max_norm is None else step.norms.norm
    is_written = False
    if not (loss_scale.is_here or is_fused):
        step, norm = read(step, norm)
        is_written = loss_scale.snapshot() != before  # existing code has written another scale
        if is_written and unscaled is None:
            if step.multiplier is None:
                gradients.multiply_(before[0].scale)  # type: ignore[index]
            return NOT_USUAL
    if is_written or not (isinstance(step.skip, Tensor) or step.skip == 0.0):
        step = _on_long_road(step, unscaled)
        return finish(engine, plan, make_step, step, max_norm, is_fused=is_fused)
    try:
        coefficient = None
        if norm is not None and max_norm is not None:
            coefficient = clip_coefficient(norm, max_norm, step.norms.found_inf)  # type: ignore[union-attr]
        if is_fused:
            result = step_fused(make_step, step, coefficient)
        else:
            step = step if coefficient is None else multiply_(step, coefficient)
            result = make_step()
    except BaseException as error:
        failed(engine, plan, _on_long_road(step, unscaled), error)
        raise
    if isinstance(step.skip, Tensor):  # only the device knows
        plan.ranks.agree_on(loss_scale, {})
        if engine.buffers.watched:
            engine.buffers.restore(step.skip)
    outcome = Outcome(step, engine.names, before, is_fused=is_fused, num_losses=step.num_losses)
    engine.journal.add(plan, outcome)
    # Who writes to a shared gradient from now on has it checked again.
    versions = list(map(version_of, gradients.grads))
    engine.usual[id(optimizer)] = Usual(plan, step, versions, outcome)
    return result


def _checked(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    before: Snapshot,
    gradients: Gradients,
    *,
    is_measured: bool,
) -> Step:
    """Return the step of scaled gradients, which are checked, and divided for a plain step."""
    loss_scale, device, norms = engine.loss_scale, engine.loss_scale.device, None
    is_known = loss_scale.is_here or not plan.is_fused  # does the host learn whether to skip?
    scale: Scalar = before[0].scale if is_known else loss_scale.number()  # type: ignore[index]
    multiplier: Scalar | None = scale
    if is_measured or (plan.is_fused and gradients.is_measured_fast()):
        norms = norms_of(gradients, scale, device)
        own = Check({device: norms.found_inf})
    elif plan.is_fused:
        own = Check(gradients.check())
    else:
        own, multiplier = Check(gradients.multiply_(reciprocal(scale))), None
    flag = own.found_here[device]
    return Step(
        optimizer,
        loss_scale,
        gradients,
        scale,
        multiplier,
        own=own,
        norms=norms,
        ranks=plan.ranks,
        stage=OptState.STEPPED,
        num_losses=engine.current.num_losses,
        skip=flag.item() if loss_scale.is_here else flag,
    )


def _checked_again(unscaled: Usual) -> Step:
    """Return the step of gradients that ``unscale_`` has divided; check what was written since."""
    plan, step, versions, _ = unscaled
    device, is_here, written = step.loss_scale.device, step.loss_scale.is_here, step.gradients
    if is_here and not has_process_group():
        written = written.written_since(versions)
    (flag,) = step.checks[0].found_here.values()
    if not written.grads:
        return step._replace(stage=OptState.STEPPED, skip=scalar(flag))
    (later,) = nonfinite(written, device)
    skip: Scalar = later
    if is_here:
        skip = max(flag.item(), later.item())
    elif plan.is_fused:
        skip = any_of([flag, later], device)
    look, found_inf = Check({device: later}), scalar(flag)
    return step._replace(look=look, stage=OptState.STEPPED, skip=skip, found_inf=found_inf)


def _on_long_road(step: Step, unscaled: Usual | None) -> Step:
    """Return what the long road goes on from: what ``unscale_`` has found came earlier."""
    step.ranks.agree_on(step.loss_scale, {})
    return step if unscaled is None else step._replace(own=None, earlier=step.checks)


def _gather(
    engine: Engine, optimizer: torch.optim.Optimizer
) -> tuple[Plan, Snapshot, Gradients] | None:
    """Return the plan, the state and the gradients of a usual step; None if it is not one."""
    plan, loss_scale = engine.journal.plans.get(id(optimizer)), engine.loss_scale
    if plan is None or plan.key is None or not engine.is_usual:
        return None
    before = loss_scale.calm(is_fused=plan.is_fused)
    if before is None:
        return None
    for each in engine.usual.values():
        if each.plan is not plan and not plan.is_apart_from(each.plan):
            return None
    params: list[Tensor] = []
    is_fused = plan.is_fused
    for group in optimizer.param_groups:
        params += group["params"]
        is_fused = is_fused and group.get("fused", True)
    flag = getattr(optimizer, HANDLES_SCALE, None)
    if is_fused is not plan.is_fused or flag is not plan.flag or key_of(params) != plan.key:
        plan.key = None  # it was made for other groups
        return None
    if engine.unused.by_param and not engine.unused.are_gone(params):
        return None
    known = engine.usual.get(id(optimizer))
    if known is not None:
        gradients = known.step.gradients
        grads = [grad for grad in map(grad_of, params) if grad is not None]
        is_same = len(grads) == len(gradients.grads) and all(map(is_, grads, gradients.grads))
        return (plan, before, gradients) if is_same and known.outcome is None else None
    gradients = collect(params)
    for device, dtype in gradients.by_kind:
        if device != loss_scale.device or dtype not in USUAL_DTYPES:
            return None
    return (plan, before, gradients) if gradients.grads else None
