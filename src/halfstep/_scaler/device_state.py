"""The changing part of a scale state on a device, with the transition done there.

The host never waits: :meth:`DeviceState.update_` is
:func:`halfstep._scaler.host_state.next_state` in the same float32 arithmetic, and tests
compare the two bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler.checks import LARGEST_SCALE, SMALLEST_SCALE
from halfstep._scaler.rules import LogMax, Rule
from halfstep._scaler.scalars import moved, zero_if_finite
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.table import (
    SLOT,
    Table,
    decode,
    encode,
    logmax_candidates,
    on_device,
    rule_slots,
    scale_candidates,
    table,
    table_kind,
    views,
)


class DeviceState:
    """Everything in a scale state that changes, in one buffer on one device.

    The buffer and its parts keep their addresses for good, as CUDA graphs need it.

    Args:
        state: The values to start from.
        device: Where they live.

    Attributes:
        buffer: float32 tensor; :mod:`halfstep._scaler.table` says what is where.

    Sync: none, in all methods but :meth:`read`.
    """

    def __init__(self, state: ScaleState, device: torch.device) -> None:
        # The first loss may come in inference mode, the next one from training.
        with torch.inference_mode(False):
            self.buffer = on_device(encode(state), torch.int32, device).view(torch.float32)
            self._views = views(self.buffer)
            # Autograd keeps the scale for the backward pass of `loss * scale` and asks then whether
            # it was changed. By `data` it is not told of changes in other slots.
            self._scale = self._views["scale"].data
        self._rule: Rule | None = None
        self._table: Table
        self._follow(state.rule)

    @property
    def device(self) -> torch.device:
        """Where the buffer lives."""
        return self.buffer.device

    @property
    def scale(self) -> Tensor:
        """The scale, a float32 scalar; a copy of it while torch.compile traces."""
        return self.traced_scale() if torch.compiler.is_compiling() else self._scale

    def traced_scale(self) -> Tensor:
        """Return a copy of the scale while torch.compile traces."""
        # See HostState.traced_scale.
        return self._slots()["scale"].abs()

    @property
    def growth_tracker(self) -> Tensor:
        """The count of steps in a row, an int32 scalar."""
        return self._slots()["growth_tracker"]

    @property
    def bad_loss(self) -> Tensor:
        """float32 scalar: 0, or NaN once a loss in this iteration was not finite."""
        return self._slots()["bad_loss"]

    # --- an iteration -----------------------------------------------------------------------------

    def see_loss_(self, loss: Tensor) -> None:
        """Remember whether all entries of a loss are finite, until :meth:`update_`."""
        zero = zero_if_finite(loss)
        if zero is not None:
            self.bad_loss.add_(zero if zero.device == self.device else moved(zero, self.device))

    def update_(
        self,
        found_inf: Tensor,
        state: ScaleState,
        outlier: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> None:
        """Go on to the next iteration.

        Args:
            found_inf: float32 scalar on this device, 1 or more after an overflow, else 0.
            state: Gives the rule, and says whether there is a ``max_scale``.
            outlier: The same as ``found_inf`` for a norm too large to be believed; None for 0.
            amax: The largest magnitude of the unscaled gradients, for ``LogMax``; None for 0.
        """
        if state.rule is not self._rule:
            self.set_rule_(state.rule)
        slots = self._slots()
        torch.clamp(found_inf, max=1.0, out=slots["found_inf"])
        if outlier is not None:
            slots["outlier"].copy_(outlier)
        if state.rule.backoff_factor == 1.0:
            slots["bad_loss"].fill_(1.0)  # in both cases an overflow does not move the scale
        slots["bad_loss"].abs_()  # NaN has any sign, but as an integer it must be above 0
        if amax is not None:
            slots["amax"].copy_(amax)
        torch.add(slots["row"], self._table.steps, out=slots["next row"])
        scale_candidates(slots, state)
        if isinstance(state.rule, LogMax):
            logmax_candidates(slots, state.rule)
        self._table.choose_(slots)
        self._scale_changed()

    # --- the user ---------------------------------------------------------------------------------

    def set_rule_(self, rule: Rule) -> None:
        """Move by another rule from now on."""
        self._follow(rule)
        for name, value in rule_slots(rule).items():
            self._slots()[name].fill_(value)
        # update_scale_ tests for equality: a count that is past a lowered interval would never get
        # there. This one grows the scale at the next step.
        self.growth_tracker.clamp_(max=rule.growth_interval - 1)

    def fill_(self, scale: float) -> None:
        """Set the scale to a number that has been checked, as :meth:`ScaleState.with_scale`."""
        slots = self._slots()
        slots["scale"].fill_(scale)
        slots["min_scale"].clamp_(max=scale)
        slots["max_scale"].clamp_(min=scale)
        slots["run fields and bad_loss"].zero_()
        self._scale_changed()

    def copy_(self, new_scale: Tensor) -> None:
        """Set the scale as :meth:`fill_` does; keep everything if the new one is unusable."""
        new = moved(new_scale.detach().reshape(()).float(), self.device)
        usable = (new >= SMALLEST_SCALE) & (new <= LARGEST_SCALE)
        slots = self._slots()
        scale = slots["scale"].copy_(torch.where(usable, new, slots["scale"]))
        torch.minimum(slots["min_scale"], scale, out=slots["min_scale"])
        torch.maximum(slots["max_scale"], scale, out=slots["max_scale"])
        slots["run fields"].mul_(~usable)
        slots["bad_loss"].zero_()
        self._scale_changed()

    # --- reading and writing ----------------------------------------------------------------------

    def read(self, state: ScaleState) -> ScaleState:
        """Return ``state`` with the values from the device. Sync: one."""
        return DeviceSnapshot(self._slots()["state"]).read(state)

    def write_(self, state: ScaleState) -> None:
        """Take over a state, in place and in one copy."""
        self._follow(state.rule)
        self._slots()["bits"].copy_(on_device(encode(state), torch.int32, self.device))
        self._scale_changed()

    def counters(self) -> Tensor:
        """Return scale (its bits), growth tracker, steps taken and skipped, int32 ``[4]``."""
        slots = self._slots()
        counts = [slots["num_taken"], slots["num_skipped"]]
        return torch.cat([slots["scale, growth_tracker"], torch.stack(counts)])

    def snapshot(self) -> DeviceSnapshot:
        """Return a copy of the present values, to be read later."""
        return DeviceSnapshot(self._slots()["state"].clone())

    # --- inside -----------------------------------------------------------------------------------

    def _slots(self) -> dict[str, Tensor]:
        # torch.compile can follow changes through views that are made before its eyes.
        return views(self.buffer) if torch.compiler.is_compiling() else self._views

    def _follow(self, rule: Rule) -> None:
        before, self._rule = self._rule, rule
        # torch.compile can trace this as long as it is the same table.
        if before is None or table_kind(before) != table_kind(rule):
            self._table = table(*table_kind(rule), self.device)

    def _scale_changed(self) -> None:
        if not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(self._scale)


@dataclass(frozen=True, eq=False)
class DeviceSnapshot:
    """The values of a state as they once were on a device.

    Attributes:
        values: A copy of the first slots of a buffer, or of all of them, float32 or int32.
    """

    values: Tensor

    def on_cpu(self) -> DeviceSnapshot:
        """Return a copy on the CPU. Sync: one."""
        return DeviceSnapshot(self.values.cpu())

    @keep_out_of_graphs
    def read(self, state: ScaleState) -> ScaleState:
        """Return ``state``, which gives the rule, with these values. Sync: one."""
        return decode(self.values.view(torch.int32).tolist(), state)

    def skips(self) -> tuple[int, bool]:
        """Return how many steps in a row were skipped, and whether the scale is held. Sync: one."""
        bits = self.values.view(torch.int32).tolist()
        return bits[SLOT["skipped_in_a_row"]], bool(bits[SLOT["held"]])

    def read_with_loss(self, state: ScaleState) -> tuple[ScaleState, bool]:
        """Return what :meth:`read` does, and whether the loss was finite. Sync: one."""
        bits = self.values.view(torch.int32).tolist()
        return decode(bits, state), bits[SLOT["bad_loss"]] == 0


class HostCopy:
    """The newest copy of a small tensor that has arrived on the host.

    On the CPU that is the tensor itself. On an accelerator it is copied into pinned memory while
    the device works on, and is there some steps later. Sync: none.
    """

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._under_way: Tensor | None = None
        self._event: torch.Event | None = None

    def send(self, tensor: Tensor) -> None:
        """Start to copy; nothing happens while an earlier copy is still under way."""
        if tensor.device.type == "cpu":
            self._values = tensor
            return
        self._receive()
        if self._under_way is None and not _is_capturing(tensor.device):
            self._under_way = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._under_way.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device.type)
            self._event.record()

    def latest(self, *, wait: bool = False) -> Tensor | None:
        """Return the newest copy on the CPU, None if none has arrived yet.

        Args:
            wait: For the one that is under way. Sync: one.
        """
        if wait and self._event is not None:
            self._event.synchronize()
        self._receive()
        return self._values

    def _receive(self) -> None:
        if self._event is not None and self._event.query():
            self._values, self._under_way, self._event = self._under_way, None, None


def _is_capturing(device: torch.device) -> bool:
    # A copy into a graph would be made again in every replay, and an event could not be asked.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
