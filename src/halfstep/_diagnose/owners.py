"""The models and optimizers that a function can reach by its names."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn
from torch.optim import Optimizer

_DEPTH = 3
"""So many functions deep: ``lambda: train.step(batch)`` calls a method, which calls another."""


def owners_in(function: Any) -> list[nn.Module | Optimizer]:
    """Return the modules and optimizers in the closure, the globals and the object of a function.

    Also those of the functions that it names. Nothing is called.
    """
    found: dict[int, nn.Module | Optimizer] = {}
    for value in _reachable(function, _DEPTH):
        if isinstance(value, (nn.Module, Optimizer)):
            found[id(value)] = value
    return list(found.values())


def _reachable(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, (nn.Module, Optimizer)):
        yield value
    elif depth == 0:
        return
    elif isinstance(value, functools.partial):
        for part in (value.func, *value.args, *value.keywords.values()):
            yield from _reachable(part, depth)
    elif isinstance(value, MethodType):
        yield from _reachable(value.__func__, depth)
        yield from _reachable(value.__self__, depth)
    elif isinstance(value, FunctionType):
        for part in _named_in(value):
            yield from _reachable(part, depth - 1)
    elif isinstance(value, (list, tuple)):
        for part in value[:16]:
            yield from _reachable(part, depth - 1)
    elif hasattr(value, "__dict__") and not isinstance(value, type):
        for part in list(vars(value).values()):
            if isinstance(part, (nn.Module, Optimizer, list, tuple)):
                yield from _reachable(part, depth - 1)


def _named_in(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not set yet
            continue
    for name in _names(function.__code__):
        if name in function.__globals__:
            yield function.__globals__[name]


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names(constant)
