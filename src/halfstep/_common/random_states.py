"""The states of all random number generators of a process."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class RandomStates:
    """The random numbers of PyTorch, Python, and NumPy if it is loaded, as they are now.

    Of these devices and the CPU. Sync: none; the states lie on the host.
    """

    def __init__(self, devices: Iterable[torch.device]) -> None:
        self._devices = {
            device: torch.get_device_module(device).get_rng_state(*_index(device))
            for device in devices
            if device.type not in ("cpu", "meta")
        }
        self._cpu, self._python = torch.get_rng_state(), random.getstate()
        numpy_random: Any = sys.modules.get("numpy.random")
        self._numpy = None if numpy_random is None else numpy_random.get_state()

    @property
    def tensors(self) -> list[Tensor]:
        """The states of PyTorch's generators."""
        return [self._cpu, *self._devices.values()]

    def restore(self) -> None:
        """Put all of them back."""
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, *_index(device))
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def accelerators() -> list[torch.device]:
    """Return the accelerators of this machine, none if nothing has used them yet."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(kind)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # of which there is one
