"""A model, the ways to spread it over two ranks, and what is left in memory: for several tests."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from tests.device import DEVICE, seeded
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    apply_activation_checkpointing,
)
from torch.multiprocessing.reductions import StorageWeakRef

from halfstep import autocast
from halfstep._pytorch import distributed, modes

WIDTH, HIDDEN, CLASSES = 128, 256, 8  # the large weights are large enough for the cache on a CPU
CAST_BYTES = 2 * 2 * WIDTH * HIDDEN * 2  # of the large weights of two blocks, in lower precision


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, HIDDEN)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(F.gelu(self.up(self.norm(x))))
        return out


class Model(nn.Module):
    """The same in each process."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.head(x)
        return out


def data_of(step: int) -> list[tuple[Tensor, Tensor]]:
    """Return the data of a step: two batches."""
    generator = seeded(100 + step)
    return [
        (
            torch.randn(4, WIDTH, generator=generator),
            torch.randint(CLASSES, (4,), generator=generator),
        )
        for _ in range(2)
    ]


Context = Callable[[], AbstractContextManager[Any]]


def lower() -> autocast:
    return autocast(DEVICE, torch.bfloat16)


def three_steps(
    model: nn.Module, rank: int | None, context: Context = lower
) -> dict[str, list[Any]]:
    """Train for three steps; return losses, gradients, and what evaluations after steps gave.

    Args:
        model: The model.
        rank: Which of the two batches of a step is its data; None for both, one after the other.
        context: What its forward passes run in.
    """
    optimizer = torch.optim.AdamW(groups(model), lr=0.01, foreach=True)
    told: dict[str, list[Any]] = {"losses": [], "gradients": [], "evaluations": []}
    for step in range(3):
        micro_batches = data_of(step)[slice(rank, None if rank is None else rank + 1)]
        for x, target in micro_batches:
            with context():
                loss = F.cross_entropy(model(x).float(), target)
            (loss / len(micro_batches)).backward()
            told["losses"].append(loss.item())
        told["gradients"].append({name: whole(p.grad) for name, p in model.named_parameters()})
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for _ in range(3):  # a cast that is kept would be used from the second time on
                with context():
                    told["evaluations"].append(whole(model(data_of(step)[0][0])).detach())
    return told


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return parameters for an optimizer, which takes no DTensors and others in one group."""
    split: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for param in model.parameters():
        split[distributed.is_dtensor(param)].append(param)
    return [{"params": params} for params in split.values() if params]


def whole(tensor: Any) -> Tensor:
    """Return all of a tensor that may be spread over ranks."""
    full: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return full.clone()


class Alive(modes.DispatchMode):
    """Knows the memory of all that ops return, and how much of it is still there.

    It only looks on: halfstep does what it does without it.
    """

    def __init__(self) -> None:
        super().__init__()
        self._memories: dict[int, tuple[StorageWeakRef, torch.dtype]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        results = func(*args, **kwargs or {})
        for each in results if isinstance(results, (list, tuple)) else [results]:
            if isinstance(each, Tensor):
                local = distributed.local_part(each)
                memory = StorageWeakRef(local.untyped_storage())  # type: ignore[no-untyped-call]
                self._memories[memory.cdata] = memory, local.dtype
        return results

    def bytes(self, dtype: torch.dtype, at_least: int = WIDTH * HIDDEN // 2) -> int:
        """Return how many bytes in pieces of so many elements at least, as weights have, live."""
        for _ in range(20):  # the threads of gloo let go of their buffers a little later
            left = sum(self._sizes(dtype, at_least * dtype.itemsize))
            if left == 0:
                break
            time.sleep(0.01)
        return left

    def _sizes(self, dtype: torch.dtype, at_least: int) -> Iterable[int]:
        for memory, has in self._memories.values():
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(memory.cdata)  # type: ignore[attr-defined]
            if storage is not None and has is dtype and storage.nbytes() >= at_least:
                yield storage.nbytes()


def alive_after(model: nn.Module, context: Context, dtype: torch.dtype) -> tuple[int, int]:
    """Return the bytes of weights' sizes alive after a forward and after its backward pass."""
    x, target = data_of(0)[0]
    with Alive() as alive:
        with context():
            loss = F.cross_entropy(model(x).float(), target)
        after_forward = alive.bytes(dtype)
        loss.backward()
        del loss
        return after_forward, alive.bytes(dtype)


def dtypes_of_outputs(model: nn.Module, context: Context) -> tuple[dict[str, str], Tensor]:
    """Return the dtype of what each module returns in a forward pass, and the result."""
    seen: dict[str, str] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: Any, out: Tensor) -> None:
            seen[name] = str(out.dtype)

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(note(name))
    with torch.no_grad(), context():
        out = model(data_of(0)[0][0])
    return seen, whole(out)


# --- ways to spread it, but for tensor parallel ---------------------------------------------------


def shard(model: nn.Module, **options: Any) -> nn.Module:
    """Shard each block, and what is left."""
    from torch.distributed.fsdp import fully_shard

    for module in model.modules():
        if isinstance(module, Block):
            fully_shard(module, **options)
    fully_shard(model, **options)
    return model


def offloaded(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import CPUOffloadPolicy

    return shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False))


def in_lower_precision(model: nn.Module) -> nn.Module:
    from torch.distributed.fsdp import MixedPrecisionPolicy

    return shard(
        model,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    )


def checkpointed(model: nn.Module) -> nn.Module:
    apply_activation_checkpointing(model, check_fn=lambda each: isinstance(each, Block))
    return shard(model)


def parallel(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


SHARDED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "resharded": shard,
    "kept gathered": functools.partial(shard, reshard_after_forward=False),
    "resharded to two": functools.partial(shard, reshard_after_forward=2),
    "offloaded": offloaded,
    "checkpointed": checkpointed,
    "lower precision": in_lower_precision,
    "ddp": parallel,
}
