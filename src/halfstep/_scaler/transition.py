"""How the state of a gradient scaler goes on after an iteration: the reference, in plain Python.

:meth:`halfstep._scaler.device_state.DeviceState.update_` does the same on a device without
waiting for it; the tests hold the two together bit for bit.
"""

from __future__ import annotations

from typing import Any

from halfstep._scaler.checks import round_to_float32
from halfstep._scaler.rules import LogMax, LogMaxStatistics
from halfstep._scaler.scale_state import NO_RUN, ScaleState


def next_state(
    state: ScaleState,
    *,
    found_inf: bool,
    loss_is_finite: bool = True,
    outlier: bool = False,
    amax: float | None = None,
) -> ScaleState:
    """Return the state after one iteration.

    Args:
        state: The state during the iteration.
        found_inf: Whether any gradient of any optimizer was inf or NaN: the step was skipped.
        loss_is_finite: Whether the loss was finite, before it was scaled. If it was not, no scale
            would have helped, and an overflow does not move it.
        outlier: Whether the step was skipped because the norm of the gradients was too large to be
            believed. That does not move the scale either.
        amax: The largest magnitude of the unscaled gradients, which ``LogMax`` wants to know.

    Example:
        >>> from halfstep._scaler.rules import Dynamic
        >>> state = ScaleState.first(4.0, Dynamic(growth_interval=1))
        >>> next_state(state, found_inf=False).scale, next_state(state, found_inf=True).scale
        (8.0, 2.0)
    """
    if not (found_inf or outlier):
        return _after_step(state, amax or 0.0)
    state = changed(
        state,
        growth_tracker=0,
        num_skipped=state.num_skipped + 1,
        skipped_in_a_row=state.skipped_in_a_row + 1,
    )
    if not found_inf or not loss_is_finite or state.backoff_factor == 1.0:
        return state
    return _after_overflow(changed(state, run_scale=state.run_scale or state.scale))


def _after_overflow(state: ScaleState) -> ScaleState:
    rule = state.rule
    probes = rule.probe_after is not None
    if state.scale == state.min_scale:
        if not probes:
            return state
        return changed(state, held=True, scale=state.run_scale, resume_scale=0.0, overflows=0)
    if state.hysteresis_left > 1:
        return changed(state, hysteresis_left=state.hysteresis_left - 1)
    overflows = state.overflows + 1
    lower = max(round_to_float32(state.scale * rule.backoff_factor), state.min_scale)
    if rule.probe_after is not None and overflows >= rule.probe_after:
        return changed(state, scale=state.min_scale, resume_scale=lower, overflows=0)
    is_waiting = state.held and probes
    return changed(state, scale=state.scale if is_waiting else lower, overflows=overflows)


def _after_step(state: ScaleState, amax: float) -> ScaleState:
    rule = state.rule
    is_probe = state.resume_scale != 0.0
    is_growing = not is_probe and state.growth_tracker + 1 >= rule.growth_interval
    after = changed(
        state,
        **NO_RUN,
        num_taken=state.num_taken + 1,
        skipped_in_a_row=0,
        growth_tracker=0 if is_probe or is_growing else state.growth_tracker + 1,
        hysteresis_left=rule.hysteresis
        if is_growing or rule.refill == "step"
        else state.hysteresis_left,
        # A probe was taken: a smaller scale helps. Go on from where backing off had come to.
        scale=state.resume_scale or state.scale,
    )
    if isinstance(rule, LogMax):
        after = _with_headroom(after, rule, state, is_growing=is_growing)
        return after if is_probe else _following_amax(after, rule, amax)
    if not is_growing:
        return after
    grown = round_to_float32(state.scale * rule.growth_factor)
    return changed(after, scale=grown) if grown <= state.max_scale else after


def _with_headroom(
    after: ScaleState, rule: LogMax, before: ScaleState, *, is_growing: bool
) -> ScaleState:
    backed_off = round_to_float32(after.scale / (before.run_scale or before.scale))
    return changed(after, headroom=rule.next_headroom(before.headroom, backed_off, is_growing))


def _following_amax(state: ScaleState, rule: LogMax, amax: float) -> ScaleState:
    statistics = LogMaxStatistics(state.log2_mean, state.log2_var, state.log2_weight)
    mean, var, weight = statistics = rule.observe(statistics, amax)
    if weight == 0.0:
        return state
    scale = min(max(rule.scale(state.headroom, statistics), state.min_scale), state.max_scale)
    return changed(state, scale=scale, log2_mean=mean, log2_var=var, log2_weight=weight)


def changed(state: ScaleState, **values: Any) -> ScaleState:
    """Return a state with other values, unchecked: a transition of a valid state is valid."""
    after = object.__new__(ScaleState)
    vars(after).update(vars(state), **values)
    return after
