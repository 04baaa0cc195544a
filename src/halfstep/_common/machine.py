"""What the devices of this machine are called, and which of several processes this is."""

from __future__ import annotations

import os
import platform
from collections.abc import Mapping
from pathlib import Path

import torch

from halfstep._pytorch.distributed import has_process_group


def rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of this process that a launcher such as torchrun gave it, else 0.

    Lightning gives none; then it is that of the process group, if there is one.
    """
    of_group = torch.distributed.get_rank() if has_process_group() else 0
    return _count(environ.get("RANK"), of_group)


def num_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of processes, known as :func:`rank` is, else 1."""
    of_group = torch.distributed.get_world_size() if has_process_group() else 1
    return max(_count(environ.get("WORLD_SIZE"), of_group), 1)


def _count(text: str | None, otherwise: int) -> int:
    return int(text) if text is not None and text.isdecimal() else otherwise


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
