"""What all parts of the simulated device know: its name, its profile, and what is counted."""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tests.simulated.profiles import PROFILES, Profile, Refusal

NAME = "sim"
NUM_DEVICES = 2
CPU = torch.device("cpu")
CPU_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)

ops: collections.Counter[str] = collections.Counter()
"""Dispatched ops, views among them, by name without overload."""

waits: collections.Counter[str] = collections.Counter()
"""Waits of the host for the device, by what it waited for."""


class Now:
    """What can change while the device exists.

    Attributes:
        profile: What the devices lack.
        index: The current device.
    """

    profile: Profile = PROFILES["all"]
    index = 0


def indexed(device: Any) -> torch.device:
    device = torch.device(device)
    index = Now.index if device.index is None else device.index
    if not 0 <= index < NUM_DEVICES:
        raise RuntimeError(f"{NAME}: invalid device ordinal {index}")
    return torch.device(NAME, index)


@contextlib.contextmanager
def below() -> Iterator[None]:
    """Run what is below dispatch: modes and autocast see the op, not how the device does it."""
    with (
        torch._C.DisableTorchFunction(),
        torch._C._DisableTorchDispatch(),
        torch._C._DisableAutocast(),
    ):
        yield


def refuse(refusal: Refusal | None, dtype: torch.dtype | None) -> None:
    if refusal is not None and dtype in refusal.dtypes:
        raise lacking(refusal.error(refusal.text))


def lacking(error: Exception) -> Exception:
    """Mark an error as one of a profile's, not one of wrong use."""
    error.is_lack = True  # type: ignore[attr-defined]
    return error
