"""What a step sends to the other ranks: collectives, their bytes, and how often the host waits.

PyTorch's fake process group stands for the others: one process is the last of as many as are
asked for, and what it sends goes nowhere. Models are wrapped by PyTorch itself; their gradients are
made up, since only what happens between backward and the optimizer's own work is counted.

    python benchmarks/ranks_counts.py
    python benchmarks/ranks_counts.py --ranks 512
"""

import argparse
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # makes the backend "fake" known
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from gradient_time import Fused, Plain
from halfstep import GradScaler

MAX_NORM = 1.0
WARM_UP = 4
"""In the first three steps of an optimizer halfstep looks for gradients clipped too early."""

NUM_SHARDS = 4
"""Of the inner dimension of a mesh of two."""

Call = Callable[[Any, torch.optim.Optimizer], object]


@dataclass(frozen=True)
class Collective:
    """One collective of this rank.

    Attributes:
        name: Such as ``"all_reduce max"``.
        nbytes: Of what this rank gives.
        ranks: The number of ranks that take part.
    """

    name: str
    nbytes: int
    ranks: int

    def __str__(self) -> str:
        return f"{self.name} {self.nbytes} B of {self.ranks}"


class Lists(TorchFunctionMode):
    """Counts how often a tensor becomes a list: a wait that the dispatcher does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.count += function is torch.Tensor.tolist
        return function(*args, **(kwargs or {}))


class Collectives(TorchDispatchMode):
    """Lists the collectives of a block, of Python's calls and of DTensors, and counts waits.

    Attributes:
        found: The collectives in their order.
        num_waits: How often the host wants a value that is on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Collective] = []
        self.num_waits = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) for each in types):
            return NotImplemented  # comes again as what it does to the local tensors
        space, name = function.name().split(".")[0].split("::")
        self.num_waits += name == "_local_scalar_dense"
        if space == "c10d":
            if name != "allreduce_":
                raise NotImplementedError(f"{function}: how many bytes it sends is not known here")
            op = dist.ReduceOp.RedOpType(args[2].op()).name.lower()
            self._add(f"all_reduce {op}", args[0], dist.ProcessGroup.unbox(args[1]))
        elif space == "_c10d_functional" and name not in ("wait_tensor", "_wrap_tensor_autograd"):
            name = name.rstrip("_")
            name = f"all_reduce {args[1]}" if name == "all_reduce" else name
            self._add(name, [args[0]], dist.distributed_c10d._resolve_process_group(args[-1]))
        return function(*args, **(kwargs or {}))

    def _add(self, name: str, tensors: list[torch.Tensor], group: Any) -> None:
        nbytes = sum(tensor.nbytes for tensor in tensors)
        self.found.append(Collective(name, nbytes, group.size()))


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """Be the last rank of ``count`` in a block: what looks for it among all finds it last."""
    dist.init_process_group("fake", rank=count - 1, world_size=count, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


# --- how the models are spread over the ranks -----------------------------------------------------


def model() -> nn.Sequential:
    """Return a model with six parameters, so that each has a share of every small mesh."""
    return nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 8))


def mesh(*names: str) -> Any:
    """Return a mesh over the world, of one dimension or of two."""
    size = dist.get_world_size()
    shape = (size,) if len(names) == 1 else (size // NUM_SHARDS, NUM_SHARDS)
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def plain() -> nn.Module:
    return model()


def ddp() -> nn.Module:
    return DistributedDataParallel(model())


def fsdp2() -> nn.Module:
    return fully_shard(model(), mesh=mesh("data"))


def hsdp() -> nn.Module:
    return fully_shard(model(), mesh=mesh("copies", "shards"))


def fsdp2_and_tp() -> nn.Module:
    linears = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), nn.Linear(8, 16))
    plan = {"0": ColwiseParallel(), "1": RowwiseParallel(), "2": ColwiseParallel()}
    return _in_two_ways(linears, plan)


def fsdp2_and_tp_of_some() -> nn.Module:
    return _in_two_ways(model(), {"0": ColwiseParallel(), "2": RowwiseParallel()})


def _in_two_ways(spread: nn.Module, plan: dict[str, ParallelStyle]) -> nn.Module:
    both = mesh("data", "tensor")
    return fully_shard(parallelize_module(spread, both["tensor"], plan), mesh=both["data"])


LAYOUTS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "DDP": ddp,
    "FSDP2": fsdp2,
    "HSDP": hsdp,
    "FSDP2 + TP": fsdp2_and_tp,
    "FSDP2 + TP, norms without TP": fsdp2_and_tp_of_some,
}


# --- what is counted ------------------------------------------------------------------------------


def step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer)


def unscale_then_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    scaler.step(optimizer)


def clip_with_torch(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM)
    scaler.step(optimizer)


def clip_in_step(scaler: Any, optimizer: torch.optim.Optimizer) -> None:
    scaler.step(optimizer, max_norm=MAX_NORM)


def scalers(layout: str) -> dict[str, tuple[Callable[[], Any], Call]]:
    """Return the scalers for gradients of a layout, and how each of them clips."""
    # Where plain gradients live is known to nobody but the user.
    given = {"process_group": dist.group.WORLD} if layout == "plain" else {}
    return {
        "torch.amp": (partial(torch.amp.GradScaler, "cpu"), clip_with_torch),
        "ShardedGradScaler": (partial(ShardedGradScaler, "cpu"), clip_with_torch),
        "halfstep": (partial(GradScaler, **given), clip_in_step),
    }


def counted(scaler: Any, call: Call, optimizer: torch.optim.Optimizer) -> Collectives:
    """Return what a call sends in an iteration like most others, not one of the first."""
    loss = torch.ones(())
    for _ in range(WARM_UP):
        scaler.scale(loss)
        call(scaler, optimizer)
        scaler.update()
    scaler.scale(loss)
    with Lists() as lists, Collectives() as collectives:
        call(scaler, optimizer)
    scaler.update()
    collectives.num_waits += lists.count
    return collectives


def cell(make: Callable[[], Any], call: Call, params: list[nn.Parameter]) -> str:
    """Return what an optimizer that is not fused sends and waits for, then a fused one."""
    found = []
    for kind in (Plain, Fused):
        try:
            collectives = counted(make(), call, kind(params))
        except RuntimeError as error:
            found.append(f"{type(error).__name__}: {str(error)[:60]}...")
            continue
        sent = ", ".join(map(str, collectives.found)) or "nothing"
        found.append(f"{sent}; {collectives.num_waits} waits")
    return " / ".join(dict.fromkeys(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=8, help=f"a multiple of {NUM_SHARDS}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    # DTensors tell that two collectives could be one: here they are counted.
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "Found a non-scalar tensor with numel=1", UserWarning)

    print(f"PyTorch {torch.__version__}, {args.ranks} ranks; not fused / fused")
    with fake_ranks(args.ranks):
        for layout, make_model in LAYOUTS.items():
            spread = make_model()  # halfstep asks a wrapper that is alive what it does
            params = list(spread.parameters())
            for param in params:
                param.grad = torch.zeros_like(param)
            for name, (make, clip) in scalers(layout).items():
                print(f"\n{layout}, {name}")
                print(f"  step:           {cell(make, step, params)}")
                print(f"  unscale_, step: {cell(make, unscale_then_step, params)}")
                print(f"  clipping:       {cell(make, clip, params)}")


if __name__ == "__main__":
    main()
