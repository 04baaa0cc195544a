"""What each of two ranks does for tests of the runner."""

from __future__ import annotations

import sys
import traceback
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Literal

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import halfstep
from halfstep import preset
from halfstep._tools.run.launch import execute
from halfstep._tools.run.masters import Additions, added
from halfstep._tools.run.stand_ins import replaced
from halfstep.errors import RanksError, SkippedStepsWarning


def sharded(rank: int) -> tuple[list[bool], float]:
    """Plain gradients, of which only rank 1 sees inf: PyTorch's default group is the world."""
    taken = []
    with replaced(preset("standard")):
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

        scaler = ShardedGradScaler("cpu", init_scale=8.0)
        weight = torch.full((2,), float(rank + 1), requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            scaler.scale((weight * (rank + 1)).sum()).backward()
            if step == rank == 1:
                weight.grad.fill_(torch.inf)
            scaler.step(optimizer)
            scaler.update()
            taken.append(scaler.outcome(optimizer).taken)
    return taken, scaler.get_scale()


def with_float16(rank: int, way: str, find_unused: bool) -> tuple[list[float], list[str]]:
    """A DistributedDataParallel of a float16 model, whose gradients get another dtype."""
    said: list[str] = []
    with added(Additions(has_masters=True), said.append) if way == "added" else nullcontext():
        torch.manual_seed(0)
        linear = torch.nn.Linear(4, 2, dtype=torch.float16)
        model = DistributedDataParallel(linear, find_unused_parameters=find_unused)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        if way == "by hand":
            halfstep.master_weights(optimizer, "float32")
        for step in range(4):
            optimizer.zero_grad()
            x = torch.full((2, 4), float(step + rank), dtype=torch.float16)
            model(x).float().square().mean().backward()
            optimizer.step()
    return [value for param in model.parameters() for value in param.flatten().tolist()], said


def fully_sharded(rank: int, way: str, dtype: torch.dtype) -> tuple[list[list[float]], list[str]]:
    """A model of FSDP2 whose layers compute in bfloat16, with NaN on rank 1 in the third step.

    Returned are what ranks hold of the parameters and of the optimizer's state.
    """
    said: list[str] = []
    both = Additions(has_masters=True, is_guarding=True, max_norm=0.5)
    with added(both, said.append) if way == "added" else nullcontext():
        torch.manual_seed(0)
        layers = torch.nn.Linear(4, 6), torch.nn.Linear(6, 3)
        model = torch.nn.Sequential(*layers).to(dtype)
        policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        mesh = distributed.init_device_mesh("cpu", (2,))
        for module in (*model, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
        if way == "by hand":
            if dtype is torch.bfloat16:
                halfstep.master_weights(optimizer)
            halfstep.guard(optimizer, max_norm=0.5)
        for step in range(5):
            optimizer.zero_grad()
            x = torch.full((2, 4), torch.nan if step == 2 and rank else step + rank + 1.0)
            model(x).float().square().mean().backward()
            with warnings.catch_warnings(action="ignore", category=SkippedStepsWarning):
                optimizer.step()
    states = optimizer.state_dict()["state"].values()
    tensors = [*model.parameters(), *(value for state in states for value in state.values())]
    parts = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return [part.detach().double().flatten().tolist() for part in parts], said


def guarded(
    rank: int, ranks: Literal["alone", "together"] | None, is_averaged: bool, norm: float | None
) -> list[list[float]] | str:
    """Plain parameters, with inf in the gradients of rank 0 in the second of three steps.

    Returned are the weights after each step, or the error that ends the script.
    """
    weights, said = [], list[str]()
    with added(Additions(is_guarding=True, max_norm=norm, ranks=ranks), said.append):
        torch.manual_seed(0 if is_averaged else rank)
        model = torch.nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(torch.full((2, 4), step + rank + 1.0)).square().mean().backward()
            if step == 1 and rank == 0:
                model.weight.grad[0, 0] = torch.inf
            for param in model.parameters() if is_averaged else ():
                distributed.all_reduce(param.grad)
                param.grad.div_(2)
            try:
                with warnings.catch_warnings(action="ignore", category=SkippedStepsWarning):
                    optimizer.step()
            except RanksError as error:
                return str(error)
            weights.append(model.weight.flatten().tolist())
    return weights


def script(rank: int, path: str) -> str:
    """Run a script that knows nothing of halfstep, or return what it raises."""
    argv = sys.argv
    try:
        with replaced(preset("standard")):
            execute(path, [], is_module=False)
    except RanksError:
        return traceback.format_exc()
    finally:
        sys.argv = argv
    return Path(path).name
