"""What the devices of this machine are called."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import torch


def device_name(device: str) -> str:
    """Return the name of the GPU, or that of the processor and the number of threads in use."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    threads = torch.get_num_threads()
    return f"{_cpu_name()}, {threads} thread{'s' if threads > 1 else ''}"


def _cpu_name() -> str:
    """Python knows the processor's name on some systems only; Linux has it in a file."""
    cpuinfo = Path("/proc/cpuinfo")
    if os.name == "posix" and cpuinfo.exists():
        for line in cpuinfo.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()
