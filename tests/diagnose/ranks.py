"""Data-parallel training for test_ranks.py."""

from __future__ import annotations

import math
from typing import Any

import torch
from tests.device import DEVICE
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import halfstep


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.norm(self.first(x)).relu())
        return out


def without_a_scaler(
    model: nn.Module, batches: tuple[Tensor, ...], *, is_summed: bool
) -> list[str]:
    """Watch a loop over batches; return its diagnoses. Ranks sum gradients by hand if needed."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with halfstep.diagnose(halfstep.GradScaler(enabled=False), tell=lambda *_: None) as watch:
        for x in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1])).backward()
            for param in () if is_summed else model.parameters():
                torch.distributed.all_reduce(param.grad)
            optimizer.step()
    return [found.to_json() for found in watch.found]


def diagnose_bad_rank(rank: int) -> dict[str, Any]:
    """Diagnose a batch that is bad on rank 1 only, on request and then in a loop."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfstep.GradScaler(init_scale=16.0)
    good, bad = torch.randn(4, 4), torch.randn(4, 4)
    if rank == 1:
        bad[2, 1] = math.nan

    def step(x: Tensor) -> None:
        optimizer.zero_grad()
        with halfstep.autocast(DEVICE, torch.float16):
            loss = F.cross_entropy(model(x), torch.tensor([0, 1, 0, 1]))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    def digest() -> list[float]:
        tensors = [*model.parameters(), *model.buffers()]
        return [tensor.double().sum().item() for tensor in tensors]

    step(good)
    before = digest()
    on_request = halfstep.diagnose(lambda: step(bad), model=model)
    same = digest() == before
    with halfstep.diagnose(scaler, tell=lambda *_: None) as watch:
        for x in (good, bad, good):
            step(x)
    after = digest()
    return {
        "without a scaler": without_a_scaler(model, (good, bad), is_summed=True),
        "summed by hand": without_a_scaler(Net(), (good, bad), is_summed=False),
        "on request": on_request.to_json(),
        "same": same,
        "in a loop": [found.to_json() for found in watch.found],
        "digest": after,
    }
