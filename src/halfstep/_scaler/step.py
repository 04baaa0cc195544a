"""One step of one optimizer: gather, check, agree, decide, take, remember.

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
from dataclasses import replace
from functools import partial
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor

from halfstep._gradients import scalars
from halfstep._gradients.gradients import Gradients, collect, parameters, refuse_float16
from halfstep._gradients.norms import (
    clip_coefficient,
    largest,
    norms_of,
    overflows_when_divided,
)
from halfstep._gradients.optimizers import name, step_with_scale, writes_unscaled
from halfstep._gradients.scalars import Scalar
from halfstep._pytorch.distributed import has_process_group
from halfstep._scaler.agreement import ALONE, Alone, Together
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import (
    Checked,
    Decided,
    Gathered,
    Iteration,
    Measured,
    Remembered,
    Stage,
    nothing_checked,
)
from halfstep._scaler.journal import Memory, plan_of
from halfstep._scaler.ledger import GradientCheck, Ledger
from halfstep._scaler.outcome import outcome_of
from halfstep.errors import CallOrderError, RanksError


def take(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    max_norm: float | None,
    *,
    is_fused: bool,
) -> Any:
    """Step if all gradients are finite, before and after unscaling. See ``GradScaler.step``.

    ``is_fused``: whether ``optimizer.step`` divides by the scale and skips by itself.
    """
    require_not_stepped(engine.iteration.step_of(optimizer))
    gathered = gather(engine, "step", optimizer, parameters(optimizer), optimizer, needs_one=True)
    memory = engine.journal.memories.get(id(optimizer)) or engine.journal.memory(optimizer)
    # Looked up on the instance: accelerate replaces `step` there to detect whether it was called.
    make_step = partial(optimizer.step, *args, **kwargs)
    checked = Checked(gathered, gathered.multiplier)
    try:
        if not is_fused and torch.float16 in gathered.gradients.dtypes:
            refuse_half(engine, gathered)
        is_searched = gathered.is_first and gathered.multiplier is not None
        if is_searched or max_norm is not None:
            checked = measure(gathered)
        elif gathered.multiplier is None:
            checked = look(engine.iteration.ledger, gathered)
        elif is_fused or gathered.loss_scale.can_amplify:
            # Dividing by a scale below 1 may overflow, and a skipped step must leave the gradients
            # unchanged.
            checked = check(gathered)
        else:
            checked = unscale_(gathered)
    except BaseException as error:
        failed(engine, memory, checked, error)
        raise
    return finish(engine, optimizer, memory, make_step, checked, max_norm, is_fused=is_fused)


def finish(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    memory: Memory,
    make_step: Callable[[], Any],
    checked: Checked,
    max_norm: float | None,
    *,
    is_fused: bool,
) -> Any:
    """Decide, step and remember; see :func:`take`."""
    try:
        if is_fused:
            coefficient = clip_coefficient_of(checked, max_norm)
            decided = _agreed(checked.decide())
            result = _step_fused(optimizer, make_step, decided, coefficient)
        else:
            decided = _ready(checked.decide(), max_norm)
            checked = decided.checked
            result = make_step() if decided.skip == 0.0 else None
    except BaseException as error:
        failed(engine, memory, checked, error)
        raise
    remember(engine, optimizer, decided, memory, is_fused=is_fused)
    if memory.plan is None:
        memory.plan = plan_of(optimizer, memory, checked.gathered.ranks, is_fused=is_fused)
    return result


def failed(engine: Engine, memory: Memory, checked: Checked, error: BaseException) -> None:
    """Record a step that raised."""
    if checked.gathered.ranks.is_together and isinstance(error, RanksError | CallOrderError):
        engine.end_iteration()  # raised on all ranks, which can continue
    else:
        remember_failure(engine.iteration, checked)
    if memory.outcome is None:
        engine.journal.memories.pop(id(memory.optimizer()), None)


def unscale(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients of an optimizer by the scale; see ``GradScaler.unscale_``."""
    require_scaled(optimizer, engine.iteration.step_of(optimizer))
    gathered = gather(engine, "unscale_", optimizer, parameters(optimizer), optimizer)
    refuse_half(engine, gathered)
    if gathered.is_first and gathered.multiplier is not None:
        checked = replace(multiply_(measure(gathered)), measured=None)
    else:
        checked = unscale_(gathered)
    keep(engine.iteration, checked, Stage.UNSCALED)


def require_scaled(optimizer: torch.optim.Optimizer, earlier: Remembered | None) -> None:
    """Raise CallOrderError if ``unscale_`` comes too late for an optimizer."""
    if earlier is not None and earlier.stage is not Stage.SCALED:
        raise CallOrderError(
            f"unscale_({name(optimizer)}): {earlier.stage.value} since the last update(). Call "
            "unscale_() at most once an iteration, after the last backward() and before step(); "
            "call update() at the end of the iteration"
        )


def require_not_stepped(earlier: Remembered | None) -> None:
    """Raise CallOrderError if the optimizer has stepped since the last ``update``."""
    if earlier is not None and earlier.stage is Stage.STEPPED:
        raise CallOrderError(
            f"step({name(earlier.optimizer)}): {earlier.stage.value} since the last "
            "update(). Call update() once at the end of each iteration, after step() of every "
            "optimizer"
        )


def require_known(ledger: Ledger, call: str, params: list[Tensor]) -> None:
    """Raise CallOrderError if a step that raised may have divided any of the gradients."""
    if ledger.is_in_doubt(params):
        raise CallOrderError(
            f"{call}(): an earlier step() of these gradients raised, and may have divided some "
            "of them by the scale already: zero_grad() and call backward() again"
        )


# --- gather ---------------------------------------------------------------------------------------


def gather(
    engine: Engine,
    call: str,
    owner: object,
    params: list[Tensor],
    optimizer: torch.optim.Optimizer | None,
    *,
    needs_one: bool = False,
) -> Gathered:
    """Collect the gradients of ``params`` and the number they are multiplied by. Sync: none.

    Error messages name ``call`` and ``owner``; ``optimizer`` is None for a list of parameters. If
    some of the gradients have been unscaled with another optimizer, the others are unscaled now.

    Raises:
        NothingCheckedError: There is no gradient, and ``needs_one``.
    """
    iteration = engine.iteration
    earlier = iteration.steps.get(id(optimizer))
    if engine.unused.by_param:
        engine.unused.use(f"{call}({name(owner)})", params)
    ranks = engine.ranks_of(call, owner, params) if has_process_group() else ALONE
    is_scaled = earlier is None or earlier.stage is Stage.SCALED
    must_have_one = needs_one and is_scaled and not ranks.is_together
    if must_have_one and all(map(_is_none, map(_grad, params))):  # map() makes no Python calls
        raise nothing_checked(optimizer)
    loss_scale = engine.scale_of_iteration(call, owner)
    gradients = collect(params)
    require_known(iteration.ledger, call, gradients.params)
    if earlier is not None and not is_scaled:
        gathered = Gathered(
            optimizer,
            loss_scale,
            gradients,
            checks=earlier.checks,
            ranks=ranks,
            measured=earlier.measured,
        )
        if iteration.num_losses > earlier.num_losses:
            return _with_later_checks(engine, gathered, params, f"{call}({name(owner)})")
        return gathered
    # With a scale of 1, as that of a guard, clipping is never too early.
    is_first = False
    if optimizer is not None and loss_scale.state.scale != 1.0:
        memory = engine.journal.memories.get(id(optimizer))
        is_first = memory is None or memory.early_clipping.is_measuring
    gathered = Gathered(
        optimizer, loss_scale, gradients, loss_scale.number(), ranks=ranks, is_first=is_first
    )
    if iteration.ledger.entries or ranks.is_together:
        return _unscaled_apart(engine, gathered, params)
    return gathered


_grad = attrgetter("grad")
_is_none = partial(is_, None)


def _with_later_checks(
    engine: Engine, gathered: Gathered, params: list[Tensor], call: str
) -> Gathered:
    """Add the checks of other calls since the gradients were unscaled.

    Raises:
        CallOrderError: A backward pass has added scaled gradients to those that were unscaled.
    """
    all_param_ids = _param_ids(gathered.ranks, params)
    new, later = engine.iteration.ledger.split(gathered.gradients, all_param_ids)
    if new.grads:
        problem = (
            f"{call}: backward() of a scaled loss came after its gradients were unscaled, and "
            f"{len(new.grads)} of {len(gathered.gradients.grads)} are new and "
            "still scaled. Call unscale_() or clip_grad_norm_() after the last backward(); "
            "give this iteration up with zero_grad() and update(new_scale=scaler.get_scale())"
        )
        engine.owner()._refuse(problem)
    # The new gradients may have been checked with another optimizer or a list of parameters.
    for entry in later:
        entry.unscale_what_was_left()
    checks = [entry.check for entry in later]
    added = (check for check in checks if check not in gathered.checks)
    return replace(gathered, checks=(*gathered.checks, *added))


def _unscaled_apart(engine: Engine, gathered: Gathered, params: list[Tensor]) -> Gathered:
    """Return the gradients that are still scaled; if others are unscaled, all, unscaled."""
    ledger, all_param_ids = engine.iteration.ledger, _param_ids(gathered.ranks, params)
    scaled, entries = ledger.split(gathered.gradients, all_param_ids)
    checks = tuple(entry.check for entry in entries)
    rest = replace(gathered, gradients=scaled, checks=checks, all_param_ids=all_param_ids)
    if not checks:
        return rest
    refuse_half(engine, rest)
    for entry in entries:
        entry.unscale_what_was_left()
    own = unscale_(rest).own
    if own is not None:
        ledger.mark(scaled, own)
        checks = (*checks, own)
    return replace(gathered, multiplier=None, checks=checks, is_first=False)


def _param_ids(ranks: Alone | Together, params: list[Tensor]) -> frozenset[int]:
    """Return the ids of all parameters; empty if this rank decides alone."""
    return frozenset(map(id, params)) if ranks.is_together else frozenset()


def refuse_half(engine: Engine, gathered: Gathered) -> None:
    """Raise if float16 gradients would have to be unscaled in place."""
    gradients, optimizer = gathered.gradients, gathered.optimizer
    if gathered.multiplier is not None and torch.float16 in gradients.dtypes:
        owner = "the list of parameters" if optimizer is None else name(optimizer)
        refuse_float16(gradients, owner, engine.names.of(gradients.params, optimizer))


# --- check, agree ---------------------------------------------------------------------------------


def unscale_(gathered: Gathered) -> Checked:
    """Divide the gradients by the scale in place and check for inf and NaN. 2 G. Sync: none."""
    scale, multiplier = gathered.loss_scale, gathered.multiplier
    if multiplier is None or not gathered.has_gradients:
        return Checked(gathered, multiplier)
    found_inf = gathered.gradients.unscale_(multiplier, can_amplify=scale.can_amplify)
    return Checked(gathered, None, new_check(gathered, found_inf))


def check(gathered: Gathered) -> Checked:
    """Check scaled gradients, and measure them too if that is no slower.

    1 G, or 2 G for small gradients. Sync: none.
    """
    multiplier, gradients = gathered.multiplier, gathered.gradients
    if multiplier is None or not gathered.has_gradients:
        return Checked(gathered, multiplier)
    # With other ranks, the total norm would take another collective.
    if not gathered.ranks.is_together and gradients.is_measured_fast():
        return measure(gathered)
    found = _nonfinite(gradients, gathered.loss_scale.device)
    return Checked(gathered, multiplier, _check_of_scaled(gathered, multiplier, found))


def look(ledger: Ledger, gathered: Gathered) -> Checked:
    """Check unscaled gradients again that were written to since. At most as :func:`check`.

    Without a process group, and on the CPU, versions tell which. Collectives bump none, nor does
    PyTorch's clipping elsewhere, in one kernel for all gradients: all are checked. Sync: none.
    """
    gradients, device = gathered.gradients, gathered.loss_scale.device
    is_version_enough = not has_process_group() and all(
        each.type in scalars.READABLE for each, _ in gradients.by_kind
    )
    written = ledger.written(gradients) if is_version_enough else gradients
    if not (written.grads or gathered.ranks.is_together):
        return Checked(gathered, None)
    found = _nonfinite(written, device) if written.grads else []
    flags = {device: scalars.any_of(found, device)} if found else {}
    return Checked(gathered, None, look=new_check(gathered, flags))


def _nonfinite(gradients: Gradients, device: torch.device) -> list[Tensor]:
    """Return flags, 1 if there is inf or NaN, from the faster of two kernels. Sync: none."""
    if not gradients.is_measured_fast():
        return list(gradients.check().values())
    return [scalars.flag_nonfinite(norms_of(gradients, None).total(device), device)]


def measure(gathered: Gathered) -> Checked:
    """Measure the norms; check scaled gradients too. 1 G. Sync: none."""
    multiplier, gradients = gathered.multiplier, gathered.gradients
    if not gathered.has_gradients:
        return Checked(gathered, multiplier)
    device, own = gathered.loss_scale.device, None
    norms = norms_of(gradients, multiplier)
    if not gathered.ranks.is_together:
        squares = scalars.scalar(norms.sum_of_squares(device))
        found = scalars.flag_nonfinite(squares, device)
        if multiplier is not None:
            own = _check_of_scaled(gathered, multiplier, [found])
    else:
        finish = gathered.ranks.start_norm(norms, gradients, device)
        if multiplier is not None:
            # The flags of the other ranks are reduced at the same time as their norms.
            here = scalars.flag_nonfinite(norms.total(device), device)
            own = _check_of_scaled(gathered, multiplier, [here])
        squares = finish()
        found = scalars.flag_nonfinite(squares, device)
    measured = Measured(norms, squares, found)
    if own is None:  # this look is free
        again = GradientCheck(gathered.loss_scale, {device: found})
        return Checked(gathered, None, None, measured, again)
    if gathered.is_first and multiplier is not None:
        own.first = measured.norm, largest(gradients, multiplier, device)
    return Checked(gathered, multiplier, own, measured)


def _check_of_scaled(gathered: Gathered, multiplier: Scalar, found: list[Tensor]) -> GradientCheck:
    """Return the check of gradients that remain scaled."""
    if gathered.loss_scale.can_amplify:
        found += overflows_when_divided(gathered.gradients, multiplier)
    device = gathered.loss_scale.device
    return new_check(gathered, {device: scalars.any_of(found, device)} if found else {})


def new_check(gathered: Gathered, found_inf: dict[torch.device, Tensor]) -> GradientCheck:
    """Return a check, shared with the other ranks if several decide."""
    own = GradientCheck(gathered.loss_scale, found_inf, all_param_ids=gathered.all_param_ids)
    if gathered.ranks is not ALONE:
        has_gradients = len(gathered.gradients.grads) + len(gathered.checks) > 0
        own.agreement = gathered.ranks.agree_on(own, has_gradients=has_gradients)
    return own


# --- decide ---------------------------------------------------------------------------------------


def clip_coefficient_of(checked: Checked, max_norm: float | None) -> Scalar | None:
    """Return the clip coefficient, None without clipping or gradients. Sync: none."""
    measured = checked.measured
    if measured is None or max_norm is None:
        return None
    return clip_coefficient(measured.norm, max_norm, measured.found_inf)


def divisor_of(multiplier: Scalar, coefficient: Scalar | None) -> Scalar:
    """Return scale and clip coefficient as the one divisor of a fused optimizer."""
    if coefficient is None:
        return multiplier
    if not isinstance(coefficient, Tensor) and coefficient == 0.0:
        return math.inf  # clipped to 0
    return scalars.to_single(multiplier / coefficient)


def read(decided: Decided, norm: Scalar | None = None) -> tuple[Decided, float | None]:
    """Return a decision that the host knows, and ``norm`` as a number.

    What else the host needs for the step is read at the same time. Sync: the one of a plain step.
    """
    checked, scale = decided.checked, decided.checked.gathered.loss_scale
    values = {"skip": decided.skip, "found_inf": decided.found_inf, "norm": norm}
    if scale.device.type not in scalars.READABLE:
        values |= {"scale": scale.tensor, "bad_loss": scale.bad_loss if scale.has_loss else None}
    values["multiplier"] = None if norm is None else checked.multiplier
    given = {key: value for key, value in values.items() if value is not None}
    numbers = dict(zip(given, checked.read(list(given.values())), strict=True))
    skip = numbers["skip"]
    if "scale" in numbers:
        scale.note_number(numbers["scale"])
    if "bad_loss" in numbers:
        scale.note_loss(numbers["bad_loss"] == 0.0)
    found_inf = numbers.get("found_inf")
    for each in checked.checks():
        each.note((skip if found_inf is None else found_inf) != 0.0)
    if checked.look is not None:
        checked.look.note(skip != 0.0)
    if norm is not None:
        checked = replace(checked, multiplier=numbers.get("multiplier"))
    return Decided(checked, skip, found_inf), numbers.get("norm")


# --- take -----------------------------------------------------------------------------------------


def multiply_(checked: Checked, coefficient: Scalar | None = None) -> Checked:
    """Unscale and clip in one in-place pass, 2 G; do nothing if neither is needed."""
    factor = coefficient
    if checked.multiplier is not None:
        factor = scalars.reciprocal(checked.multiplier)
        if coefficient is not None:
            factor = factor * coefficient
    if factor is None:
        return checked
    checked.gathered.gradients.multiply_(
        factor if coefficient is None else scalars.to_single(factor),
        was_just_read=checked.measured is not None,
    )
    return replace(checked, multiplier=None)


def _ready(decided: Decided, max_norm: float | None) -> Decided:
    """Return a decision that the host knows; unscale and clip gradients that will be used.

    Those of a skipped step get their values back, if they were unscaled for the check.
    """
    checked, norm = decided.checked, None
    gathered = checked.gathered
    if checked.measured is not None and max_norm is not None:
        norm = checked.measured.norm
    if isinstance(decided.skip, Tensor) or gathered.ranks is not ALONE:
        decided, norm = read(decided, norm)
        checked = decided.checked
    divided_by = gathered.multiplier if checked.multiplier is None else None
    if decided.skip != 0.0:
        if divided_by is not None:
            gathered.gradients.multiply_(divided_by)
            checked = replace(checked, multiplier=divided_by)
    elif divided_by is None:
        coefficient = None
        if norm is not None and max_norm is not None:
            coefficient = clip_coefficient(norm, max_norm)
        checked = multiply_(checked, coefficient)
    return replace(decided, checked=checked)


def _agreed(decided: Decided) -> Decided:
    """Make sure that the ranks can make a fused step; on the CPU the host reads the decision."""
    checked = decided.checked
    is_on_host = checked.gathered.loss_scale.device.type in scalars.READABLE
    if is_on_host and checked.gathered.ranks is not ALONE:
        return read(decided)[0]
    for agreement in checked.agreements():
        agreement.verify()
    return decided


def _step_fused(
    optimizer: torch.optim.Optimizer,
    make_step: Callable[[], Any],
    decided: Decided,
    coefficient: Scalar | None,
) -> Any:
    """Step with an optimizer that divides and skips by itself."""
    multiplier, scale = decided.checked.multiplier, None
    if not (multiplier is None and coefficient is None):
        divisor = divisor_of(1.0 if multiplier is None else multiplier, coefficient)
        scale = scalars.as_tensor(divisor, decided.checked.gathered.loss_scale.device)
    return step_with_scale(optimizer, make_step, scale, _skip_flag(decided))


def _skip_flag(decided: Decided) -> Tensor:
    """Return the skip flag as a tensor; that of the only check if nothing else decides."""
    checked, own = decided.checked, decided.checked.own
    device = checked.gathered.loss_scale.device
    if not checked.gathered.checks and own is not None and own.agreement is None:
        flag = own.found_here.get(device)
        if flag is not None and len(own.found_here) == 1:
            return flag
    return scalars.as_tensor(decided.skip, device)


# --- remember -------------------------------------------------------------------------------------


def keep(
    iteration: Iteration,
    checked: Checked,
    stage: Stage,
    left_scaled_by: tuple[Scalar, Scalar] | None = None,
    decided: Decided | None = None,
) -> None:
    """Record the checks and the stage of a call; without a check there is nothing to record."""
    gathered, checks = checked.gathered, checked.checks()
    if checked.own is not None:
        iteration.ledger.mark(gathered.gradients, checked.own, left_scaled_by)
    if checks and gathered.optimizer is not None:
        iteration.steps[id(gathered.optimizer)] = Remembered(
            gathered.optimizer,
            checks,
            stage,
            iteration.num_losses,
            checked.unclipped,
            skip=None if decided is None else decided.skip,
            ranks=gathered.ranks,
        )


def remember(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    decided: Decided,
    memory: Memory,
    *,
    is_fused: bool,
) -> None:
    """Record a decided step and its outcome. Sync: none."""
    checked, left_scaled_by = decided.checked, None
    gathered, multiplier = checked.gathered, checked.multiplier
    if checked.own is not None and multiplier is not None:
        left_scaled_by = decided.skip, multiplier
        if checked.unclipped is None:
            multiplier = scalars.where(decided.skip, multiplier, 1.0)
    if gathered.ranks is not ALONE:
        gathered.loss_scale.forget_later_losses()
    # Whether the unscaled gradients of a taken step still have their original values: small float16
    # gradients may become zero when the optimizer unscales them.
    can_measure_late = not is_fused or (
        writes_unscaled(optimizer) and torch.float16 not in gathered.gradients.dtypes
    )
    outcome = outcome_of(
        decided, optimizer, engine.names, multiplier, can_measure_late=can_measure_late
    )
    outcome.num_losses = engine.iteration.num_losses
    engine.journal.add(memory, outcome)
    keep(engine.iteration, checked, Stage.STEPPED, left_scaled_by, decided)
    if checked.look is not None:
        engine.iteration.looks.append(checked.look)
    if engine.buffers.watched:
        engine.buffers.restore(decided.skip)
    if not memory.early_clipping.is_over:
        memory.early_clipping.see(optimizer, _measured(checked))


def _measured(checked: Checked) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return unscaled norm, largest magnitude and scale, None if they were not measured."""
    checks, scale = checked.checks(), checked.gathered.loss_scale
    if len(checks) != 1 or checks[0].first is None:
        return None
    norm, amax = checks[0].first
    return scalars.as_float32(norm, scale.device), amax, scale.tensor


def remember_failure(iteration: Iteration, checked: Checked) -> None:
    """Record the state of the gradients after a step that raised."""
    if checked.multiplier is None:
        keep(iteration, checked, Stage.UNSCALED)
    elif checked.own is not None and not _is_untouched(checked):
        iteration.ledger.doubt(checked.gathered.gradients)


def _is_untouched(checked: Checked) -> bool:
    """Return whether the gradients provably have the values that were measured. Sync: some."""
    if checked.unclipped is None:
        return False
    now = norms_of(checked.gathered.gradients, checked.multiplier)
    # Via repr, since NaN != NaN.
    return repr(now.unscaled()) == repr(checked.unclipped.norms.unscaled())
