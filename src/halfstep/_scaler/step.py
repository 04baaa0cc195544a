"""One step of one optimizer: gather, check, agree, decide, take, remember; and the usual step.

Usual is one step of an optimizer in an iteration, also after ``unscale_``, whose first steps are
over, at a scale that only counts, or that the device moves. Several share no parameters. It goes by
a plan that is made once. Anything else takes the long road, and so does a usual step that finds inf
or NaN, from there on. Both give the same numbers, bit for bit.

G is one read or one write of all gradients. The cost before the optimizer's own work:

===================  =======================  ===========================================
optimizer            neither clip nor norm    clip, or the norm is wanted
===================  =======================  ===========================================
plain                check and divide, 2 G    measure, 1 G; divide and clip at once, 2 G
handles the scale    measure, 1 G             measure, 1 G
===================  =======================  ===========================================

Gradients that are unscaled already are checked again if they were written to since. In the lower
left cell, gradients are only checked where measuring is slower than a check. The first
steps of an optimizer are always measured, to detect gradients that are clipped before they are
unscaled, unless the scale is 1. So are steps whose scale may be below 1, because a skipped step
could not undo its division.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from operator import is_
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState

from halfstep._gradients import scalars
from halfstep._gradients.gradients import (
    NONE,
    Flags,
    Gradients,
    Norms,
    clip_coefficient,
    collect,
    grad_of,
    largest,
    norms_of,
    overflows_when_divided,
    parameters,
    refuse_float16,
)
from halfstep._gradients.optimizers import HANDLES_SCALE, does_without_scale, name, step_with_scale
from halfstep._gradients.scalars import Scalar, any_of, reciprocal
from halfstep._pytorch.distributed import default_group, has_process_group
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import (
    STAGES,
    Check,
    Entry,
    Iteration,
    Ledger,
    Step,
    nothing_checked,
)
from halfstep._scaler.journal import Plan
from halfstep._scaler.loss_scale import Snapshot
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.ranks import ALONE
from halfstep.errors import CallOrderError, RanksError

NOT_USUAL = object()
_Found: TypeAlias = tuple[Plan, Snapshot, Gradients]
USUAL_DTYPES = {torch.float32, torch.bfloat16, torch.float64}


def unscale_usual(engine: Engine, optimizer: torch.optim.Optimizer) -> bool:
    """Divide gradients by the scale; return False, with nothing done, if that is not usual."""
    found = None if id(optimizer) in engine.usual else _gather_usual(engine, optimizer)
    if found is None:
        return False
    _keep(engine, found[0], _checked_usual(engine, optimizer, found, OptState.UNSCALED, None))
    return True


def take_usual(engine: Engine, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Any:
    """Take a usual step; return ``NOT_USUAL``, with nothing done, if it is not one.

    Sync: one on an accelerator, none for an optimizer that handles the scale itself.
    """
    found = _gather_usual(engine, optimizer)
    if found is None:
        return NOT_USUAL
    plan, before, _ = found
    unscaled = engine.usual.get(id(optimizer))
    if unscaled is None:
        step = _checked_usual(engine, optimizer, found, OptState.STEPPED, max_norm)
    elif max_norm is None:
        step = _checked_again(engine, *unscaled)
    else:
        return NOT_USUAL
    loss_scale, make_step = engine.loss_scale, optimizer.step
    is_fused = plan.is_fused
    if is_fused and step.multiplier is None and loss_scale.is_here:
        is_fused = not does_without_scale(optimizer)  # nor does it need a flag
    norm = None if step.norms is None or max_norm is None else step.norms.norm
    is_written = False
    if not (loss_scale.is_here or is_fused):
        step, norm = read(step, norm)
        is_written = loss_scale.snapshot() != before  # existing code has written another scale
        if is_written and unscaled is None:
            _scaled_again(step)
            return NOT_USUAL
    if is_written or not (isinstance(step.skip, Tensor) or step.skip == 0.0):
        step = _on_long_road(_scaled_again(step) if plan.is_fused else step, unscaled)
        return finish(engine, plan, make_step, step, max_norm, is_fused=plan.is_fused)
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


def _checked_usual(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    found: _Found,
    stage: OptState,
    max_norm: float | None,
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
        # A check writes anyway, so that it can divide: by a power of two as PyTorch's kernels do.
        is_equal = is_fused and loss_scale.is_here and math.frexp(scale)[0] == 0.5
        if is_fused and not (is_equal and does_without_scale(optimizer)):
            gradients.check(own.found_here, loss_scale.one)
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
        written.check(look.found_here, step.loss_scale.one)
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


def _gather_usual(engine: Engine, optimizer: torch.optim.Optimizer) -> _Found | None:
    """Return the plan, the state and the gradients of a usual step; None if it is not one."""
    plan, loss_scale = engine.journal.plans.get(id(optimizer)), engine.loss_scale
    if plan is None or plan.params is None or not engine.is_usual:
        return None
    before = loss_scale.calm(is_fused=plan.is_fused)
    if before is None:
        return None
    for other, _ in engine.usual.values():
        is_apart = other.params is not None and plan.param_ids.isdisjoint(other.param_ids)
        if not is_apart and other is not plan:
            return None
    params: list[Tensor] = []
    for group in optimizer.param_groups:
        params += group["params"]
    flag = getattr(optimizer, HANDLES_SCALE, None)
    if (
        flag is not plan.flag
        or (flag and [group.get("fused") for group in optimizer.param_groups] != plan.fused)
        or len(params) != len(plan.params)
        or not all(map(is_, params, plan.params))
        or default_group() is not plan.group
    ):
        plan.params = None  # it was made for other groups
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


# --- the long road --------------------------------------------------------------------------------


def take(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    make_step: Callable[[], Any],
    max_norm: float | None,
    *,
    is_fused: bool,
) -> Any:
    """Step if all gradients are finite, before and after unscaling. See ``GradScaler.step``."""
    require_in_time(engine, "step", optimizer)
    step = gather(engine, "step", optimizer)
    plan = engine.journal.plan(optimizer)
    try:
        step = examine(engine, step, max_norm, is_fused=is_fused)
    except BaseException as error:
        failed(engine, plan, step, error)
        raise
    return finish(engine, plan, make_step, step, max_norm, is_fused=is_fused)


def examine(engine: Engine, step: Step, max_norm: float | None, *, is_fused: bool) -> Step:
    """Check gathered gradients, and measure or divide them too where the step needs it anyway."""
    if not is_fused:
        refuse_half(engine, step)
    if max_norm is not None or (step.is_first and step.multiplier is not None):
        return measure(step)
    if step.multiplier is None:
        return look(engine.iteration.ledger, step)
    # Dividing by a scale below 1 may overflow, and a skipped step leaves gradients unchanged.
    return check(step) if is_fused or step.loss_scale.can_amplify else unscale_(step)


def finish(
    engine: Engine,
    plan: Plan,
    make_step: Callable[[], Any],
    step: Step,
    max_norm: float | None,
    *,
    is_fused: bool,
) -> Any:
    """Decide, step and remember; see :func:`take`."""
    try:
        if is_fused:
            coefficient, step = clip_coefficient_of(step, max_norm), step.decide()
            if step.loss_scale.is_here and step.ranks is not ALONE:
                step, _ = read(step)
            else:
                for agreement in step.agreements():
                    agreement.verify()
            result = step_fused(make_step, step, coefficient)
        else:
            step = _ready(step.decide(), max_norm)
            result = make_step() if step.skip == 0.0 else None
    except BaseException as error:
        failed(engine, plan, step, error)
        raise
    remember(engine, step, plan, is_fused=is_fused)
    if plan.params is None:
        plan.make(step.ranks, is_fused=is_fused)
    return result


def failed(engine: Engine, plan: Plan, step: Step, error: BaseException) -> None:
    """Record a step that raised."""
    if step.ranks.is_together and isinstance(error, RanksError | CallOrderError):
        engine.end_iteration()  # raised on all ranks, which can continue
    else:
        remember_failure(engine.iteration, step)
    if plan.outcome is None:
        engine.journal.plans.pop(id(step.optimizer), None)


def unscale(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients of an optimizer by the scale; see ``GradScaler.unscale_``."""
    require_in_time(engine, "unscale_", optimizer)
    step = gather(engine, "unscale_", optimizer)
    refuse_half(engine, step)
    if step.is_first and step.multiplier is not None:
        step = multiply_(measure(step))._replace(norms=None)
    else:
        step = unscale_(step)
    engine.iteration.keep(step, OptState.UNSCALED)


IN_TIME = {
    "unscale_": (
        "Call unscale_() at most once an iteration, after the last backward() and before step(); "
        "call update() at the end of the iteration"
    ),
    "step": "Call update() once at the end of each iteration, after step() of every optimizer",
}


def require_in_time(engine: Engine, call: str, optimizer: torch.optim.Optimizer) -> Step | None:
    """Raise CallOrderError if a call comes too late for an optimizer; return its last step."""
    earlier = engine.iteration.steps.get(id(optimizer))
    stage = OptState.READY if earlier is None else earlier.stage
    if stage is OptState.STEPPED or (stage is OptState.UNSCALED and call == "unscale_"):
        raise CallOrderError(
            f"{call}({name(optimizer)}): {STAGES[stage]} since the last update(). {IN_TIME[call]}"
        )
    return earlier


def require_known(ledger: Ledger, call: str, params: list[Tensor]) -> None:
    """Raise CallOrderError if a step that raised may have divided any of the gradients."""
    if ledger.is_in_doubt(params):
        raise CallOrderError(
            f"{call}(): an earlier step() of these gradients raised, and may have divided some "
            "of them by the scale already: zero_grad() and call backward() again"
        )


# --- gather ---------------------------------------------------------------------------------------


def gather(engine: Engine, call: str, optimizer: torch.optim.Optimizer) -> Step:
    """Collect the gradients of an optimizer and the number they are multiplied by. Sync: none.

    If some of them have been unscaled with another optimizer, the others are unscaled now. A step
    needs at least one.
    """
    iteration, ledger = engine.iteration, engine.iteration.ledger
    params = parameters(optimizer)
    earlier = iteration.steps.get(id(optimizer))
    if earlier is not None and earlier.stage is OptState.READY:
        earlier = None
    if engine.unused.by_param:
        engine.unused.use(f"{call}({name(optimizer)})", params)
    ranks = engine.ranks_of(call, optimizer, params) if has_process_group() else ALONE
    loss_scale = engine.scale_of_iteration(call, optimizer)
    gradients = collect(params)
    if call == "step" and earlier is None and not (gradients.grads or ranks.is_together):
        raise nothing_checked(optimizer)
    require_known(ledger, call, gradients.params)
    ids = frozenset(map(id, params)) if ranks.is_together else frozenset()
    scaled, entries = NONE, list[Entry]()
    if earlier is None or iteration.num_losses > earlier.num_losses:
        scaled, entries = ledger.split(gradients, ids)
    rest = Step(optimizer, loss_scale, scaled, ranks=ranks, all_param_ids=ids)
    if earlier is None:
        number, is_first = loss_scale.number(), False
        # With a scale of 1, as that of a guard, clipping is never too early.
        if loss_scale.state.scale != 1.0:
            plan = engine.journal.plans.get(id(optimizer))
            is_first = plan is None or plan.early_clipping.is_measuring
        rest = rest._replace(scaled_by=number, multiplier=number, is_first=is_first)
        if not entries:
            return rest
    elif scaled.grads:
        problem = (
            f"{call}({name(optimizer)}): backward() of a scaled loss came after its gradients were "
            f"unscaled, and {len(scaled.grads)} of {len(gradients.grads)} are new and still "
            "scaled. Call unscale_() after the last backward(); give this "
            "iteration up with zero_grad() and update(new_scale=scaler.get_scale())"
        )
        engine.owner()._refuse(problem)
    refuse_half(engine, rest)
    for entry in entries:
        entry.unscale_what_was_left()
    rest = unscale_(rest._replace(earlier=tuple(entry.check for entry in entries)))
    if rest.own is not None:
        ledger.mark(scaled, rest.own)
    known = () if earlier is None else earlier.checks
    checks = tuple(dict.fromkeys([*known, *rest.checks]))
    return Step(optimizer, loss_scale, gradients, earlier=checks, ranks=ranks)


def refuse_half(engine: Engine, step: Step) -> None:
    """Raise if float16 gradients would have to be unscaled in place."""
    gradients, optimizer = step.gradients, step.optimizer
    if step.multiplier is not None and torch.float16 in {dtype for _, dtype in gradients.by_kind}:
        refuse_float16(gradients, name(optimizer), engine.names.of(gradients.params, optimizer))


# --- check, agree ---------------------------------------------------------------------------------


def unscale_(step: Step) -> Step:
    """Divide the gradients by the scale in place and check for inf and NaN. 2 G. Sync: none."""
    if step.multiplier is None or not step.has_gradients:
        return step
    can_amplify = step.loss_scale.can_amplify
    found_inf = step.gradients.unscale_(step.multiplier, can_amplify=can_amplify)
    return step._replace(multiplier=None, own=new_check(step, found_inf))


def check(step: Step) -> Step:
    """Check scaled gradients, and measure them too if that is no slower.

    1 G, or 2 G for small gradients. Sync: none.
    """
    # With other ranks, the total norm would take another collective.
    if not step.ranks.is_together and step.gradients.is_measured_fast():
        return measure(step)
    found = nonfinite(step.gradients, step.loss_scale.device)
    return step._replace(own=_joined_check(step, found))


def look(ledger: Ledger, step: Step) -> Step:
    """Check unscaled gradients again that were written to since. At most as :func:`check`.

    Without a process group, and on the CPU, versions tell which. Collectives bump none, nor does
    PyTorch's clipping elsewhere, in one kernel for all gradients: all are checked. Sync: none.
    """
    written, kinds = step.gradients, step.gradients.by_kind
    if not has_process_group() and all(each.type in scalars.READABLE for each, _ in kinds):
        written = ledger.written(step.gradients)
    if not (written.grads or step.ranks.is_together):
        return step
    found = nonfinite(written, step.loss_scale.device) if written.grads else []
    return step._replace(look=_joined_check(step, found))


def nonfinite(gradients: Gradients, device: torch.device) -> list[Tensor]:
    """Return flags, 1 if there is inf or NaN, from the faster of two kernels. Sync: none."""
    if not gradients.is_measured_fast():
        return list(gradients.check().values())
    return [norms_of(gradients, None, device).flag(device)]


def measure(step: Step) -> Step:
    """Measure the norms; check the gradients too, which is free. 1 G. Sync: none."""
    if not step.has_gradients:
        return step
    device, multiplier, ranks = step.loss_scale.device, step.multiplier, step.ranks
    needs_own = multiplier is not None or not ranks.is_together
    norms = norms_of(step.gradients, multiplier, device if needs_own else None)
    finish = ranks.start_norm(norms, step.gradients, device) if ranks.is_together else None
    # The flags of the other ranks are reduced at the same time as their norms.
    own = None if multiplier is None else _joined_check(step, [norms.flag(device)])
    if finish is not None:
        squares = finish()
        norms = norms._replace(squares=squares, found_inf=scalars.flag_nonfinite(squares, device))
    if multiplier is None or own is None:
        return step._replace(norms=norms, look=Check({device: norms.flag(device)}))
    if step.is_first:
        own.first = norms.norm, largest(step.gradients, multiplier, device)
    return step._replace(norms=norms, own=own)


def _joined_check(step: Step, found: list[Tensor]) -> Check:
    """Return a check with one flag; of scaled gradients also whether dividing them overflows."""
    if step.multiplier is not None and step.loss_scale.can_amplify:
        found = [*found, *overflows_when_divided(step.gradients, step.multiplier)]
    device = step.loss_scale.device
    return new_check(step, {device: scalars.any_of(found, device)} if found else {})


def new_check(step: Step, found_inf: Flags) -> Check:
    """Return a check, shared with the other ranks if several decide."""
    own = Check(found_inf, all_param_ids=step.all_param_ids)
    if step.ranks is not ALONE:
        has_gradients = bool(step.gradients.grads or step.earlier)
        own.agreement = step.ranks.agree_on(step.loss_scale, found_inf, has_gradients=has_gradients)
    return own


# --- decide ---------------------------------------------------------------------------------------


def clip_coefficient_of(step: Step, max_norm: float | None) -> Scalar | None:
    """Return the clip coefficient, None without clipping or gradients. Sync: none."""
    if step.norms is None or max_norm is None:
        return None
    return clip_coefficient(step.norms.norm, max_norm, step.norms.found_inf)


def divisor_of(multiplier: Scalar, coefficient: Scalar | None) -> Scalar:
    """Return scale and clip coefficient as the one divisor of a fused optimizer."""
    if coefficient is None:
        return multiplier
    if not isinstance(coefficient, Tensor) and coefficient == 0.0:
        return math.inf  # clipped to 0
    return scalars.to_single(multiplier / coefficient)


def read(step: Step, norm: Scalar | None = None) -> tuple[Step, float | None]:
    """Return a decision that the host knows, and ``norm`` as a number.

    What else the host needs for the step is read at the same time. Sync: the one of a plain step.
    """
    values: dict[str, Any] = {"skip": step.skip, "found_inf": step.found_inf, "norm": norm}
    if norm is not None:
        values["multiplier"] = step.multiplier
    on_device = {key: value for key, value in values.items() if isinstance(value, Tensor)}
    agreements = step.agreements()
    vectors = [agreement.vector() for agreement in agreements]
    numbers, rows = step.loss_scale.read_with(on_device, vectors)
    values |= numbers
    for agreement, row in zip(agreements, rows, strict=True):
        agreement.require(row)  # raises if the ranks disagree
    found_inf = values["found_inf"]
    skip = max(values["skip"], found_inf or 0.0)
    for each in step.checks:
        each.note((skip if found_inf is None else found_inf) != 0.0)
    if step.look is not None:
        step.look.note(skip != 0.0)
    multiplier = values.get("multiplier", step.multiplier)
    step = step._replace(skip=skip, found_inf=found_inf, multiplier=multiplier)
    return step, values["norm"]


# --- take -----------------------------------------------------------------------------------------


def multiply_(step: Step, coefficient: Scalar | None = None) -> Step:
    """Unscale and clip in one in-place pass, 2 G; do nothing if neither is needed."""
    factor = coefficient
    if step.multiplier is not None:
        factor = scalars.reciprocal(step.multiplier)
        if coefficient is not None:
            factor = factor * coefficient
    if factor is None:
        return step
    step.gradients.multiply_(
        factor if coefficient is None else scalars.to_single(factor),
        was_just_read=step.norms is not None,
    )
    return step._replace(multiplier=None)


def _ready(step: Step, max_norm: float | None) -> Step:
    """Return a decision that the host knows; unscale and clip gradients that will be used."""
    norm = step.norms.norm if step.norms is not None and max_norm is not None else None
    if isinstance(step.skip, Tensor) or step.ranks is not ALONE:
        step, norm = read(step, norm)
    if step.skip != 0.0:
        return _scaled_again(step)
    if step.multiplier is None and step.scaled_by is not None:
        return step  # they were divided for the check
    if norm is None or max_norm is None:
        return multiply_(step)
    return multiply_(step, clip_coefficient(norm, max_norm))


def _scaled_again(step: Step) -> Step:
    """Give gradients that were divided for the check their values back."""
    if step.multiplier is not None or step.scaled_by is None:
        return step
    step.gradients.multiply_(step.scaled_by)
    return step._replace(multiplier=step.scaled_by)


def step_fused(make_step: Callable[[], Any], step: Step, coefficient: Scalar | None) -> Any:
    """Step with an optimizer that divides and skips by itself."""
    scale, own, loss_scale, device = None, step.own, step.loss_scale, step.loss_scale.device
    if coefficient is None and loss_scale.is_here and step.multiplier == loss_scale.tensor.item():
        scale = loss_scale.tensor  # as torch.amp
    elif not (step.multiplier is None and coefficient is None):
        divisor = divisor_of(1.0 if step.multiplier is None else step.multiplier, coefficient)
        scale = scalars.as_tensor(divisor, device)
    assert step.skip is not None
    flag = None
    if own is not None and own.agreement is None and not step.earlier and step.look is None:
        # Nothing else decides.
        flag = own.found_here.get(device) if len(own.found_here) == 1 else None
    if flag is None:
        flag = scalars.as_tensor(step.skip, device)
    optimizer: Any = step.optimizer
    return step_with_scale(optimizer, make_step, scale, flag)


# --- remember -------------------------------------------------------------------------------------


def remember(engine: Engine, step: Step, plan: Plan, *, is_fused: bool) -> None:
    """Record a decided step and its outcome. Sync: none."""
    if step.ranks is not ALONE:
        step.loss_scale.forget_later_losses()
    step = step._replace(num_losses=engine.iteration.num_losses)
    engine.journal.add(plan, Outcome(step, engine.names, is_fused=is_fused))
    assert step.skip is not None
    engine.iteration.keep(step, OptState.STEPPED)
    if engine.buffers.watched:
        engine.buffers.restore(step.skip)
    if not plan.early_clipping.is_over:
        scale, measured = step.loss_scale, None
        if len(step.checks) == 1 and step.checks[0].first is not None:
            norm, amax = step.checks[0].first
            norm = scalars.as_tensor(scalars.to_single(norm), scale.device)
            measured = norm, amax, scale.tensor
        plan.early_clipping.see(step.optimizer, measured)


def remember_failure(iteration: Iteration, step: Step) -> None:
    """Record the state of the gradients after a step that raised. Sync: some."""
    if step.multiplier is None:
        iteration.keep(step, OptState.UNSCALED)
    elif step.own is not None and (
        # Do they have the values that were measured? Via repr, since NaN != NaN.
        step.norms is None
        or repr(step.norms.unscaled()) != repr(norms_of(step.gradients, step.multiplier).unscaled())
    ):
        iteration.ledger.doubt(step.gradients)
