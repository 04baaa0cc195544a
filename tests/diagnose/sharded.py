"""Work of each of two ranks for test_sharded.py, in a module that a worker can import."""

from __future__ import annotations

from typing import Any

import torch
from tests.device import DEVICE
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional as F

import halfstep
from halfstep._tools.watch import skips
from halfstep._tools.watch.watch import Watch


class Net(nn.Module):
    """Overflows in float16 by ``factor`` in the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 4)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(self.first(x).relu() * self.factor)
        return out


class Talking(Net):
    """Asks the other rank in its forward pass, as a batch norm over all ranks does."""

    def forward(self, x: Tensor) -> Tensor:
        total = x.sum()
        distributed.all_reduce(total)
        return super().forward(x)


def spread(kind: str) -> tuple[nn.Module, Net]:
    """Return a model for two ranks, and what overflows in it."""
    net = Talking() if kind == "talking" else Net()
    mesh = init_device_mesh("cpu", (2,))
    if kind == "fsdp":
        from torch.distributed.fsdp import fully_shard

        for module in (net.first, net.last, net):
            fully_shard(module, mesh=mesh)
    elif kind == "tp":
        from torch.distributed.tensor import parallel

        plan = {"first": parallel.ColwiseParallel(), "last": parallel.RowwiseParallel()}
        parallel.parallelize_module(net, mesh, plan)
    else:
        return nn.parallel.DistributedDataParallel(net), net
    return net, net


class Loop:
    """Run a training loop in which one rank goes bad; with tensor parallelism both do."""

    def __init__(self, rank: int, kind: str, *, is_scaling: bool = True) -> None:
        self.model, self.net = spread(kind)
        self.is_bad_here = rank == 1 or kind == "tp"
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.scaler = halfstep.GradScaler(DEVICE, init_scale=2.0**15) if is_scaling else None
        torch.manual_seed(rank if kind != "tp" else 5)
        self.x, self.y = torch.randn(4, 8), torch.arange(4)

    def step(self, bad: str = "") -> None:
        is_bad = bool(bad) and self.is_bad_here
        self.optimizer.zero_grad()
        self.net.factor = 1e6 if is_bad and bad == "forward" else 1.0
        with halfstep.autocast(DEVICE, torch.float16):
            out = self.model(self.x)
        loss = F.cross_entropy(out, self.y)
        if is_bad and bad == "backward":
            loss = (out.float() * 3000).mean()  # by hand: it is not replayed
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()


def summary(watch: Watch) -> tuple[list[Any], list[str]]:
    found = [
        (each.verdict, each.bad.op, each.bad.phase, each.bad.line is not None)
        for each in watch.found
        if each.bad is not None
    ]
    said = [note for each in watch.found for note in (each.happened, *each.notes)]
    return found, [*watch.notes, *said]


def watched(rank: int, kind: str, bad: str) -> tuple[list[Any], list[str]]:
    before = skips.SETTLED, skips.MOST_FALLS
    skips.SETTLED, skips.MOST_FALLS = 1, 0  # no skip is part of finding the scale
    loop = Loop(rank, kind)
    with halfstep.diagnose(loop.scaler, model=loop.model, tell=lambda *_: None) as watch:
        for each in ("", bad, bad, bad, "", ""):
            loop.step(each)
    skips.SETTLED, skips.MOST_FALLS = before
    return summary(watch)


def without_scaler(rank: int, kind: str) -> int:
    """Only one rank has a loss that is not finite: the other does not look, let alone trace."""
    loop = Loop(rank, kind, is_scaling=False)
    with Watch(None, loop.model, tell=lambda *_: None) as watch:
        for bad in ("", "forward", "forward", ""):
            loop.step(bad)
    return len(watch.found) + len(watch.notes)


def on_request(rank: int, kind: str) -> None:
    loop = Loop(rank, kind)
    halfstep.diagnose(lambda: loop.step("forward"), model=loop.model)


def with_agreement(rank: int) -> tuple[str, float]:
    """Check that the scaler asks other ranks in training, but not in a replay."""
    net = Net()
    world = distributed.group.WORLD
    scaler = halfstep.GradScaler(DEVICE, init_scale=256.0, process_group=world)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    net.factor = 1e6 if rank == 1 else 1.0

    def step() -> None:
        optimizer.zero_grad()
        with halfstep.autocast(DEVICE, torch.float16):
            loss = F.cross_entropy(net(torch.ones(4, 8)), torch.arange(4))
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    found = halfstep.diagnose(step, model=net)
    step()
    return found.verdict, scaler.get_scale()
