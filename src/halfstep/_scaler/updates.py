"""Updates of a scale: what an iteration has found, and how a device moves the scale by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from halfstep._gradients.scalars import round_to_float32
from halfstep._pytorch.amp import update_scale_
from halfstep._pytorch.devices import Transfer, can_move_scale, to_host
from halfstep._scaler.scale_state import MOST_UNKNOWN, ScaleState

LAG = MOST_UNKNOWN - 1
"""Number of updates after which the flags of an update are read. They have two whole iterations to
arrive, so the host hardly ever waits for them."""


States: TypeAlias = tuple[ScaleState, ScaleState]
"""Those before and after an update."""


class Found(NamedTuple):
    """What an iteration has found, on the host.

    Attributes:
        scale: The number that the losses were multiplied by.
        found_inf: Whether a gradient was inf or NaN.
        loss_is_finite: Whether all losses were finite.
        went_bad: Whether a gradient was finite when it was unscaled, and not at the step.
    """

    scale: float
    found_inf: bool
    loss_is_finite: bool = True
    went_bad: bool = False


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

    ``states_of`` returns the states before and after it, once the flags are known.

    Attributes:
        kernel: How the device has moved the scale, None if it did not move.
        is_stale: Whether the host has set the scale since: then the iteration only counts.
    """

    def __init__(
        self,
        states_of: Callable[[PendingUpdate], States],
        values: dict[str, Tensor],
        kernel: Kernel | None,
    ) -> None:
        self.kernel = kernel
        self.is_stale = False
        self._states_of = states_of
        self._names = list(values)
        self._transfer: Transfer | None = to_host(torch.stack(list(values.values())))
        self._found: Found
        self._states: States | None = None

    def look(self) -> None:
        """Take what the iteration has found, if it has arrived. Sync: none."""
        if self._transfer is not None and self._transfer.has_arrived():
            self.found()

    def found(self) -> Found:
        """Return what the iteration has found. Sync: one, unless it has arrived."""
        if self._transfer is not None:
            values = dict(zip(self._names, self._transfer.wait().tolist(), strict=True))
            self._transfer = None
            self._found = Found(
                values["scale"],
                values["found_inf"] != 0.0,
                values.get("bad_loss", 0.0) == 0.0,
                values.get("went_bad", 0.0) != 0.0,
            )
        return self._found

    def keep(self, before: ScaleState, after: ScaleState) -> None:
        """Keep the states before and after it, and let the scale go."""
        self._states = before, after
        del self._states_of

    def states(self) -> States:
        """Return the states before and after the update. Sync: as :meth:`found`."""
        return self._states_of(self) if self._states is None else self._states
