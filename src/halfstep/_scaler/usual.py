"""A usual step, by a plan that is made once for an optimizer.

Usual is one step of an optimizer in an iteration, also after ``unscale_`` if it is the only one,
whose first steps are over, at a scale that only counts, or that the device moves. Several share no
parameters. Anything else takes the long road of :mod:`halfstep._scaler.step`; so does a usual step
that finds inf or NaN, from there on. Both give the same numbers, bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import is_
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients import scalars
from halfstep._gradients.gradients import Gradients, collect, grad_of, version_of
from halfstep._gradients.norms import clip_coefficient, norms_of
from halfstep._gradients.optimizers import HANDLES_SCALE, step_with_scale
from halfstep._gradients.scalars import Scalar
from halfstep._pytorch.distributed import has_process_group, key_of
from halfstep._scaler.engine import Engine, Taken, Unscaled
from halfstep._scaler.iteration import Step
from halfstep._scaler.journal import Plan
from halfstep._scaler.loss_scale import Snapshot
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.step import divisor_of, failed, finish, new_check, nonfinite

NOT_USUAL = object()
USUAL_DTYPES = {torch.float32, torch.bfloat16, torch.float64}


def unscale_(engine: Engine, optimizer: torch.optim.Optimizer) -> bool:
    """Divide gradients by the scale; return False, with nothing done, if that is not usual.

    Sync: none.
    """
    is_first = engine.unscaled is None and not engine.taken
    found = _gather(engine, optimizer) if is_first else None
    if found is None:
        return False
    plan, _, gradients = found
    loss_scale = engine.loss_scale
    scale = loss_scale.state.scale if loss_scale.is_here else loss_scale.tensor
    (flag,) = gradients.multiply_(scalars.reciprocal(scale)).values()
    step = Step(optimizer, loss_scale, gradients, ranks=plan.ranks)
    versions = list(map(version_of, gradients.grads))
    engine.unscaled = Unscaled(step, flag, versions, lambda: new_check(step, {flag.device: flag}))
    return True


def take(engine: Engine, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Any:
    """Take a usual step; return ``NOT_USUAL``, with nothing done, if it is not one.

    Sync: one on an accelerator, none for an optimizer that handles the scale itself.
    """
    found = _gather(engine, optimizer)
    if found is None:
        return NOT_USUAL
    plan, before, gradients = found
    if engine.unscaled is not None:
        is_usual = max_norm is None
        return _take_unscaled(engine, plan, before, engine.unscaled) if is_usual else NOT_USUAL
    loss_scale, is_fused, make_step = engine.loss_scale, plan.is_fused, optimizer.step
    device, is_here = loss_scale.device, loss_scale.is_here
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
        numbers, _ = loss_scale.read_with(values, [])
        skip, norm = numbers["skip"], numbers.get("norm")
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
        start = step(is_fused or norms is not None)
        return finish(engine, plan, make_step, start, max_norm, is_fused=is_fused)
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
    _remember(engine, plan, before, scaled, step, [flag])
    return result


def _take_unscaled(engine: Engine, plan: Plan, before: Snapshot, unscaled: Unscaled) -> Any:
    """Take a step whose gradients ``unscale_`` has divided; see :func:`take`."""
    step, flag, versions, _ = unscaled
    optimizer, loss_scale, is_fused = step.optimizer, step.loss_scale, plan.is_fused
    assert optimizer is not None
    device, make_step = loss_scale.device, optimizer.step
    flags, written = [flag], step.gradients
    if loss_scale.is_here and not has_process_group():
        written = written.written_since(versions)
    if written.grads:
        flags += nonfinite(written, device)
    found_inf: Scalar = flag
    skip: Scalar
    if loss_scale.is_here:
        found = [each.item() for each in flags]
        found_inf, skip = found[0], float(any(found))
    elif is_fused:
        skip = scalars.any_of(flags, device)
    else:
        numbers, _ = loss_scale.read_with({"found_inf": flag, "skip": flags[-1]}, [])
        found_inf, skip = numbers["found_inf"], float(any(numbers.values()))
    is_known = not isinstance(skip, Tensor)
    has_look = len(flags) == 2
    step = step._replace(skip=skip, found_inf=found_inf if has_look else None)

    def long() -> Step:
        """Return what the long road goes on from."""
        earlier = engine.iteration.steps[id(optimizer)].checks
        later = new_check(step, {device: flags[1]}) if has_look else None
        if is_known and not loss_scale.is_here:
            earlier[0].note(bool(found_inf))
            if later is not None:
                later.note(bool(skip))
        return step._replace(earlier=earlier, look=later)

    if is_known and (skip or loss_scale.snapshot() != before):
        return finish(engine, plan, make_step, long(), None, is_fused=is_fused)
    try:
        if is_fused:
            flag = skip if isinstance(skip, Tensor) else flag
            result = step_with_scale(optimizer, make_step, None, flag)
        else:
            result = make_step()
    except BaseException as error:
        failed(engine, plan, long(), error)
        raise
    _remember(engine, plan, before, step, long, flags)
    return result


def _remember(
    engine: Engine,
    plan: Plan,
    before: Snapshot,
    step: Step,
    long: Callable[[], Step],
    flags: list[Tensor],
) -> None:
    """Record a usual step; ``long`` returns what the long road goes on from."""
    version: int | None = flags[0]._version
    if isinstance(step.skip, Tensor):  # only the device knows
        before, version = step.loss_scale.snapshot(), None
        step.ranks.agree_on(step.loss_scale, {})
        if engine.buffers.watched:
            engine.buffers.restore(step.skip)
    num_losses, is_fused = engine.current.num_losses, plan.is_fused
    outcome = Outcome(step, engine.names, before, is_fused=is_fused, num_losses=num_losses)
    engine.journal.add(plan, outcome)
    # Who writes to a shared gradient from now on has it checked again.
    versions = list(map(version_of, step.gradients.grads))
    engine.taken.append(Taken(plan, flags, version, outcome, long, versions, num_losses))


def _gather(
    engine: Engine, optimizer: torch.optim.Optimizer
) -> tuple[Plan, Snapshot, Gradients] | None:
    """Return the plan, the state and the gradients of a usual step; None if it is not one."""
    plan, loss_scale = engine.journal.plans.get(id(optimizer)), engine.loss_scale
    if plan is None or plan.key is None or not engine.is_usual:
        return None
    before = loss_scale.calm(is_fused=plan.is_fused)
    if before is None or engine.unused.by_param:
        return None
    if engine.taken and not all(plan.is_apart_from(each.plan) for each in engine.taken):
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
    if engine.unscaled is not None:
        step = engine.unscaled.step
        grads = [grad for grad in map(grad_of, params) if grad is not None]
        checked = step.gradients.grads
        is_same = len(grads) == len(checked) and all(map(is_, grads, checked))
        return (plan, before, step.gradients) if is_same and step.optimizer is optimizer else None
    gradients = collect(params)
    for device, dtype in gradients.by_kind:
        if device != loss_scale.device or dtype not in USUAL_DTYPES:
            return None
    return (plan, before, gradients) if gradients.grads else None
