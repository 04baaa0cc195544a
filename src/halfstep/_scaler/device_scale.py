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

import torch
from torch import Tensor

from halfstep._gradients.scalars import Scalar, any_of, as_tensor, float32_from_bits
from halfstep._pytorch.amp import increment_version
from halfstep._pytorch.devices import is_capturing
from halfstep._scaler.loss_scale import LossScale, Snapshot
from halfstep._scaler.scale_state import ScaleState, changed
from halfstep._scaler.updates import LAG, Kernel, Number, PendingUpdate, followed


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
        may = super().can_amplify
        return may if may or torch.compiler.is_compiling() else self._is_written()

    def number(self) -> Scalar:
        """Return the scale as a tensor. Sync: none."""
        return self.tensor.clone()  # update() changes it in place

    def read(self) -> ScaleState:
        """Return the whole state. Sync: one."""
        if not self._under_way:
            self._note_number(self.tensor.item())
            self._follow_writes()
            return self.state
        _, state, number = self._after(self._under_way[-1])
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
        self, values: dict[str, Scalar], vectors: list[Tensor]
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Read the scale and the flag of the losses too. Sync: one."""
        values = values | {"scale": self.tensor} | ({"bad": self.bad_loss} if self.has_loss else {})
        device, rows = self.device, []
        tensors = [v if isinstance(v, Tensor) else as_tensor(v, device) for v in values.values()]
        if not vectors:
            read = torch.stack(tensors).tolist()
        else:
            numbers = torch.stack([as_tensor(value, device) for value in tensors])
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

    def _after(self, update: PendingUpdate) -> tuple[ScaleState, ScaleState, Number]:
        """Return the states before and after an update under way, and its number. Sync: one."""
        found = self.state, self.state, self._number
        for each in self._under_way:
            found = followed(found[1], found[2], each)
            if each is update:
                break
        return found

    def follow_device(self, most_left: int = 0) -> None:
        """Let the state follow the updates that are under way, but for the newest ones."""
        skipped_before = self.state.skipped_in_a_row
        if len(self._under_way) <= most_left:
            return
        while len(self._under_way) > most_left:
            update = self._under_way.popleft()
            before, self.state, self._number = followed(self.state, self._number, update)
            update.keep(before, self.state)
        self.is_quiet = skipped_before == self.state.skipped_in_a_row == 0
        if self._number.scale != self.state.scale:
            self._show()
        elif self._under_way:  # the device counts on
            self.state = changed(self.state, growth_tracker=self._number.growth_tracker)

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
        """Move as the state does if the host knows the flags; else let the device move the scale.

        Sync: none.
        """
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
            self._under_way.append(PendingUpdate(self._after, values, kernel))
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
