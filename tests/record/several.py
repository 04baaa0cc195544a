"""What each of two ranks does for test_several.py: it trains, and records."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from tests.device import DEVICE
from torch import Tensor, distributed, nn

import halfstep

BAD = 12  # the step in which rank 1 goes bad, after the start-up of dynamic scaling
NUM_STEPS = 14


def record_training(rank: int, folder: str, kind: str) -> None:
    """Train by FSDP2, or as the two stages of a pipeline."""
    os.environ.update(RANK=str(rank), WORLD_SIZE="2")
    try:
        with halfstep.record(Path(folder), every=2):
            (fsdp if kind == "fsdp" else pipeline)(rank, dies=kind == "dies")
    finally:
        del os.environ["RANK"], os.environ["WORLD_SIZE"]


def fsdp(rank: int, *, dies: bool) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    for module in (model[0], model[1], model):
        fully_shard(module, mesh=distributed.init_device_mesh("cpu", (2,)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = halfstep.GradScaler(DEVICE, init_scale=8.0)
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).mean()).backward()
        if step == BAD and rank == 1:
            model[0].weight.grad.to_local().fill_(torch.inf)
        scaler.step(optimizer)
        scaler.update()


def pipeline(rank: int, *, dies: bool) -> None:
    """By hand, with plain gradients: rank 0 has the first stage and no loss."""
    torch.manual_seed(rank)
    stage = nn.Sequential(nn.Linear(4, 4)) if rank == 0 else nn.Sequential(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(stage.parameters(), lr=0.01)
    scaler = halfstep.GradScaler(DEVICE, init_scale=8.0, process_group=distributed.group.WORLD)
    for step in range(1, NUM_STEPS + 1):
        optimizer.zero_grad()
        if rank == 0:
            sent: Tensor = stage(torch.ones(2, 4))
            distributed.send(sent.detach(), 1)
            gradient = torch.empty(2, 4)
            distributed.recv(gradient, 1)
            sent.backward(gradient)
        else:
            given = torch.empty(2, 4)
            distributed.recv(given, 0)
            loss = stage(given.requires_grad_()).mean() * (torch.nan if step == BAD else 1.0)
            loss = loss if step == BAD else loss * 0 + 1.0 / step
            scaler.scale(loss).backward()
            distributed.send(given.grad, 0)
            if dies and step == BAD:
                raise ValueError("rank 1 has had enough")
        scaler.step(optimizer)
        scaler.update()


def clip_with_pytorch(rank: int, folder: str) -> float:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh())
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfstep.GradScaler(init_scale=16.0)
    with halfstep.record(f"{folder}/{rank}", model, every=1):
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).mean()).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    return scaler.get_scale()
