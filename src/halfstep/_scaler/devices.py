"""The devices of this machine, as a scaler is told them."""

from __future__ import annotations

import torch


def available_device(device: str | torch.device) -> str:
    """Return the name of a device that exists here.

    Raises:
        TypeError: It is something else.
        ValueError: There is no such device type, or PyTorch sees none of it on this machine.
    """
    if not isinstance(device, str | torch.device):
        raise TypeError(
            f"GradScaler(device={device!r}): the device comes first, such as 'cuda'; for the scale "
            f"write GradScaler(init_scale={device!r})"
        )
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
