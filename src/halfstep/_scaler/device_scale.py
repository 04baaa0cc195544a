"""The scale of losses on an accelerator, where reading a number is waiting for it.

In a plain step, which reads its flag before the optimizer steps, the host knows the flags: the
state moves there, and the number on the device is written if it changes. In a fused step the device
knows them: PyTorch's kernel and a floor move the number, and the state follows ``LAG`` updates
later, when the flags have arrived. The delay is fixed, so that runs are reproducible and all ranks
agree.
"""

from __future__ import annotations

import math
from collections import deque
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._gradients.scalars import (
    Scalar,
    any_of,
    as_tensor,
    float32_from_bits,
    round_to_float32,
)
from halfstep._pytorch.amp import increment_version, update_scale_
from halfstep._pytorch.devices import can_move_scale, is_capturing, to_host
from halfstep._scaler.loss_scale import LossScale, Snapshot
from halfstep._scaler.scale_state import MOST_UNKNOWN, ScaleState, changed, next_state, tallied

LAG = MOST_UNKNOWN - 1
"""Number of updates after which the flags of an update are read. They have two whole iterations to
arrive, so the host hardly ever waits for them."""


class Number(NamedTuple):
    """The scale and the growth tracker on a device, as the host knows them."""

    scale: float
    growth_tracker: int


class Kernel(NamedTuple):
    """The move of a scale on a device: PyTorch's kernel, and a floor.

    It is torch.amp's schedule. What it does not know, the host corrects once the flags have
    arrived: trials, ``max_scale``.
    """

    growth_factor: float
    backoff_factor: float
    growth_interval: int
    min_scale: float
    has_floor: bool

    @classmethod
    def of(
        cls, state: ScaleState, device: torch.device, *, is_captured: bool = False
    ) -> Kernel | None:
        """Return the move that fits a state best, or in a CUDA graph all; None if there is none."""
        schedule = state.schedule
        if schedule.growth_factor == schedule.backoff_factor == 1.0:
            return None
        may_grow = round_to_float32(state.scale * schedule.growth_factor) <= state.max_scale
        growth_factor = schedule.growth_factor if may_grow else 1.0
        backoff_factor = schedule.backoff_factor
        if not can_move_scale(device):  # the ops in the kernel's place multiply in float32
            growth_factor = round_to_float32(growth_factor)
            backoff_factor = round_to_float32(backoff_factor)
        return cls(
            growth_factor,
            backoff_factor,
            schedule.growth_interval,
            state.min_scale,
            has_floor=is_captured or state.lowest < state.min_scale,
        )

    def move_(self, scale: Tensor, growth_tracker: Tensor, found_inf: Tensor) -> None:
        """Move the scale. One op, or two near the floor. Sync: none."""
        update_scale_(
            scale,
            growth_tracker,
            found_inf,
            self.growth_factor,
            self.backoff_factor,
            self.growth_interval,
        )
        if self.has_floor:
            scale.clamp_(min=self.min_scale)

    def moved(self, number: Number, found_inf: bool) -> Number:
        """Return what :meth:`move_` leaves."""
        scale, count = number.scale, number.growth_tracker + 1
        if found_inf:
            scale, count = round_to_float32(scale * self.backoff_factor), 0
        elif count == self.growth_interval:
            grown = round_to_float32(scale * self.growth_factor)
            scale, count = grown if grown < torch.inf else scale, 0
        return Number(max(scale, self.min_scale) if self.has_floor else scale, count)


class PendingUpdate:
    """An update whose flags are on their way to the host."""

    # The states before and after it, once the state of the scale has followed.
    known: tuple[ScaleState, ScaleState] | None = None
    is_stale = False  # whether the host has set the scale since: then the iteration only counts

    def __init__(
        self, scale: DeviceScale, values: dict[str, Tensor], kernel: Kernel | None
    ) -> None:
        self.kernel = kernel  # how the device has moved the scale, None if it did not move
        self._scale, self._names = scale, list(values)
        self._transfer = to_host(torch.stack(list(values.values())))

    def look(self) -> None:
        """Take what the iteration has found, if it has arrived. Sync: none."""
        if "found" not in vars(self) and self._transfer.has_arrived():
            _ = self.found

    @cached_property
    def found(self) -> tuple[float, dict[str, bool]]:
        """The scale of the losses, and what :func:`next_state` takes. Sync: one at most."""
        values = dict(zip(self._names, self._transfer.wait().tolist(), strict=True))
        del self._transfer  # pinned memory, and outcomes keep this update
        flags = {key: values.get(key, 0.0) != 0.0 for key in ("found_inf", "went_bad")}
        flags["loss_is_finite"] = values.get("bad_loss", 0.0) == 0.0
        return values["scale"], flags

    def after(self) -> ScaleState:
        return self._states()[1]

    def during(self) -> tuple[ScaleState, bool]:
        return self._states()[0], self.found[1]["loss_is_finite"]

    def _states(self) -> tuple[ScaleState, ScaleState]:
        return self.known or self._scale.after(self)[:2]

    def follow(self, state: ScaleState, number: Number) -> tuple[ScaleState, ScaleState, Number]:
        """Return the states before and after it, and the number that it left on the device."""
        scale, flags = self.found
        if self.is_stale:
            is_skipped = flags["found_inf"] or flags["went_bad"]
            return state, tallied(state, is_skipped=is_skipped), number
        if scale != number.scale:  # existing code has written it in place
            state, number = state.with_scale(scale), number._replace(scale=scale)
        after = next_state(state, **flags)
        if self.kernel is None:
            return state, after, number._replace(growth_tracker=after.growth_tracker)
        return state, after, self.kernel.moved(number, flags["found_inf"])


class DeviceScale(LossScale):
    """A scale that the device moves by itself while the host waits for nothing.

    What existing code writes into the tensors is found by their versions.
    """

    is_here = False

    def __init__(self, before: LossScale, device: torch.device) -> None:
        super().__init__(before.first)
        self.state = before.state
        self.create(device)
        self._number = Number(self.state.scale, self.state.growth_tracker)  # as the host knows it
        self._versions = self._versions_now()  # when the numbers were known last
        self._is_captured = False  # whether a CUDA graph moves it, which the host does not see
        self._under_way: deque[PendingUpdate] = deque()

    # --- reading ----------------------------------------------------------------------------------

    @property
    def can_amplify(self) -> bool:
        """Whether unscaling may multiply by more than 1; it may at a scale that was written."""
        return super().can_amplify or self._is_written()

    def number(self) -> Scalar:
        """Return the scale as a tensor. Sync: none."""
        return self.tensor.clone()  # update() changes it in place

    def known(self) -> Scalar:
        """Return the scale as a number if the host knows it, else as a tensor. Sync: none."""
        is_known = not (self._under_way or self._is_written())
        return self._number.scale if is_known else self.number()

    def read(self) -> ScaleState:
        """Return the whole state. Sync: one."""
        if not self._under_way:
            self._note_number(self.tensor.item())
            self._follow_writes()
            return self.state
        _, state, number = self.after(self._under_way[-1])
        scale = self.tensor.item()
        return state if scale == number.scale else state.with_scale(scale)

    def snapshot(self) -> Snapshot:
        """Return the current state, to be read later. Sync: none."""
        return self._under_way[-1] if self._under_way else super().snapshot()

    @property
    def growth_tracker(self) -> Tensor:
        """The count of consecutive steps, an int32 scalar on the device."""
        if self._growth_tracker is None:
            self._number = self._number._replace(growth_tracker=self.state.growth_tracker)
        return super().growth_tracker

    def calm(self, *, is_fused: bool = False) -> Snapshot | None:
        """Return a snapshot if a step is a usual one, else None; see ``LossScale.calm``."""
        if self._is_written():
            return None
        if is_fused:
            return None if self.state.can_amplify else self.snapshot()
        return None if self._under_way else super().calm()

    def count(self) -> Snapshot | None:
        """Count a taken step, if it does nothing else, and return a snapshot. Sync: none."""
        after = super().count()
        if after is not None:
            self._versions = self._versions_now()
        return after

    def read_with(
        self, values: dict[str, Tensor], vectors: list[Tensor]
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Read the scale and the flag of the losses too. Sync: one."""
        values = values | {"scale": self.tensor} | ({"bad": self.bad_loss} if self.has_loss else {})
        tensors, rows = list(values.values()), []
        if not vectors:
            read = torch.stack(tensors).tolist()
        else:
            numbers = torch.stack([as_tensor(value, self.device) for value in tensors])
            bits = torch.cat([*vectors, numbers.view(torch.int32)]).tolist()
            for vector in vectors:
                rows.append(bits[: len(vector)])
                del bits[: len(vector)]
            read = [float32_from_bits(number) for number in bits]
        found: dict[str, float] = dict(zip(values, read, strict=True))
        self._note_number(found.pop("scale"))
        if self.has_loss:
            self._loss_is_finite = found.pop("bad") == 0.0
        return found, rows

    # --- what is under way ------------------------------------------------------------------------

    def after(self, update: PendingUpdate) -> tuple[ScaleState, ScaleState, Number]:
        """Return the states before and after an update under way, and its number. Sync: one."""
        found = self.state, self.state, self._number
        for each in self._under_way:
            found = each.follow(found[1], found[2])
            if each is update:
                break
        return found

    def follow_device(self, most_left: int = 0) -> None:
        """Let the state follow the updates that are under way, but for the newest ones."""
        if len(self._under_way) <= most_left:
            return
        state, number = self.state, self._number
        skipped_before = state.skipped_in_a_row
        while len(self._under_way) > most_left:
            update = self._under_way.popleft()
            before, state, number = update.follow(state, number)
            update.known = before, state
        self.is_quiet = skipped_before == state.skipped_in_a_row == 0
        is_other = number.scale != state.scale
        if self._under_way and not is_other:  # the device counts on
            state = changed(state, growth_tracker=number.growth_tracker)
        self.state, self._number = state, number
        if is_other:
            self._show()

    # --- what existing code, or a CUDA graph, has written -----------------------------------------

    def _is_written(self) -> bool:
        return self._is_captured or self._versions != self._versions_now()

    def _versions_now(self) -> tuple[int, int]:
        tracker = self._growth_tracker
        return self.tensor._version, 0 if tracker is None else tracker._version  # 0: a new one

    def _note_number(self, scale: float) -> None:
        if not self._under_way and scale != self._number.scale:
            self.state = self.state.with_scale(scale)
            self._number = self._number._replace(scale=scale)

    def _follow_writes(self) -> None:
        """Take over what was written in place. Sync: two if there may be any."""
        if self._is_written():
            self._note_number(self.tensor.item())
            self._follow_tracker()
            self._versions = self._versions_now()

    def _follow_tracker(self) -> None:
        if self._growth_tracker is not None and not self._under_way and self._is_written():
            count = int(self._growth_tracker.item())
            if count != self._number.growth_tracker:
                self.state = changed(self.state, growth_tracker=count)
                self._number = self._number._replace(growth_tracker=count)

    # --- moving -----------------------------------------------------------------------------------

    def update(self, found_inf: bool | list[Tensor], went_bad: bool | list[Tensor] = False) -> None:
        """Move the state if the host knows the flags, else the number on the device. Sync: none."""
        if isinstance(found_inf, bool):
            super().update(found_inf, went_bad)
            return
        self.forget_later_losses()
        values = {"scale": self.tensor, "found_inf": any_of(found_inf, self.device)}
        if self.has_loss:
            values["bad_loss"] = self.bad_loss
        if isinstance(went_bad, list) and went_bad:
            values["went_bad"] = any_of(went_bad, self.device)
        self._is_captured |= is_capturing(self.device)
        kernel = Kernel.of(self.state, self.device, is_captured=self._is_captured)
        if not self._is_captured:
            self._under_way.append(PendingUpdate(self, values, kernel))
        if kernel is None:
            increment_version((self.tensor,))
        else:
            kernel.move_(self.tensor, self.growth_tracker, values["found_inf"])
        self._versions = self._versions_now()
        for update in self._under_way:
            update.look()
        self.follow_device(most_left=LAG)
        self.forget_losses()

    def load(self, state: ScaleState) -> None:
        """Load a state, in place on the device. Sync: one if updates are under way."""
        self.follow_device()
        super().load(state)

    def _follow(self) -> None:
        self.follow_device()
        self._follow_writes()

    def _take(self, state: ScaleState) -> None:
        if self._under_way or self._is_written():
            self._number = Number(math.nan, -1)  # not known
        super()._take(state)

    def _show(self) -> None:
        state, number = self.state, self._number
        if number.scale != state.scale:
            self.tensor.fill_(state.scale)
            for update in self._under_way:
                update.is_stale = True
        else:  # backward of a loss from before must raise
            increment_version((self.tensor,))
        if self._growth_tracker is not None and number.growth_tracker != state.growth_tracker:
            self._growth_tracker.fill_(state.growth_tracker)
        self._number = Number(state.scale, state.growth_tracker)
        self._versions = self._versions_now()
