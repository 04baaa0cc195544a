"""A CPU that lacks what other devices lack."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from halfstep._pytorch import devices


def lacking(monkeypatch: pytest.MonkeyPatch, **answers: Any) -> None:
    """Let the table answer otherwise about the CPU."""
    monkeypatch.setitem(devices.FACTS, "cpu", replace(devices.FACTS["cpu"], **answers))


class NoFloat64(TorchDispatchMode):
    """Refuses every tensor of float64, as Apple's GPUs and Intel's Arc do."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, torch.Tensor) and each.dtype is torch.float64:
                raise TypeError(f"{func}: there is no float64")
        return result
