"""Optimizer steps in chunks of parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

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


def steps_one_at_a_time(optimizer: torch.optim.Optimizer, step: Callable[..., Any]) -> bool:
    """Return whether an optimizer is one of PyTorch's that can step in chunks."""
    kind = type(optimizer)
    # A program may have replaced the step of the class.
    modules = kind.__module__, getattr(step, "__globals__", {}).get("__name__", "")
    is_pytorch = all(module.startswith("torch.optim.") for module in modules)
    return is_pytorch and kind.__name__ in ONE_AT_A_TIME


def step_in_chunks(
    optimizer: torch.optim.Optimizer, step: Callable[[], Any], *, is_known: bool
) -> Any:
    """Call a step once for each chunk of the parameters, and return the result of the last call.

    Raises:
        ValueError: The chunks leave different shared values; not checked if ``is_known``.
    """
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]

    def step_all() -> Any:
        result, common = None, None if is_known else _Common(optimizer)
        for chunk in chunks_of(before):
            for group, params in zip(groups, chunk, strict=True):
                group["params"] = params
            if common is not None:
                common.put_back()
            result = step()
            if common is not None:
                common.compare()
        return result

    def put_back() -> None:
        for group, params in zip(groups, before, strict=True):
            group["params"] = params

    return in_any_case(step_all, put_back)


class _Common:
    """Values that the parameters of an optimizer share, such as a step count.

    They are in the groups, in attributes, and in state that belongs to no parameter. Each chunk
    starts with the values from before the step, and must leave the same ones as the others.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._name = type(optimizer).__name__
        groups = {f"param_groups[{n}]": each for n, each in enumerate(optimizer.param_groups)}
        self._places: dict[str, MutableMapping[Any, Any]] = {
            **groups,
            "self": vars(optimizer),
            "state": optimizer.state,
        }
        self._before = {
            name: {
                key: (value, value.clone() if _is_number(value) else None)
                for key, value in _values(place).items()
            }
            for name, place in self._places.items()
        }
        self._after: dict[str, object] | None = None

    def put_back(self) -> None:
        for name, place in self._places.items():
            before = self._before[name]
            for key in _values(place).keys() - before.keys():
                del place[key]
            for key, (value, number) in before.items():
                place[key] = value if number is None else value.copy_(number)

    def compare(self) -> None:
        now = {
            f"{name}[{key!r}]": _comparable(value)
            for name, place in self._places.items()
            for key, value in _values(place).items()
        }
        after = self._after = self._after or now
        differing = [name for name in now.keys() | after if now.get(name) != after.get(name)]
        if differing:
            raise ValueError(
                f"master_weights({self._name}, chunked=True): the step leaves another "
                f"{min(differing)} for each chunk of parameters, so it may compute with all of "
                "them together. Leave chunked=True out. This step was taken with a part of the "
                "parameters: restore an earlier checkpoint"
            )


def _values(place: MutableMapping[Any, Any]) -> dict[Any, Any]:
    kinds = int, float, complex, str, tuple, type(None), Tensor
    return {
        key: value
        for key, value in place.items()
        if isinstance(value, kinds) and not isinstance(key, Tensor)
    }


def _is_number(value: object) -> bool:
    """Return whether a value is a one-element tensor that can be read without a sync."""
    return isinstance(value, Tensor) and value.numel() == 1 and value.device.type == "cpu"


def _comparable(value: Any) -> object:
    if _is_number(value):
        return value.item()
    return (id(value), value._version) if isinstance(value, Tensor) else value


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
