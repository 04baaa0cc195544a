"""The transition of a scale state after an iteration, in plain Python numbers.

A device makes the part of it that PyTorch's kernel knows; see :mod:`halfstep._scaler.loss_scale`.
"""

from __future__ import annotations

from typing import Any

from halfstep._gradients.scalars import round_to_float32
from halfstep._scaler.scale_state import NO_RUN, ScaleState


def next_state(
    state: ScaleState,
    *,
    found_inf: bool,
    loss_is_finite: bool = True,
    outlier: bool = False,
) -> ScaleState:
    """Return the state after one iteration.

    Args:
        state: The state during the iteration.
        found_inf: Whether any gradient of any optimizer was inf or NaN, so that the step was
            skipped.
        loss_is_finite: Whether the loss was finite before it was scaled. If not, the scale may not
            be to blame, and it is restored for a trial after the next step.
        outlier: Whether the step was skipped because the norm of the gradients was implausibly
            large. That does not change the scale.

    Example:
        >>> from halfstep._scaler.rules import Dynamic
        >>> state = ScaleState.first(4.0, Dynamic(growth_interval=1))
        >>> next_state(state, found_inf=False).scale, next_state(state, found_inf=True).scale
        (8.0, 2.0)
    """
    if not (found_inf or outlier):
        return _after_step(state)
    state = changed(
        state,
        growth_tracker=0,
        num_skipped=state.num_skipped + 1,
        skipped_in_a_row=state.skipped_in_a_row + 1,
    )
    if not found_inf or state.rule.backoff_factor == 1.0:
        return state
    is_blameless = not loss_is_finite and state.rule.probe_after is not None
    return _after_overflow(changed(state, may_restore=state.may_restore and is_blameless))


def _after_overflow(state: ScaleState) -> ScaleState:
    rule = state.rule
    probes = rule.probe_after is not None
    if state.is_trial:  # It failed: a smaller scale is needed.
        return changed(state, scale=state.resume_scale, resume_scale=0.0)
    if state.scale > state.min_scale and state.hysteresis_left > 1:
        return changed(state, hysteresis_left=state.hysteresis_left - 1)
    state = changed(state, run_scale=state.run_scale or state.scale)
    if state.scale == state.min_scale:
        if not probes:
            return state
        return changed(state, held=True, scale=state.run_scale, resume_scale=0.0, overflows=0)
    overflows = state.overflows + 1
    lower = max(round_to_float32(state.scale * rule.backoff_factor), state.min_scale)
    if rule.probe_after is not None and overflows >= rule.probe_after:
        return changed(state, scale=state.min_scale, resume_scale=lower, overflows=0)
    is_waiting = state.held and probes
    return changed(state, scale=state.scale if is_waiting else lower, overflows=overflows)


def _after_step(state: ScaleState) -> ScaleState:
    rule = state.rule
    is_test = state.resume_scale != 0.0
    is_restored = state.may_restore and state.has_backed_off
    ends_interval = state.growth_tracker + 1 >= rule.growth_interval
    is_growing = ends_interval and not (is_test or is_restored)
    after = changed(
        state,
        **NO_RUN,
        num_taken=state.num_taken + 1,
        skipped_in_a_row=0,
        hysteresis_left=rule.hysteresis
        if is_growing or rule.refill == "step"
        else state.hysteresis_left,
        # A probe was taken: a smaller scale helps. Continue from the backed-off scale.
        scale=state.resume_scale if state.is_probe else state.scale,
    )
    if is_restored:
        return changed(
            after, scale=state.run_scale, run_scale=state.run_scale, resume_scale=after.scale
        )
    keeps_run_scale = state.may_restore and not (state.held or is_test or is_growing)
    after = changed(
        after,
        growth_tracker=0 if is_test or is_growing else state.growth_tracker + 1,
        may_restore=not is_growing and rule.probe_after is not None,
        run_scale=state.run_scale if keeps_run_scale else 0.0,
    )
    if not is_growing:
        return after
    grown = round_to_float32(state.scale * rule.growth_factor)
    return changed(after, scale=grown) if grown <= state.max_scale else after


def changed(state: ScaleState, **values: Any) -> ScaleState:
    """Return a state with other values; not validated, since a transition preserves validity."""
    after = object.__new__(ScaleState)
    vars(after).update(vars(state), **values)
    return after
