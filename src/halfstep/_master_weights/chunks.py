"""Optimizer steps in chunks of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from halfstep._master_weights.exchange import in_any_case
from halfstep._pytorch.distributed import is_dtensor

ONE_AT_A_TIME = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
"""PyTorch's optimizers that step each parameter independently of others: they step in chunks."""

CACHED = 1 << 20
"""Size of a chunk on a CPU, in entries.

It stays in the cache while it is widened, stepped and rounded (`benchmarks/half_parameters.py`)."""

SHARE = 0.1
"""Size of a chunk on other devices, as a share of all entries: call overhead dominates there."""


def steps_one_at_a_time(optimizer: Optimizer, step: Callable[..., Any]) -> bool:
    """Return whether an optimizer is one of PyTorch's that can step in chunks."""
    kind = type(optimizer)
    # A program may have replaced the step of the class.
    modules = kind.__module__, getattr(step, "__globals__", {}).get("__name__", "")
    is_pytorch = all(module.startswith("torch.optim.") for module in modules)
    return is_pytorch and kind.__name__ in ONE_AT_A_TIME


def step_in_chunks(optimizer: Optimizer, step: Callable[[], object]) -> None:
    """Call a step once for each chunk of the parameters."""
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]

    def put(chunk: list[list[Tensor]]) -> None:
        for group, params in zip(groups, chunk, strict=True):
            group["params"] = params

    def step_all() -> None:
        for chunk in chunks_of(before):
            put(chunk)
            step()

    in_any_case(step_all, lambda: put(before))


def chunks_of(groups: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield the parameters with a gradient, by group, in chunks of a limited size.

    DTensors count with their global size: a step may run collectives, so all ranks need the same
    chunks. They are not mixed with other tensors, which fused steps do not support.
    """
    params = [(n, p) for n, group in enumerate(groups) for p in group if p.grad is not None]
    on_cpu = all(param.device.type == "cpu" for _, param in params)
    limit = CACHED if on_cpu else max(CACHED, SHARE * sum(param.numel() for _, param in params))
    for _, alike in groupby(sorted(params, key=_kind), key=_kind):
        chunk: list[list[Tensor]] = [[] for _ in groups]
        size = 0
        for index, param in alike:
            if size > 0 and size + param.numel() > limit:
                yield chunk
                chunk, size = [[] for _ in groups], 0
            chunk[index].append(param)
            size += param.numel()
        yield chunk


def _kind(member: tuple[int, Tensor]) -> bool:
    return is_dtensor(member[1])
