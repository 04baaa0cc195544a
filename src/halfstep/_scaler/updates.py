"""Updates that a device makes: how it moves a scale by itself, and how the state follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._gradients.scalars import round_to_float32
from halfstep._pytorch.amp import update_scale_
from halfstep._pytorch.devices import Transfer, can_move_scale, to_host
from halfstep._scaler.scale_state import MOST_UNKNOWN, ScaleState, changed, next_state

LAG = MOST_UNKNOWN - 1
"""Number of updates after which the flags of an update are read. They have two whole iterations to
arrive, so the host hardly ever waits for them."""


class Number(NamedTuple):
    """The scale and the growth tracker on a device, as the host knows them."""

    scale: float
    growth_tracker: int


@dataclass(frozen=True)
class Kernel:
    """The move of a scale on a device: PyTorch's kernel, and a floor.

    It is torch.amp's schedule. What it does not know, the host corrects once the flags have
    arrived: hysteresis, trials, ``max_scale``.
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
        """Return the move that fits a state best; None if its schedule never moves the scale.

        ``is_captured``: whether the move is part of a CUDA graph, and has to fit all states.
        """
        schedule = state.schedule
        if schedule.growth_factor == schedule.backoff_factor == 1.0:
            return None
        may_grow = round_to_float32(state.scale * schedule.growth_factor) <= state.max_scale
        is_forgiven = state.hysteresis_left > 1 and not (state.is_trial or is_captured)
        growth_factor = schedule.growth_factor if may_grow else 1.0
        backoff_factor = 1.0 if is_forgiven else schedule.backoff_factor
        if not can_move_scale(device):  # the ops in the kernel's place multiply in float32
            growth_factor = round_to_float32(growth_factor)
            backoff_factor = round_to_float32(backoff_factor)
        # A state may be some updates old, in each of which the scale may have backed off.
        lowest = state.scale * schedule.backoff_factor**MOST_UNKNOWN
        return cls(
            growth_factor,
            backoff_factor,
            schedule.growth_interval,
            state.min_scale,
            has_floor=is_captured or lowest < state.min_scale,
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
    """An update whose flags are on their way to the host.

    Attributes:
        kernel: How the device has moved the scale, None if it did not move.
        is_stale: Whether the host has set the scale since: then the iteration only counts.
    """

    def __init__(
        self,
        after: Callable[[PendingUpdate], tuple[ScaleState, ScaleState, Number]],
        values: dict[str, Tensor],
        kernel: Kernel | None,
    ) -> None:
        self.kernel = kernel
        self.is_stale = False
        self._after = after
        self._names = list(values)
        self._transfer: Transfer | None = to_host(torch.stack(list(values.values())))
        self._found: tuple[float, dict[str, bool]]
        self._states: tuple[ScaleState, ScaleState] | None = None

    def look(self) -> None:
        """Take what the iteration has found, if it has arrived. Sync: none."""
        if self._transfer is not None and self._transfer.has_arrived():
            self.found()

    def found(self) -> tuple[float, dict[str, bool]]:
        """Return the scale of the losses, and what :func:`next_state` takes.

        Sync: one, unless it has arrived.
        """
        if self._transfer is not None:
            values = dict(zip(self._names, self._transfer.wait().tolist(), strict=True))
            self._transfer = None
            flags = {key: values.get(key, 0.0) != 0.0 for key in ("found_inf", "went_bad")}
            flags["loss_is_finite"] = values.get("bad_loss", 0.0) == 0.0
            self._found = values["scale"], flags
        return self._found

    def keep(self, before: ScaleState, after: ScaleState) -> None:
        """Keep the states before and after it, and let the scale go."""
        self._states = before, after
        del self._after

    def states(self) -> tuple[ScaleState, ScaleState]:
        """Return the states before and after the update. Sync: as :meth:`found`."""
        return self._after(self)[:2] if self._states is None else self._states


def followed(
    state: ScaleState, number: Number, update: PendingUpdate
) -> tuple[ScaleState, ScaleState, Number]:
    """Return the states before and after an update on the device, and the number that it left."""
    scale, flags = update.found()
    if update.is_stale:
        is_skipped = flags["found_inf"] or flags["went_bad"]
        after = changed(
            state,
            num_taken=state.num_taken + (not is_skipped),
            num_skipped=state.num_skipped + is_skipped,
            skipped_in_a_row=state.skipped_in_a_row + 1 if is_skipped else 0,
        )
        return state, after, number
    if scale != number.scale:  # existing code has written it in place
        state, number = state.with_scale(scale), number._replace(scale=scale)
    after = next_state(state, **flags)
    if update.kernel is None:
        return state, after, number._replace(growth_tracker=after.growth_tracker)
    return state, after, update.kernel.moved(number, flags["found_inf"])
