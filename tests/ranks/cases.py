"""What the tests with several ranks train: a small model, whole or spread over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

import halfstep


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 3))


def world() -> Any:
    return distributed.group.WORLD


def fsdp2(module: nn.Module | None = None) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    module = model() if module is None else module
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    for part in module.children():
        fully_shard(part, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module


def tensor_parallel() -> nn.Module:
    """DTensors beside plain parameters: the norm is left as it is."""
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    parallelize_module(module, mesh, {"1": ColwiseParallel(), "3": RowwiseParallel()})
    return module


def ddp(module: nn.Module | None = None) -> nn.Module:
    return DistributedDataParallel(model() if module is None else module)


def sgd(module: nn.Module, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(module.parameters(), lr=0.01, **options)


def batch(rank: int, step: int = 0) -> Tensor:
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(10 * step + rank))


def backward(scaler: halfstep.GradScaler, module: nn.Module, x: Tensor) -> None:
    scaler.scale(module(x).square().mean()).backward()


def raised(function: Callable[[], object]) -> tuple[str, str]:
    """Return class and message of what a function raises."""
    try:
        function()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


@contextmanager
def counted() -> Iterator[list[tuple[str, int]]]:
    """Note each all-reduce: its operation and its bytes."""
    found: list[tuple[str, int]] = []
    original = distributed.all_reduce

    def count(tensor: Tensor, op: Any = distributed.ReduceOp.SUM, *args: Any, **kwargs: Any) -> Any:
        found.append((str(op).split(".")[-1].lower(), tensor.numel() * tensor.element_size()))
        return original(tensor, op, *args, **kwargs)

    distributed.all_reduce = count  # type: ignore[assignment]
    try:
        yield found
    finally:
        distributed.all_reduce = original
