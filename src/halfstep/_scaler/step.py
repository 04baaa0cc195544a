"""One step of one optimizer: gather, check, agree, decide, take, remember.

G is one read or one write of all gradients. The cost before the optimizer's own work:

===================  =======================  ===========================================
optimizer            neither clip nor norm    clip, or the norm is wanted
===================  =======================  ===========================================
plain                check and divide, 2 G    measure, 1 G; divide and clip at once, 2 G
handles the scale    measure, 1 G             measure, 1 G
===================  =======================  ===========================================

In the lower left cell, gradients are only checked where measuring is slower than a check. The first
steps of an optimizer are always measured, to detect gradients that are clipped before they are
unscaled, unless the scale is 1. So are steps whose scale may be below 1, because a skipped step
could not undo its division.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from operator import attrgetter, is_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep._gradients import scalars
from halfstep._gradients.gradients import NONE, collect, parameters, refuse_float16
from halfstep._gradients.norms import (
    Norms,
    clip_coefficient,
    largest,
    norms_of,
    overflows_when_divided,
)
from halfstep._gradients.optimizers import name, step_with_scale, writes_unscaled
from halfstep._gradients.scalars import Scalar
from halfstep._pytorch.distributed import has_process_group
from halfstep._scaler.agreement import ALONE, Alone, Together
from halfstep._scaler.earlier_norms import NormLimit
from halfstep._scaler.engine import Engine
from halfstep._scaler.iteration import Iteration, Stage, Step, nothing_checked
from halfstep._scaler.journal import Memory
from halfstep._scaler.ledger import GradientCheck, Ledger
from halfstep._scaler.outcome import Outcome
from halfstep.errors import CallOrderError, HalfstepWarning, RanksError


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
    earlier = engine.iteration.step_of(optimizer)
    if earlier is not None:
        require_not_stepped(earlier)
    step = gather(engine, "step", optimizer, earlier)
    memory = engine.journal.memories.get(id(optimizer)) or engine.journal.memory(optimizer)
    # Looked up on the instance: accelerate replaces `step` there to detect whether it was called.
    make_step = partial(optimizer.step, *args, **kwargs)
    try:
        if not is_fused and torch.float16 in step.gradients.dtypes:
            refuse_half(engine, step)
        norm_limit = engine.norm_limits.of(optimizer) if engine.norm_limits.settings else None
        take_it = _take_fused if is_fused else _take_plain
        result = take_it(step, make_step, max_norm, norm_limit)
    except BaseException as error:
        if step.ranks.is_together and isinstance(error, RanksError | CallOrderError):
            engine.end_iteration()  # raised on all ranks, which can continue
        else:
            remember_failure(engine.iteration, step)
        if memory.outcome is None:
            engine.journal.memories.pop(id(optimizer), None)
        raise
    remember(engine, optimizer, step, memory, is_fused=is_fused)
    return result


def unscale(engine: Engine, optimizer: torch.optim.Optimizer) -> None:
    """Divide the gradients of an optimizer by the scale; see ``GradScaler.unscale_``."""
    earlier = engine.iteration.step_of(optimizer)
    require_scaled(optimizer, earlier)
    step = gather(engine, "unscale_", optimizer, earlier)
    refuse_half(engine, step)
    if step.is_first and step.multiplier is not None:
        measure(step)
        multiply_(step)
        step.norms = step.squares = None
    else:
        unscale_(step)
    keep(engine.iteration, step, Stage.UNSCALED)


def require_scaled(optimizer: torch.optim.Optimizer, earlier: Step | None) -> None:
    """Raise CallOrderError if ``unscale_`` comes too late for an optimizer."""
    if earlier is not None and earlier.stage is not Stage.SCALED:
        raise CallOrderError(
            f"unscale_({name(optimizer)}): {earlier.stage.value} since the last update(). Call "
            "unscale_() at most once an iteration, after the last backward() and before step(); "
            "call update() at the end of the iteration"
        )


def require_not_stepped(earlier: Step) -> None:
    """Raise CallOrderError if the optimizer has stepped since the last ``update``."""
    if earlier.stage is Stage.STEPPED:
        raise CallOrderError(
            f"step({name(earlier.optimizer)}): {earlier.stage.value} since the last update(). Call "
            "update() once at the end of each iteration, after step() of every optimizer"
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
    optimizer: torch.optim.Optimizer | None,
    earlier: Step | None,
    params: list[Tensor] | None = None,
    owner: object = None,
) -> Step:
    """Collect gradients and the number they are multiplied by. Sync: none.

    The gradients are those of ``params``, by default of the optimizer; ``earlier`` is the step of
    its last call. Error messages name ``call`` and ``owner``, by default the optimizer. If some of
    the gradients have been unscaled with another optimizer, the others are unscaled now.
    """
    iteration = engine.iteration
    if params is None:
        assert optimizer is not None
        params = parameters(optimizer)
    owner = optimizer if owner is None else owner
    if engine.unused.waiting:
        engine.unused.use(params)
    ranks = engine.ranks_of(call, owner, params) if has_process_group() else ALONE
    is_scaled = earlier is None or earlier.stage is Stage.SCALED
    must_have_one = call == "step" and is_scaled and not ranks.is_together
    if must_have_one and all(map(_is_none, map(_grad, params))):  # map() makes no Python calls
        raise nothing_checked(optimizer)
    loss_scale = earlier.checks[0].scale if earlier is not None and earlier.checks else None
    if loss_scale is None:
        loss_scale = engine.scale_of_iteration(call, owner)
    if iteration.blocks:
        # For example a wrapper accumulates and the wrapped optimizer steps, or all parameters are
        # clipped.
        for blocks in iteration.blocks_with(params):
            blocks.put_together(iteration, ranks)
    gradients = collect(params)
    require_known(iteration.ledger, call, gradients.params)
    if earlier is not None and not is_scaled:
        step = Step(optimizer, loss_scale, gradients, None, earlier.checks, ranks)
        step.norms, step.squares = earlier.norms, earlier.squares
        if iteration.num_losses > earlier.num_losses:
            _require_no_new(engine, step, params, f"{call}({name(owner)})")
        return step
    step = Step(optimizer, loss_scale, gradients, loss_scale.number(), ranks=ranks)
    # With a scale of 1, as that of a guard, clipping is never too early.
    if optimizer is not None and loss_scale.state.scale != 1.0:
        memory = engine.journal.memories.get(id(optimizer))
        step.is_first = memory is None or memory.early_clipping.is_measuring
    return (
        _unscaled_apart(engine, step, params)
        if iteration.ledger.entries or ranks.is_together
        else step
    )


_grad = attrgetter("grad")
_is_none = partial(is_, None)


def _require_no_new(engine: Engine, step: Step, params: list[Tensor], call: str) -> None:
    """Raise if a backward pass has added scaled gradients to those that were unscaled."""
    new, later = engine.iteration.ledger.split(step.gradients, _asked(step.ranks, params))
    if new.grads:
        problem = (
            f"{call}: backward() of a scaled loss came after its gradients were unscaled, and "
            f"{len(new.grads)} of {len(step.gradients.grads)} are new and "
            "still scaled. Call unscale_() or clip_grad_norm_() after the last backward(); "
            "give this iteration up with zero_grad() and update(new_scale=scaler.get_scale())"
        )
        if not engine.owner()._steps_like_torch:
            raise CallOrderError(problem)
        warnings.warn(problem, HalfstepWarning, stacklevel=5)
    # The new gradients may have been checked with another optimizer or a list of parameters.
    for entry in later:
        entry.unscale_what_was_left()
    checks = (entry.check for entry in later)
    step.checks = [*step.checks, *(check for check in checks if check not in step.checks)]


def _unscaled_apart(engine: Engine, step: Step, params: list[Tensor]) -> Step:
    """Return a step of the gradients still scaled; if others are unscaled, of all, unscaled."""
    ledger, gradients = engine.iteration.ledger, step.gradients
    step.asked = _asked(step.ranks, params)
    step.gradients, entries = ledger.split(gradients, step.asked)
    step.checks = checks = [entry.check for entry in entries]
    if not checks:
        return step
    refuse_half(engine, step)
    for entry in entries:
        entry.unscale_what_was_left()
    unscale_(step)
    if step.own_check is not None:
        ledger.mark(step.checked, step.own_check)
        checks = [*checks, step.own_check]
    return Step(step.optimizer, step.loss_scale, gradients, None, checks, step.ranks)


def _asked(ranks: Alone | Together, params: list[Tensor]) -> frozenset[int]:
    """Return the ids of all parameters; empty if this rank decides alone."""
    return frozenset(map(id, params)) if ranks.is_together else frozenset()


def refuse_half(engine: Engine, step: Step) -> None:
    """Raise if float16 gradients would have to be unscaled in place."""
    if step.multiplier is not None and torch.float16 in step.gradients.dtypes:
        owner = "the list of parameters" if step.optimizer is None else name(step.optimizer)
        refuse_float16(
            step.gradients, owner, engine.names.of(step.gradients.params, step.optimizer)
        )


# --- check, agree ---------------------------------------------------------------------------------


def unscale_(step: Step) -> None:
    """Divide the gradients by the scale in place and check for inf and NaN. 2 G. Sync: none."""
    loss_scale, multiplier = step.loss_scale, step.multiplier
    if multiplier is None or not (step.gradients.grads or step.ranks.is_together):
        return
    found_inf = step.gradients.unscale_(multiplier, can_amplify=loss_scale.can_amplify)
    add_check(step, found_inf)
    step.multiplier = None


def check(step: Step) -> None:
    """Check scaled gradients, and measure them too if that is no slower.

    1 G, or 2 G for small gradients. Sync: none.
    """
    if step.multiplier is None or not step.has_gradients:
        return
    if not step.gradients.is_measured_fast():
        _add_check_of_scaled(step, list(step.gradients.check().values()))
    elif step.ranks.is_together:
        # The total norm would take another collective.
        step.norms = norms_of(step.gradients, step.multiplier)
        norm = step.norms.total(step.loss_scale.device)
        _add_check_of_scaled(step, [scalars.flag_nonfinite(norm, step.loss_scale.device)])
    else:
        measure(step)


class Measured(NamedTuple):
    """What one read of gradients says.

    Attributes:
        norms: The norm of each gradient.
        squares: The sum of all squares, over all ranks.
        found_inf: 1 if it is inf or NaN, else 0, on the device of the scale.
    """

    norms: Norms
    squares: Scalar
    found_inf: Tensor

    @property
    def norm(self) -> Scalar:
        """The total norm, unscaled."""
        return self.norms.unscaled_root(self.squares)


def measure(step: Step) -> Measured | None:
    """Measure the norms; check scaled gradients too.

    None if there are no gradients. 1 G. Sync: none.
    """
    if not step.has_gradients:
        return None
    device = step.loss_scale.device
    norms = norms_of(step.gradients, step.multiplier)
    if not step.ranks.is_together:
        squares = scalars.scalar(norms.sum_of_squares(device))
        found = scalars.flag_nonfinite(squares, device)
        if step.multiplier is not None:
            _add_check_of_scaled(step, [found])
    else:
        finish = step.ranks.start_norm(norms, step.gradients, device)
        if step.multiplier is not None:
            # The flags of the other ranks are reduced at the same time as their norms.
            here = scalars.flag_nonfinite(norms.total(device), device)
            _add_check_of_scaled(step, [here], norms)
        squares = finish()
        found = scalars.flag_nonfinite(squares, device)
    if step.multiplier is None:
        # The user may have changed the gradients since they were unscaled, and this check is free.
        step.own_check, step.checked = GradientCheck(step.loss_scale, {device: found}), NONE
    measured = Measured(norms, squares, found)
    if step.squares is None:
        step.norms, step.squares = norms, squares
    if step.is_first and step.own_check is not None and step.multiplier is not None:
        amax = largest(step.gradients, step.multiplier, device)
        step.own_check.first = measured.norm, amax
    return measured


def _add_check_of_scaled(step: Step, found: list[Tensor], norms: Norms | None = None) -> None:
    """Add the check of gradients that remain scaled."""
    assert step.multiplier is not None
    if step.loss_scale.can_amplify:
        found += overflows_when_divided(step.gradients, step.multiplier)
    device = step.loss_scale.device
    found_inf = {device: scalars.any_of(found, device)} if found else {}
    add_check(step, found_inf, norms)


def add_check(
    step: Step,
    found_inf: dict[torch.device, Tensor],
    norms: Norms | None = None,
) -> None:
    """Add the check, and share it with the other ranks if several decide."""
    own = GradientCheck(step.loss_scale, found_inf, asked=step.asked)
    step.own_check, step.checked = own, step.gradients
    if step.ranks is not ALONE:
        has_gradients = len(step.gradients.grads) + len(step.checks) > 0
        own.agreement = step.ranks.agree_on(own, step.gradients, norms, has_gradients=has_gradients)


# --- decide, take ---------------------------------------------------------------------------------


def measure_and_limit(step: Step, max_norm: float | None, norm_limit: NormLimit | None) -> None:
    """Measure norms; compute the clip coefficient and the outlier flag. 1 G. Sync: none."""
    measured = measure(step)
    if measured is not None:
        limit(step, measured, max_norm, norm_limit)


def limit(
    step: Step, measured: Measured, max_norm: float | None, norm_limit: NormLimit | None = None
) -> None:
    """Compute the clip coefficient and whether the norm is an outlier. Sync: none."""
    if max_norm is not None:
        step.coefficient = clip_coefficient(measured.norm, max_norm, measured.found_inf)
    if norm_limit is not None:
        assert step.norm is not None
        exceeded = norm_limit.is_exceeded(scalars.as_float32(step.norm, step.loss_scale.device))
        step.outlier = scalars.scalar(exceeded)


def multiply_(step: Step) -> None:
    """Unscale and clip in one in-place pass, 2 G; do nothing if neither is needed."""
    factor = step.factor()
    if factor is not None:
        step.gradients.multiply_(factor)
        step.multiplier = None


def _take_plain(
    step: Step,
    make_step: Callable[[], Any],
    max_norm: float | None,
    norm_limit: NormLimit | None,
) -> Any:
    undo = measured = None
    if _is_measured(step, max_norm, norm_limit):
        measured = measure(step)
        if measured is not None:
            limit(step, measured, None, norm_limit)
    elif step.multiplier is not None and step.loss_scale.can_amplify:
        # Dividing by a scale below 1 may overflow, and a skipped step must leave the gradients
        # unchanged.
        check(step)
    else:
        undo = step.multiplier
        unscale_(step)
    skip, norm = step.decide(), None
    if measured is not None and max_norm is not None:
        norm = measured.norm
    if isinstance(skip, Tensor) or step.ranks is not ALONE:
        skip, norm = read_skip(step, norm)
    if skip != 0.0:
        if undo is not None:
            step.gradients.multiply_(undo)
            step.multiplier = undo
        return None
    if undo is None:
        if norm is not None and max_norm is not None:
            step.coefficient = clip_coefficient(norm, max_norm)
        multiply_(step)
    return make_step()


def _is_measured(step: Step, max_norm: float | None, norm_limit: NormLimit | None) -> bool:
    is_searched = step.is_first and step.multiplier is not None
    return is_searched or max_norm is not None or norm_limit is not None


def _take_fused(
    step: Step,
    make_step: Callable[[], Any],
    max_norm: float | None,
    norm_limit: NormLimit | None,
) -> Any:
    is_on_host = step.loss_scale.device.type in scalars.READABLE
    if _is_measured(step, max_norm, norm_limit):
        measure_and_limit(step, max_norm, norm_limit)
    else:
        check(step)
    step.decide()
    if is_on_host and step.ranks is not ALONE:
        read_skip(step)
    else:
        for agreement in step.agreements():
            agreement.verify()
    divisor, device = step.divisor(), step.loss_scale.device
    assert step.optimizer is not None
    return step_with_scale(
        step.optimizer,
        make_step,
        None if divisor is None else scalars.as_tensor(divisor, device),
        _skip_flag(step, device),
    )


def _skip_flag(step: Step, device: torch.device) -> Tensor:
    """Return the skip flag as a tensor; that of the only check if nothing else decides."""
    own = step.own_check
    if own is not None and own.agreement is None and step.outlier is None and not step.checks:
        flag = own.found_here.get(device)
        if flag is not None and len(own.found_here) == 1:
            return flag
    assert step.skip is not None
    return scalars.as_tensor(step.skip, device)


def read_skip(step: Step, norm: Scalar | None = None) -> tuple[float, float | None]:
    """Return 1 if the step must be skipped, else 0, and ``norm`` as a number.

    What else the host needs for the step is read at the same time. Sync: the one of a plain step.
    """
    assert step.found_inf is not None
    scale = step.loss_scale
    values = {"found_inf": step.found_inf, "outlier": step.outlier, "norm": norm}
    if scale.device.type not in scalars.READABLE:
        values |= {"scale": scale.tensor, "bad_loss": scale.bad_loss if scale.has_loss else None}
    values["multiplier"] = None if norm is None else step.multiplier
    given = {key: value for key, value in values.items() if value is not None}
    read = dict(zip(given, step.read(list(given.values())), strict=True))
    found_inf, outlier = read["found_inf"], read.get("outlier")
    step.found_inf, step.outlier = found_inf, outlier
    step.skip = skip = max(found_inf, outlier or 0.0)
    if "scale" in read:
        scale.note_number(read["scale"])
    if "bad_loss" in read:
        scale.note_loss(read["bad_loss"] == 0.0)
    if norm is not None:
        step.multiplier = read.get("multiplier")
    for check in step.all_checks():
        check.note(found_inf != 0.0)
    return skip, read.get("norm")


# --- remember -------------------------------------------------------------------------------------


def keep(
    iteration: Iteration, step: Step, stage: Stage, left: tuple[Scalar, Scalar] | None = None
) -> None:
    """Record the checks and the stage of a step; without a check there is nothing to record."""
    own = step.own_check
    if own is not None:
        iteration.ledger.mark(step.checked, own, left)
        step.checks = [*step.checks, own]
    if step.checks and step.optimizer is not None:
        step.stage, step.num_losses = stage, iteration.num_losses
        step.gradients = NONE  # frees references to the user's gradients
        iteration.steps[id(step.optimizer)] = step


def remember(
    engine: Engine,
    optimizer: torch.optim.Optimizer,
    step: Step,
    memory: Memory,
    *,
    is_fused: bool,
) -> None:
    """Record a decided step and its outcome. Sync: none."""
    multiplier, skip = step.multiplier, step.skip
    assert skip is not None
    left = None
    if step.own_check is not None and multiplier is not None:
        left = skip, multiplier
        if step.norms is None:
            multiplier = scalars.where(skip, multiplier, 1.0)
    if step.ranks is not ALONE:
        step.loss_scale.forget_later_losses()
    # Whether the unscaled gradients of a taken step still have their original values: small float16
    # gradients may become zero when the optimizer unscales them.
    can_measure_late = not is_fused or (
        writes_unscaled(optimizer) and torch.float16 not in step.gradients.dtypes
    )
    outcome = Outcome(optimizer, engine.names, step, multiplier, can_measure_late)
    outcome.num_losses = engine.iteration.num_losses
    engine.journal.add(memory, outcome)
    keep(engine.iteration, step, Stage.STEPPED, left)
    if engine.buffers.watched:
        engine.buffers.restore(skip)
    if not memory.early_clipping.is_over:
        memory.early_clipping.see(optimizer, _measured(step))


def _measured(step: Step) -> tuple[Tensor, Tensor, Tensor] | None:
    """Return unscaled norm, largest magnitude and scale, None if they were not measured."""
    if len(step.checks) != 1 or step.checks[0].first is None:
        return None
    norm, amax = step.checks[0].first
    return scalars.as_float32(norm, step.loss_scale.device), amax, step.loss_scale.tensor


def remember_failure(iteration: Iteration, step: Step) -> None:
    """Record the state of the gradients after a step that raised."""
    if step.multiplier is None:
        keep(iteration, step, Stage.UNSCALED)
    elif step.own_check is not None and not _is_untouched(step):
        iteration.ledger.doubt(step.gradients)


def _is_untouched(step: Step) -> bool:
    """Return whether the gradients provably have the values that were measured. Sync: some."""
    if step.norms is None:
        return False
    now = norms_of(step.gradients, step.multiplier)
    return repr(now.unscaled()) == repr(step.norms.unscaled())  # via repr, since NaN != NaN
