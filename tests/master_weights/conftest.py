"""An optimizer that tells how much of it is float32 at a time."""

import sys
from typing import Any

import pytest
import torch
from torch import nn


@pytest.fixture
def many(
    monkeypatch: pytest.MonkeyPatch,
) -> tuple[list[nn.Parameter], torch.optim.Optimizer, list[int]]:
    """Forty parameters of an SGD, and how many entries were float32 at each call of its kernel."""
    params = [nn.Parameter(torch.ones(100, dtype=torch.bfloat16)) for _ in range(40)]
    sizes: list[int] = []

    kernels = sys.modules[torch.optim.SGD.__module__]
    original = kernels.sgd

    def sgd(*args: Any, **kwargs: Any) -> None:
        sizes.append(sum(param.numel() for param in params if param.dtype is torch.float32))
        original(*args, **kwargs)

    monkeypatch.setattr(kernels, "sgd", sgd)
    return params, torch.optim.SGD(params[:20], lr=0.1), sizes
