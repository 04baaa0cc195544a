"""A usual step, by a plan that is made once for an optimizer.

Usual is one step of an optimizer in an iteration, also after ``unscale_``, whose first steps are
over, at a scale that only counts, or that the device moves. Several share no parameters. Anything
else takes the long road of :mod:`halfstep._scaler.step`; so does a usual step that finds inf or
NaN, from there on. Both give the same numbers, bit for bit.
"""

from __future__ import annotations

import math
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer

from halfstep._gradients.gradients import Gradients, collect, grad_of
from halfstep._gradients.norms import Norms, clip_coefficient, norms_of
from halfstep._gradients.optimizers import HANDLES_SCALE
from halfstep._gradients.scalars import Scalar, any_of, reciprocal
from halfstep._pytorch.distributed import has_process_group, key_of
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Check, Step
from halfstep._scaler.journal import Plan
from halfstep._scaler.loss_scale import Snapshot
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.step import failed, finish, multiply_, read, step_fused

NOT_USUAL = object()
_Found: TypeAlias = tuple[Plan, Snapshot, Gradients]
USUAL_DTYPES = {torch.float32, torch.bfloat16, torch.float64}


def unscale_(engine: Engine, optimizer: Optimizer) -> bool:
    """Divide gradients by the scale; return False, with nothing done, if that is not usual.

    Sync: none.
    """
    found = None if id(optimizer) in engine.usual else _gather(engine, optimizer)
    if found is None:
        return False
    _keep(engine, found[0], _checked(engine, optimizer, found, OptState.UNSCALED, None))
    return True


def take(engine: Engine, optimizer: Optimizer, max_norm: float | None) -> Any:
    """Take a usual step; return ``NOT_USUAL``, with nothing done, if it is not one.

    Sync: one on an accelerator, none for an optimizer that handles the scale itself.
    """
    found = _gather(engine, optimizer)
    if found is None:
        return NOT_USUAL
    plan, before, gradients = found
    unscaled = engine.usual.get(id(optimizer))
    if unscaled is None:
        step = _checked(engine, optimizer, found, OptState.STEPPED, max_norm)
    elif max_norm is None:
        step = _checked_again(engine, *unscaled)
    else:
        return NOT_USUAL
    loss_scale, is_fused, make_step = engine.loss_scale, plan.is_fused, optimizer.step
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
    # Who writes to a shared gradient from now on has it checked again.
    _keep(engine, plan, step)
    engine.journal.add(plan, Outcome(step, engine.names, is_fused, plan.versions))
    return result


def _keep(engine: Engine, plan: Plan, step: Step) -> None:
    """Record a usual call, for the long road and for ``update``."""
    plan.versions = step.gradients.versions()
    engine.usual[id(step.optimizer)] = plan, step


def _clean(engine: Engine, norms: Norms | None = None) -> Check:
    """Return a check with what the norms have found, else flags of 0; a device makes its own."""
    device = engine.loss_scale.device
    if norms is not None and (norms.found_inf is not None or not math.isfinite(norms.squares)):
        return Check({device: norms.flag(device)})
    if engine.clean:
        return engine.clean.pop()
    if not engine.loss_scale.is_here:
        return Check({})
    with torch.inference_mode(False):
        return Check({device: torch.zeros((), dtype=torch.float32, device=device)})


def _checked(
    engine: Engine, optimizer: Optimizer, found: _Found, stage: OptState, max_norm: float | None
) -> Step:
    """Return the step of scaled gradients, which are checked.

    They are also divided, unless an optimizer handles the scale or will be given the norm, too.
    """
    plan, before, gradients = found
    loss_scale, device, norms = engine.loss_scale, engine.loss_scale.device, None
    is_fused = plan.is_fused and stage is OptState.STEPPED
    # Will the host have read the scale, and so whether existing code has written another one?
    is_known = loss_scale.is_here or not (plan.is_fused or stage is OptState.UNSCALED)
    scale: Scalar = loss_scale.tensor
    if is_known or is_fused:
        scale = before[0].scale if is_known else loss_scale.number()  # type: ignore[index]
    multiplier: Scalar | None = scale
    if is_fused and plan.is_measured_fast is None:
        plan.is_measured_fast = gradients.is_measured_fast()
    if max_norm is not None or (is_fused and plan.is_measured_fast):
        norms = norms_of(gradients, scale, device)
        own = _clean(engine, norms)
    else:
        own = _clean(engine)
        if is_fused:
            gradients.check(own.found_here)
        else:
            factor = loss_scale.inverse if is_known else reciprocal(scale)
            gradients.multiply_(factor, flags=own.found_here)
            multiplier = None
    flag = own.found_here[device]
    return Step(
        optimizer,
        loss_scale,
        gradients,
        scale if stage is OptState.STEPPED else None,
        multiplier,
        own=own,
        norms=norms,
        ranks=plan.ranks,
        stage=stage,
        num_losses=engine.current.num_losses,
        skip=flag.item() if loss_scale.is_here else flag,
    )


def _checked_again(engine: Engine, plan: Plan, step: Step) -> Step:
    """Return the step of gradients that ``unscale_`` has divided; check what was written since."""
    device, is_here, written = step.loss_scale.device, step.loss_scale.is_here, step.gradients
    if is_here and not has_process_group():
        written = written.written_since(plan.versions)
    if not written.grads:
        return step._replace(stage=OptState.STEPPED)
    if written.is_measured_fast():
        look = _clean(engine, norms_of(written, None, device))
    else:
        look = _clean(engine)
        written.check(look.found_here)
    flag, later = step.skip, look.found_here[device]
    assert flag is not None
    skip: Scalar = later
    if not isinstance(flag, Tensor):
        skip = max(flag, later.item())
    elif plan.is_fused:
        skip = any_of([flag, later], device)
    return step._replace(look=look, stage=OptState.STEPPED, skip=skip, found_inf=flag)


def _on_long_road(step: Step, unscaled: tuple[Plan, Step] | None) -> Step:
    """Return what the long road goes on from: what ``unscale_`` has found came earlier."""
    step.ranks.agree_on(step.loss_scale, {})
    return step if unscaled is None else step._replace(own=None, earlier=step.checks)


def _gather(engine: Engine, optimizer: Optimizer) -> _Found | None:
    """Return the plan, the state and the gradients of a usual step; None if it is not one."""
    plan, loss_scale = engine.journal.plans.get(id(optimizer)), engine.loss_scale
    if plan is None or plan.key is None or not engine.is_usual:
        return None
    before = loss_scale.calm(is_fused=plan.is_fused)
    if before is None:
        return None
    for other, _ in engine.usual.values():
        is_apart = other.key is not None and plan.param_ids.isdisjoint(other.param_ids)
        if not is_apart and other is not plan:
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
        gradients = known[1].gradients
        grads = [grad for grad in map(grad_of, params) if grad is not None]
        is_same = len(grads) == len(gradients.grads) and all(map(is_, grads, gradients.grads))
        is_unscaled = known[1].stage is OptState.UNSCALED
        return (plan, before, gradients) if is_same and is_unscaled else None
    gradients = collect(params)
    for device, dtype in gradients.by_kind:
        if device != loss_scale.device or dtype not in USUAL_DTYPES:
            return None
    return (plan, before, gradients) if gradients.grads else None
