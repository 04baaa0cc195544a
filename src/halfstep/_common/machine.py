"""The process among its ranks, and the machine: device names and random states."""

from __future__ import annotations

import os
import platform
import random
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from halfstep._pytorch import amp
from halfstep._pytorch.distributed import has_process_group


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the rank that a launcher such as torchrun set, else 0.

    Lightning sets none; then it is the rank in the process group, if there is one.
    """
    of_group = torch.distributed.get_rank() if has_process_group() else 0
    return _count(environ.get("RANK"), of_group)


def num_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes, determined as in :func:`rank`, else 1."""
    of_group = torch.distributed.get_world_size() if has_process_group() else 1
    return max(_count(environ.get("WORLD_SIZE"), of_group), 1)


def _count(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdecimal() else otherwise


def device_name(device: str) -> str:
    """Return the name of the GPU, or of the processor with the number of threads in use."""
    if device in ("cuda", "xpu"):
        return str(torch.get_device_module(device).get_device_name())
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_name() -> str:
    # Python knows the processor's name only on some systems; Linux has it in a file.
    cpuinfo = Path("/proc/cpuinfo")
    if os.name == "posix" and cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# --- random numbers -------------------------------------------------------------------------------


class RandomStates:
    """The current random states of PyTorch, of Python, and of NumPy if it is loaded.

    They include the given devices and the CPU. Sync: none; the states are on the host.
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
        torch.set_rng_state(self._cpu)
        for device, state in self._devices.items():
            torch.get_device_module(device).set_rng_state(state, *_index(device))
        random.setstate(self._python)
        if self._numpy is not None:
            sys.modules["numpy.random"].set_state(self._numpy)


def accelerators() -> list[torch.device]:
    """Return the accelerators of this machine; none if they have not been used yet."""
    kind = torch.accelerator.current_accelerator()
    if kind is None or not torch.accelerator.is_available():
        return []
    module = torch.get_device_module(kind)
    if hasattr(module, "is_initialized") and not module.is_initialized():
        return []
    return [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]


def has_device(device_type: str) -> bool:
    """Return whether this machine has a device of a type; a custom backend need not tell."""
    is_custom = device_type == amp.custom_backend_name()
    backend = getattr(torch, device_type, None)  # a custom one has none before it is registered
    return backend is not None and bool(getattr(backend, "is_available", lambda: is_custom)())


def _index(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "mps" else (device,)  # mps has only one device
