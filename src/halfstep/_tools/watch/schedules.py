"""Schedules of learning rates, the lines that set a rate, and functions that return a wrong one."""

from __future__ import annotations

import ast
import gc
import linecache
import math
import re
import sys
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from numbers import Real
from textwrap import dedent
from types import CodeType, FrameType
from typing import Any, NamedTuple

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep._tools.diagnose.diagnosis import Cure
from halfstep._tools.line import short_path
from halfstep._tools.source import Source
from halfstep._tools.user_code import is_of_package, is_users, tree_of


def schedules_of(optimizer: Optimizer) -> list[LRScheduler]:
    """Return the schedules of an optimizer's learning rate."""
    return [
        each
        for each in gc.get_objects()
        if issubclass(type(each), LRScheduler) and getattr(each, "optimizer", None) is optimizer
    ]


def lines_that_set(names: Collection[str], files: Iterable[str]) -> list[str]:
    """Return the lines of the first file that has some: of ``files``, or else of the program."""
    modules = (getattr(module, "__file__", None) or "" for module in [*sys.modules.values()])
    own = (file for file in modules if file and is_users(file) and not is_of_package(file))
    found = (lines for file in dict.fromkeys([*files, *own]) if (lines := lines_with(file, names)))
    return next(found, [])


def lines_with(file: str, names: Collection[str]) -> list[str]:
    """Return the lines of a file that call functions of some names, or set items of them."""
    found = set()
    # Parsing each file of a large program would take seconds; few have a name before "(" or quoted.
    any_name = "|".join(map(re.escape, names))
    if not re.search(rf"\b(?:{any_name})(?:['\"]|\s*\()", "".join(linecache.getlines(file))):
        return []
    for node in ast.walk(tree_of(file).root):
        match node:
            case ast.Call(func=ast.Name(name) | ast.Attribute(attr=name), lineno=number):
                found |= {number} if name in names else set()
            case ast.Subscript(slice=ast.Constant(name), ctx=ast.Store(), lineno=number):
                found |= {number} if name in names else set()
    return [f"{short_path(file)}:{n}: {linecache.getline(file, n).strip()}" for n in sorted(found)]


# --- functions of schedules -----------------------------------------------------------------------


class _Spot(NamedTuple):
    """Line of a function, and the names that it knows there."""

    code: CodeType
    number: int
    names: dict[str, Any]


def of_function(schedules: Iterable[LRScheduler], why: str) -> Cure | None:
    """Return the cure of a schedule's function that returns inf, NaN or a number below 0 now.

    Each function is called once more, with the number of the schedule's step.
    """
    for schedule in schedules:
        for function in getattr(schedule, "lr_lambdas", ()):
            value, spot = _called(function, schedule.last_epoch)
            if spot is None:
                continue
            source, file = Source(spot.code.co_filename), spot.code.co_filename
            said = [*_changed(source, spot, is_finite=math.isfinite(value))]
            if value < 0:
                said.append(_where_it_ends(function, schedule.last_epoch))
            edits = source.edited() if said else None
            called = getattr(function, "__name__", type(function).__name__)
            of = f"{type(schedule).__name__} multiplies it by {called}"
            remark = f"{why}: {of}({schedule.last_epoch}), which is {value:g}{''.join(said)}"
            if not edits:
                line = linecache.getline(file, spot.number).strip()
                return Cure("code", f"{remark}\n{short_path(file)}:{spot.number}: {line}")
            text = "\n".join(dedent(edit.text) for edit in edits)
            return Cure("code", text, edits=tuple(edits), remarks=(remark,))
    return None


def _called(function: Any, step: int) -> tuple[float, _Spot | None]:
    """Call a function; return its value, and the line that is to change, if the value is wrong.

    That is the line that first makes inf or NaN, or the one that returns a number below 0.
    """
    first: list[_Spot] = []
    lines: dict[FrameType, int] = {}
    last: _Spot | None = None

    def trace(frame: FrameType, event: str, result: Any) -> Any:
        nonlocal last
        if not is_users(frame.f_code.co_filename):
            return None
        is_return = event == "return"
        number = frame.f_lineno if is_return else lines.get(frame, frame.f_lineno)
        spot = _Spot(frame.f_code, number, {**frame.f_globals, **frame.f_locals})
        if any(map(_is_bad, [result] if is_return else frame.f_locals.values())):
            first.append(spot)
        lines[frame] = frame.f_lineno
        last = spot if is_return else last
        return trace

    value, before = 0.0, sys.gettrace()
    sys.settrace(trace)
    try:
        with suppress(Exception):  # raised by the user's function
            value = float(function(step))
    finally:
        sys.settrace(before)
    if not math.isfinite(value):
        return value, next(iter(first), None)
    return value, last if value < 0 else None


def _where_it_ends(function: Any, now: int) -> str:
    """Return where a function fell below 0, by calls of it."""
    is_below: Callable[[int], bool] = lambda step: float(function(step)) < 0  # noqa: E731
    first = bisect_left(range(now), True, key=is_below)
    return f". It fell below 0 in step {first} of {now}: let it end after the last step of the run"


def _is_bad(value: object) -> bool:
    return isinstance(value, Real) and not math.isfinite(value)


def _changed(source: Source, spot: _Spot, *, is_finite: bool) -> Iterator[str]:
    """Change a divisor of 0 in a line to 1, or bound what it returns by 0; yield what was found."""
    for node in source.tree.parents:
        if getattr(node, "lineno", 0) != spot.number:
            continue
        match node:
            case ast.BinOp(op=ast.Div(), right=divisor) if not is_finite:
                with suppress(Exception):  # raised by the user's names
                    text = ast.unparse(divisor)
                    if eval(text, spot.names) == 0 and source.put(divisor, "max({}, 1)"):
                        yield f": `{text}` is 0 there"
            case ast.Return(value=ast.expr() as result) | ast.Lambda(body=result) if is_finite:
                source.put(result, "max({}, 0.0)")
                yield "; below 0, each step raises the loss; at 0 none is taken"
