"""The live state of a scale, and its transition after an iteration.

:func:`next_state` is the reference, in plain Python; :class:`HostState` uses it on the CPU.
:class:`DeviceState` does the same on other devices, in the same float32 arithmetic and without a
sync; the tests require equality bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.transfers import Transfer, to_host
from halfstep._scaler.rules import Rule
from halfstep._scaler.scalars import (
    LARGEST_SCALE,
    SMALLEST_SCALE,
    float32_bits,
    moved,
    round_to_float32,
    zero_if_finite,
)
from halfstep._scaler.scale_state import NO_RUN, ScaleState
from halfstep._scaler.table import (
    SLOT,
    Table,
    decode,
    encode,
    kind_of,
    on_device,
    rule_slots,
    scale_candidates,
    table,
    views,
)

CPU = torch.device("cpu")


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
    return _after_overflow(changed(state, may_restore=state.may_restore and not loss_is_finite))


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
        may_restore=not is_growing,
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


# --- on the host ----------------------------------------------------------------------------------


class HostState:
    """The mutable part of a scale state on the CPU, where values are read without waiting.

    ``scale`` is a float32 scalar whose memory never moves. Sync: none, except for values from other
    devices.
    """

    device = CPU

    def __init__(self, state: ScaleState) -> None:
        # The first loss may come in inference mode, and the next one from training.
        with torch.inference_mode(False):
            self.scale = torch.zeros((), dtype=torch.float32, device=CPU)
            # 0, or NaN after a non-finite loss in this iteration.
            self.bad_loss = torch.zeros((), dtype=torch.float32, device=CPU)
        self._growth_tracker: Tensor | None = None  # once existing code has asked for it
        self.has_count = False
        self.now: ScaleState
        self.write_(state)

    @property
    def loss_is_finite(self) -> bool:
        """Whether all losses of this iteration were finite."""
        return self.bad_loss.item() == 0.0

    @property
    def growth_tracker(self) -> Tensor:
        """The count of consecutive steps, an int32 scalar."""
        if self._growth_tracker is None:
            with torch.inference_mode(False):
                count = self.now.growth_tracker
                self._growth_tracker = torch.tensor(count, dtype=torch.int32, device=CPU)
            self.has_count = True
        return self._growth_tracker

    def follow_writes_(self) -> None:
        """Take over what existing code has written into the two tensors in place."""
        scale = self.scale.item()
        if scale != self.now.scale:
            self.now = self.now.with_scale(scale)
        if self._growth_tracker is not None:
            self.now = changed(self.now, growth_tracker=int(self._growth_tracker.item()))

    def _show_count(self) -> None:
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(self.now.growth_tracker)

    def traced_scale(self) -> Tensor:
        """Return a copy of the scale for torch.compile."""
        # Inductor of 2.13 removes a clone(), and the backward pass would then see a later scale. It
        # keeps abs(), which also copies: the scale is positive.
        return self.scale.abs()

    def see_loss_(self, loss: Tensor) -> None:
        """Record whether all entries of a loss are finite, until :meth:`update_`."""
        zero = zero_if_finite(loss)
        if zero is not None:
            self.bad_loss.add_(zero if zero.device == CPU else zero.to(CPU))

    def update_(self, found_inf: bool, outlier: bool = False) -> None:
        """Move to the next iteration, with :func:`next_state`."""
        loss_is_finite = self.loss_is_finite
        if not loss_is_finite:
            self.bad_loss.zero_()
        self.now = next_state(
            self.now,
            found_inf=found_inf,
            loss_is_finite=loss_is_finite,
            outlier=outlier,
        )
        # Written even if unchanged: backward of a loss from before must raise.
        self.scale.fill_(self.now.scale)
        if self._growth_tracker is not None:
            self._show_count()

    def set_rule_(self, rule: Rule) -> None:
        """Use another rule from now on."""
        self.now = _with_valid_tracker(changed(self.now, rule=rule))
        self._show_count()

    def fill_(self, scale: float) -> None:
        """Set the scale to a validated number, like :meth:`ScaleState.with_scale`."""
        self.write_(self.now.with_scale(scale))

    def copy_(self, new_scale: Tensor) -> None:
        """Set the scale like :meth:`fill_`; keep everything if the new one is unusable."""
        scale = new_scale.detach().reshape(()).float().item()
        if SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            self.fill_(scale)
        else:
            self.scale.fill_(self.now.scale)  # bumps the version, for losses from before
        self.bad_loss.zero_()

    def write_(self, state: ScaleState) -> None:
        """Load a state."""
        self.now = _with_valid_tracker(state)
        self.scale.fill_(state.scale)
        self.bad_loss.zero_()
        self._show_count()

    def counters(self) -> Tensor:
        """Return scale (its bits), growth tracker, steps taken and skipped, int32 ``[4]``."""
        now = self.now
        counts = [float32_bits(now.scale), now.growth_tracker, now.num_taken, now.num_skipped]
        return torch.tensor(counts, dtype=torch.int32, device=CPU)


def _with_valid_tracker(state: ScaleState) -> ScaleState:
    """Clamp a count that exceeds a lowered interval, so that the next step grows the scale."""
    last = state.rule.growth_interval - 1
    return changed(state, growth_tracker=last) if state.growth_tracker > last else state


# --- on a device ----------------------------------------------------------------------------------


class DeviceState:
    """The mutable part of a scale state, in one float32 buffer on one device.

    :mod:`halfstep._scaler.table` defines the layout. The buffer and its parts never move, as CUDA
    graphs require. The methods are those of :class:`HostState`. Sync: none, except :meth:`read`.
    """

    def __init__(self, state: ScaleState, device: torch.device) -> None:
        # The first loss may come in inference mode, and the next one from training.
        with torch.inference_mode(False):
            self.buffer = on_device(encode(state), torch.int32, device).view(torch.float32)
            self._views = views(self.buffer)
            # Autograd saves the scale for the backward pass of `loss * scale` and then checks its
            # version. Through `data` the version ignores writes to other slots.
            self._scale = self._views["scale"].data
        self._rule: Rule | None = None
        self._table: Table
        self._follow(state.rule)

    @property
    def device(self) -> torch.device:
        return self.buffer.device

    @property
    def scale(self) -> Tensor:
        """The scale, a float32 scalar; a copy while torch.compile traces."""
        return self.traced_scale() if torch.compiler.is_compiling() else self._scale

    def traced_scale(self) -> Tensor:
        return self._slots()["scale"].abs()

    @property
    def growth_tracker(self) -> Tensor:
        return self._slots()["growth_tracker"]

    @property
    def bad_loss(self) -> Tensor:
        return self._slots()["bad_loss"]

    def see_loss_(self, loss: Tensor) -> None:
        zero = zero_if_finite(loss)
        if zero is not None:
            self.bad_loss.add_(zero if zero.device == self.device else moved(zero, self.device))

    def update_(
        self,
        found_inf: Tensor,
        state: ScaleState,
        outlier: Tensor | None = None,
    ) -> None:
        """Move to the next iteration, from float32 scalars on this device; see :func:`next_state`.

        ``state`` supplies the rule, and whether there is a ``max_scale``.
        """
        if state.rule is not self._rule:
            self.set_rule_(state.rule)
        slots = self._slots()
        torch.clamp(found_inf, max=1.0, out=slots["found_inf"])
        if outlier is not None:
            slots["outlier"].copy_(outlier)
        torch.add(slots["row"], self._table.steps, out=slots["next row"])
        scale_candidates(slots, state)
        self._table.choose_(slots)
        self._scale_changed()

    def set_rule_(self, rule: Rule) -> None:
        self._follow(rule)
        for name, value in rule_slots(rule).items():
            self._slots()[name].fill_(value)
        # update_scale_ tests for equality: a count beyond a lowered interval would never match.
        # Clamped, it grows the scale at the next step.
        self.growth_tracker.clamp_(max=rule.growth_interval - 1)

    def fill_(self, scale: float) -> None:
        slots = self._slots()
        slots["scale"].fill_(scale)
        slots["min_scale"].clamp_(max=scale)
        slots["max_scale"].clamp_(min=scale)
        slots["run fields and bad_loss"].zero_()
        self._scale_changed()

    def copy_(self, new_scale: Tensor) -> None:
        new = moved(new_scale.detach().reshape(()).float(), self.device)
        usable = (new >= SMALLEST_SCALE) & (new <= LARGEST_SCALE)
        slots = self._slots()
        scale = slots["scale"].copy_(torch.where(usable, new, slots["scale"]))
        torch.minimum(slots["min_scale"], scale, out=slots["min_scale"])
        torch.maximum(slots["max_scale"], scale, out=slots["max_scale"])
        slots["run fields"].mul_(~usable)
        slots["bad_loss"].zero_()
        self._scale_changed()

    def read(self, state: ScaleState) -> ScaleState:
        """Return ``state`` with the device's values. Sync: one."""
        return DeviceSnapshot(self._slots()["state"]).read(state)

    def write_(self, state: ScaleState) -> None:
        self._follow(state.rule)
        self._slots()["bits"].copy_(on_device(encode(state), torch.int32, self.device))
        self._scale_changed()

    def counters(self) -> Tensor:
        slots = self._slots()
        counts = [slots["num_taken"], slots["num_skipped"]]
        return torch.cat([slots["scale, growth_tracker"], torch.stack(counts)])

    def snapshot(self) -> DeviceSnapshot:
        """Return a copy of the current values, to be read later."""
        return DeviceSnapshot(self._slots()["state"].clone())

    def _slots(self) -> dict[str, Tensor]:
        # torch.compile only tracks writes through views that it sees being created.
        return views(self.buffer) if torch.compiler.is_compiling() else self._views

    def _follow(self, rule: Rule) -> None:
        before, self._rule = self._rule, rule
        # torch.compile can trace this while the table stays the same.
        if before is None or kind_of(before) != kind_of(rule):
            self._table = table(kind_of(rule), self.device)

    def _scale_changed(self) -> None:
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(self._scale)


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """A copy of the values of a device state at one point in time."""

    values: Tensor
    """A copy of the first slots of a buffer, or of all, float32 or int32."""

    def on_cpu(self) -> DeviceSnapshot:
        return DeviceSnapshot(self.values.cpu())

    @keep_out_of_graphs
    def read(self, state: ScaleState) -> ScaleState:
        """Return ``state``, which supplies the rule, with these values. Sync: one."""
        return decode(self.values.view(torch.int32).tolist(), state)

    def skips(self) -> tuple[int, bool]:
        """Return the number of consecutive skips, and whether the scale is held. Sync: one."""
        bits = self.values.view(torch.int32).tolist()
        return bits[SLOT["skipped_in_a_row"]], bool(bits[SLOT["held"]])

    def read_with_loss(self, state: ScaleState) -> tuple[ScaleState, bool]:
        """Return the result of :meth:`read`, and whether the loss was finite. Sync: one."""
        bits = self.values.view(torch.int32).tolist()
        return decode(bits, state), bits[SLOT["bad_loss"]] == 0


class HostCopy:
    """The newest copy of a small tensor that has arrived on the host.

    A CPU tensor is used directly. An accelerator's is copied asynchronously and arrives some steps
    later. Sync: none, except as in :func:`~halfstep._pytorch.transfers.to_host`.
    """

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._under_way: Transfer | None = None

    def send(self, tensor: Tensor) -> None:
        """Start a copy; do nothing while an earlier one is still in flight."""
        if tensor.device.type == "cpu":
            self._values = tensor
            return
        self._receive()
        if self._under_way is None and not _is_capturing(tensor.device):
            self._under_way = to_host(tensor)

    def latest(self, *, wait: bool = False) -> Tensor | None:
        """Return the newest copy on the CPU, None if none has arrived; ``wait``: one sync."""
        if wait and self._under_way is not None:
            self._under_way.wait()
        self._receive()
        return self._values

    def _receive(self) -> None:
        if self._under_way is not None and self._under_way.has_arrived():
            self._values, self._under_way = self._under_way.values, None


def _is_capturing(device: torch.device) -> bool:
    # In a graph, the copy would be repeated at every replay, and the event could not be queried.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
