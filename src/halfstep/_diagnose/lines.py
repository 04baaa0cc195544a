"""Which line of the user's code runs, and what it calls a tensor."""

from __future__ import annotations

import linecache
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor

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
"""The code of functions that call again what the user had called at their ``line``."""


def user_line() -> Line | None:
    """Return the innermost line that is neither PyTorch's, Python's nor ours.

    None if the backward pass has called nothing of the user's.
    """
    for frame in _frames():
        if frame.f_code is autograd.ENGINE_CODE:
            return None
        if frame.f_code in CALLED_AGAIN:
            line: Line | None = frame.f_locals["line"]
            return line
        if is_users(frame.f_code.co_filename):
            return _line_of(frame)
    return None


def _line_of(frame: FrameType) -> Line:
    code, number = frame.f_code, frame.f_lineno
    text = linecache.getline(code.co_filename, number).strip()
    return Line(code.co_filename, number, code.co_name, text)


def called_by_user(tensor: Tensor) -> str | None:
    """Return what the outermost function that knows a tensor calls it, and where."""
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


def is_users(file: str) -> bool:
    """Say whether a file is of the user's program or of a package that it uses."""
    if file.startswith(_OURS):
        return False
    return any(part in file for part in _PACKAGES) or not file.startswith(_LIBRARY)


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _path_to(tensor: Tensor, name: str, value: Any) -> str | None:
    """Return ``batch['x']`` if a tensor lies there; its memory tells it from others."""
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
