"""The changing part of a scale state as scalars on a device, with the transition done there.

The host never waits: :meth:`DeviceState.update_` is :func:`halfstep.scaling.state.next_state` in
the same float32 arithmetic, and tests compare the two bit for bit.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from halfstep._torch import update_scale_
from halfstep.scaling.state import LARGEST_SCALE, SMALLEST_SCALE, ScaleState


class DeviceState:
    """Scale (float32), growth tracker (int32) and floor (float32), each a scalar on one device.

    Args:
        state: The values to start from.
        device: Where they live.

    Sync: none, in all methods but :meth:`read`.
    """

    def __init__(self, state: ScaleState, device: torch.device) -> None:
        # The first loss may come in inference mode, the next one from training.
        with torch.inference_mode(False):
            self.scale = torch.full((), state.scale, dtype=torch.float32, device=device)
            self.growth_tracker = torch.full(
                (), state.growth_tracker, dtype=torch.int32, device=device
            )
            self.min_scale = torch.full((), state.min_scale, dtype=torch.float32, device=device)
            self.clamp_tracker_(state.growth_interval)

    @property
    def device(self) -> torch.device:
        """Where the scalars live."""
        return self.scale.device

    def clamp_tracker_(self, growth_interval: int) -> None:
        """Let a count that is already past a lowered interval grow the scale at the next step."""
        # update_scale_ tests for equality: a count that is past the interval would never get there.
        self.growth_tracker.clamp_(max=growth_interval - 1)

    def update_(self, found_inf: torch.Tensor, state: ScaleState) -> None:
        """Back off, count or grow.

        Args:
            found_inf: float32 scalar on this device, not 0 after an overflow.
            state: Gives the factors and the interval.
        """
        floor = torch.minimum(self.scale, self.min_scale)
        update_scale_(
            self.scale,
            self.growth_tracker,
            found_inf,
            state.growth_factor,
            state.backoff_factor,
            state.growth_interval,
        )
        torch.maximum(self.scale, floor, out=self.scale)

    def fill_(self, scale: float) -> None:
        """Set the scale to a number that has been checked, and the floor no higher."""
        self.scale.fill_(scale)
        self.min_scale.clamp_(max=self.scale)

    def copy_(self, new_scale: torch.Tensor) -> None:
        """Set the scale, and the floor no higher; keep the old one if the new one is unusable.

        Args:
            new_scale: Real tensor with one element, on any device.
        """
        new = moved(new_scale.detach().reshape(()).float(), self.device)
        usable = (new >= SMALLEST_SCALE) & (new <= LARGEST_SCALE)
        self.scale.copy_(torch.where(usable, new, self.scale))
        self.min_scale.clamp_(max=self.scale)

    def read(self, state: ScaleState) -> ScaleState:
        """Return ``state`` with the values from the device. Sync: one for each of the three."""
        return replace(
            state,
            scale=self.scale.item(),
            growth_tracker=int(self.growth_tracker.item()),
            min_scale=self.min_scale.item(),
        )


def moved(scalar: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a scalar on ``device``. Sync: none, except from another device to the CPU."""
    # A copy to the CPU that nobody waits for would be read before it has arrived.
    return scalar.to(device, non_blocking=device.type != "cpu")


def available_device(device: str | torch.device) -> str:
    """Return the name of a device that exists here.

    Raises:
        ValueError: There is no such device type, or PyTorch sees none of it on this machine.
    """
    try:
        device = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"GradScaler(device={device!r}): {error}") from error
    is_available = getattr(getattr(torch, device.type, None), "is_available", lambda: True)
    if not is_available():
        raise ValueError(
            f"GradScaler(device={str(device)!r}): PyTorch {torch.__version__} sees no "
            f"{device.type} device on this machine. Leave the device out, GradScaler(), and that "
            "of the first loss is taken; or pass enabled=False to train without scaling"
        )
    return str(device)


def default_device() -> torch.device:
    """Return the accelerator of this machine, the CPU if there is none."""
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
