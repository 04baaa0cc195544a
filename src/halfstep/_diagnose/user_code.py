"""User code: the line that runs, its names of tensors, and the objects that a function reaches."""

from __future__ import annotations

import functools
import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._diagnose.diagnosis import Line
from halfstep._pytorch import autograd, storages

_OURS = (
    f"{Path(torch.__file__).parent}/",
    f"{Path(__file__).parents[1]}/",
    "<frozen ",
    "<eval_with_key>",
)
_LIBRARY = f"{Path(os.__file__).parent}/"
_PACKAGES = ("/site-packages/", "/dist-packages/")

CALLED_AGAIN: set[CodeType] = set()
"""The code of functions that repeat a call of the user's; their local ``line`` is its line."""


def user_line() -> Line | None:
    """Return the innermost line that is not PyTorch's, Python's or ours.

    None in a backward pass that has called no code of the user's.
    """
    for frame in _frames():
        if frame.f_code is autograd.ENGINE_CODE:
            return None
        if frame.f_code in CALLED_AGAIN:
            line: Line | None = frame.f_locals["line"]
            return line
        if is_users(frame.f_code.co_filename):
            return line_at(frame.f_code, frame.f_lineno)
    return None


def user_place() -> tuple[CodeType, int] | None:
    """Return the code and the number of the line of :func:`user_line`, without its text."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if is_users(frame.f_code.co_filename):
            return frame.f_code, frame.f_lineno
        frame = frame.f_back
    return None


def whole_model(module: nn.Module) -> nn.Module:
    """Return the outermost module whose method calls ``module``, as ``training_step`` does.

    The module itself if no method of a module that has it as a part is running.
    """
    whole = module
    for frame in _frames():
        owner = frame.f_locals.get("self") if is_users(frame.f_code.co_filename) else None
        if isinstance(owner, nn.Module) and any(whole is part for part in owner.modules()):
            whole = owner
    return whole


def line_at(code: CodeType, number: int) -> Line:
    """Return a line with its text."""
    text = linecache.getline(code.co_filename, number).strip()
    return Line(code.co_filename, number, code.co_name, text)


def called_by_user(tensor: Tensor) -> str | None:
    """Return the name that the outermost function with a tensor has for it, and where that is."""
    found = None
    for frame in _frames():
        if not is_users(frame.f_code.co_filename):
            continue
        for name, value in frame.f_locals.items():
            path = _path_to(tensor, name, value)
            if path is not None:
                file, function = Path(frame.f_code.co_filename).name, frame.f_code.co_name
                found = f"{path} in {function} ({file}:{frame.f_lineno})"
    return found


@functools.cache
def is_users(file: str) -> bool:
    """Return whether a file belongs to the user's program or to a package that it uses."""
    if file.startswith(_OURS):
        return False
    return any(part in file for part in _PACKAGES) or not file.startswith(_LIBRARY)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _path_to(tensor: Tensor, name: str, value: Any) -> str | None:
    """Return ``batch['x']`` if a tensor is there; tensors are compared by their memory."""
    if isinstance(value, Tensor):
        return name if _is_part_of(tensor, value) else None
    if isinstance(value, dict):
        parts = [(f"{name}[{key!r}]", part) for key, part in value.items()]
    elif isinstance(value, (list, tuple)) and len(value) <= 64:
        parts = [(f"{name}[{index}]", part) for index, part in enumerate(value)]
    else:
        return None
    for path, part in parts:
        if isinstance(part, Tensor) and _is_part_of(tensor, part):
            return path
    return None


def _is_part_of(tensor: Tensor, whole: Tensor) -> bool:
    if tensor is whole:
        return True
    one, other = storages.memory_of(tensor), storages.memory_of(whole)
    return one is not None and other is not None and one.cdata == other.cdata


# --- reachable objects ----------------------------------------------------------------------------

_DEPTH = 3
"""The depth of calls: ``lambda: train.step(batch)`` calls a method, which calls another."""


def owners_in(function: Any) -> list[nn.Module | Optimizer]:
    """Return the modules and optimizers in the closure, the globals and the object of a function.

    The functions that it names are searched too. Nothing is called.
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
