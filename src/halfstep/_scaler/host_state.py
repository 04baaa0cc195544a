"""The state of a gradient scaler on the host, and how it goes on after an iteration.

:func:`next_state` is the reference, in plain Python; :class:`HostState` moves by it on the CPU.
:meth:`halfstep._scaler.device_state.DeviceState.update_` does the same on a device without waiting
for it; the tests hold the two together bit for bit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep._scaler.checks import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    float32_bits,
    round_to_float32,
)
from halfstep._scaler.rules import LogMax, LogMaxStatistics, Rule
from halfstep._scaler.scalars import zero_if_finite
from halfstep._scaler.scale_state import NO_RUN, ScaleState

CPU = torch.device("cpu")


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
    if not found_inf or not loss_is_finite or state.rule.backoff_factor == 1.0:
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
        backed_off = round_to_float32(after.scale / (state.run_scale or state.scale))
        headroom = rule.next_headroom(state.headroom, backed_off, is_growing)
        after = changed(after, headroom=headroom)
        return after if is_probe else _following_amax(after, rule, amax)
    if not is_growing:
        return after
    grown = round_to_float32(state.scale * rule.growth_factor)
    return changed(after, scale=grown) if grown <= state.max_scale else after


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


class HostState:
    """The changing part of a scale state on the CPU, where numbers are read without waiting.

    It moves by :func:`next_state`; ``DeviceState`` is its counterpart on other devices.

    Attributes:
        now: The state.
        scale: Its scale, a float32 scalar. It keeps its memory for good.
        bad_loss: float32 scalar: 0, or NaN once a loss in this iteration was not finite.

    Sync: none, in all methods, except for values from other devices.
    """

    device = CPU

    def __init__(self, state: ScaleState) -> None:
        # The first loss may come in inference mode, the next one from training.
        with torch.inference_mode(False):
            self.scale = torch.zeros((), dtype=torch.float32, device=CPU)
            self.bad_loss = torch.zeros((), dtype=torch.float32, device=CPU)
        self.now: ScaleState
        self.write_(state)

    @property
    def loss_is_finite(self) -> bool:
        """Whether the losses of this iteration were finite."""
        return self.bad_loss.item() == 0.0

    @property
    def growth_tracker(self) -> Tensor:
        """The count of steps in a row, an int32 scalar; a copy."""
        return torch.tensor(self.now.growth_tracker, dtype=torch.int32, device=CPU)

    def traced_scale(self) -> Tensor:
        """Return a copy of the scale while torch.compile traces."""
        # Inductor of 2.13 drops a clone(), and the backward pass would then see a later scale. It
        # does not drop abs(), which is a copy too: no scale is negative.
        return self.scale.abs()

    def see_loss_(self, loss: Tensor) -> None:
        """Remember whether all entries of a loss are finite, until :meth:`update_`."""
        zero = zero_if_finite(loss)
        if zero is not None:
            self.bad_loss.add_(zero if zero.device == CPU else zero.to(CPU))

    def update_(self, found_inf: bool, outlier: bool = False, amax: float | None = None) -> None:
        """Go on to the next iteration, by :func:`next_state`."""
        loss_is_finite = self.loss_is_finite
        if not loss_is_finite:
            self.bad_loss.zero_()
        self.now = next_state(
            self.now,
            found_inf=found_inf,
            loss_is_finite=loss_is_finite,
            outlier=outlier,
            amax=amax,
        )
        # The same value is a change too: a backward pass of a loss from before is an error.
        self.scale.fill_(self.now.scale)

    def set_rule_(self, rule: Rule) -> None:
        """Move by another rule from now on."""
        self.now = _with_valid_tracker(changed(self.now, rule=rule))

    def fill_(self, scale: float) -> None:
        """Set the scale to a number that has been checked, as :meth:`ScaleState.with_scale`."""
        self.write_(self.now.with_scale(scale))

    def copy_(self, new_scale: Tensor) -> None:
        """Set the scale as :meth:`fill_` does; keep everything if the new one is unusable."""
        scale = new_scale.detach().reshape(()).float().item()
        if SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            self.fill_(scale)
        else:
            self.scale.fill_(self.now.scale)  # a change all the same, for losses from before
        self.bad_loss.zero_()

    def write_(self, state: ScaleState) -> None:
        """Take over a state."""
        self.now = _with_valid_tracker(state)
        self.scale.fill_(state.scale)
        self.bad_loss.zero_()

    def counters(self) -> Tensor:
        """Return scale (its bits), growth tracker, steps taken and skipped, int32 ``[4]``."""
        now = self.now
        counts = [float32_bits(now.scale), now.growth_tracker, now.num_taken, now.num_skipped]
        return torch.tensor(counts, dtype=torch.int32, device=CPU)


def _with_valid_tracker(state: ScaleState) -> ScaleState:
    """Let a count that is already past a lowered interval grow the scale at the next step."""
    last = state.rule.growth_interval - 1
    return changed(state, growth_tracker=last) if state.growth_tracker > last else state
