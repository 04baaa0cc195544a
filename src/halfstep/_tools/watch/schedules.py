"""Schedules of learning rates, the lines that set a rate, and functions that return a wrong one."""

from __future__ import annotations

import ast
import gc
import inspect
import linecache
import math
import re
import sys
import warnings
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from numbers import Number, Real
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from halfstep._pytorch import autograd
from halfstep._tools.diagnose.diagnosis import Cure, pasted
from halfstep._tools.dtype_errors.failing_call import function_of
from halfstep._tools.dtype_errors.rest import Frame, Run
from halfstep._tools.line import short_path
from halfstep._tools.source import Source
from halfstep._tools.user_code import Place, is_of_package, is_users, tree_of

_NAMES = (ast.Name, ast.Attribute)
_ARRAYS = ("arange", "linspace", "full", "array", "where")  # functions of NumPy without effects


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


@dataclass(frozen=True, eq=False)
class _Numbers(Frame):
    """A copy of a frame that notes which expressions make complex or non-finite numbers."""

    bad: list[_Spot] = field(default_factory=list)  # the innermost first
    returned: list[_Spot] = field(default_factory=list)  # the outermost last

    def value(self, node: ast.AST | None) -> Any:
        value = super().value(node)
        if isinstance(node, (ast.BinOp, ast.Call)) and _is_bad(value):
            self.bad.append((self, node))
        return value

    def can_call(self, node: ast.Call, function: Any) -> bool:
        is_number = isinstance(function, type) and issubclass(function, Number)
        is_number |= getattr(function, "__module__", "") == "numpy" and function.__name__ in _ARRAYS
        return is_number or super().can_call(node, function)

    def _done(self, statement: ast.stmt) -> tuple[Any] | None:
        match statement:
            case ast.With(body=body):  # such as numpy.errstate
                return self.run(body)
            case ast.Return(value=ast.expr() as node):
                result = super()._done(statement)
                self.returned.append((self, node))
                return result
        return super()._done(statement)


_Spot = tuple[_Numbers, ast.expr]  # an expression of a frame that is to change


def of_function(schedules: Iterable[LRScheduler], why: str) -> Cure | None:
    """Return the cure of a schedule's function that returns inf, NaN or a number below 0 now.

    Each function is evaluated without effects, with the number of the schedule's step. What changes
    is what first makes inf or NaN, or the number below 0 that is returned.
    """
    functions = [(each, f) for each in schedules for f in getattr(each, "lr_lambdas", ())]
    for schedule, function in functions:
        frame = _Numbers(Place(of_function.__code__, 0, {}), {}, None, Run({}))
        call = function if inspect.isroutine(function) else function.__call__
        step, value = schedule.last_epoch, 0.0
        with _quietly():
            value = frame.result_of(call, [step], {}) + 0.0
        spots = frame.bad[:1] if _is_bad(value) else frame.returned[-1:] if value < 0 else []
        for spot in spots:
            ends = "" if _is_bad(value) else _where_it_ends(function, step)
            called = getattr(function, "__name__", type(function).__name__)
            of = f"{type(schedule).__name__} multiplies it by {called}"
            return _of_spot(*spot, f"{why}: {of}({step}), which is {value:g}", ends)
    return None


def of_lines(name: str, why: str) -> Cure | None:
    """Return the cure of the formula by which a running function sets a number to inf or NaN."""
    for running in autograd.frames():
        code = running.f_code
        if not is_users(code.co_filename):
            continue
        place, scope = Place(code, running.f_lasti, running.f_globals), function_of(code)
        frame = _Numbers(place, {**running.f_locals}, None, Run({}))
        for node in (*_expressions_of(scope, name), *_setters_in(scope, name, frame)):
            with _quietly():
                frame.value(node)
            if frame.bad:
                return _of_spot(*frame.bad[0], why)
    return None


@contextmanager
def _quietly() -> Iterator[None]:
    """End the block at an error of the user's code; ignore warnings, which it has given before."""
    with warnings.catch_warnings(), suppress(Exception):
        warnings.simplefilter("ignore")
        yield


def _expressions_of(scope: ast.AST, name: str) -> Iterator[ast.expr]:
    """Yield what a function stores as items of a name, and what it assigns to the names in that."""
    assigned = [each for each in ast.walk(scope) if isinstance(each, ast.Assign)]
    todo = [each for each in assigned if _sets(each.targets[0], name)]
    for each in todo:
        yield each.value
        read = {ast.unparse(part) for part in ast.walk(each.value) if isinstance(part, _NAMES)}
        todo += [a for a in assigned if a not in todo and ast.unparse(a.targets[0]) in read]


def _setters_in(scope: ast.AST, name: str, frame: Frame) -> Iterator[ast.Call]:
    """Yield the calls of functions of the user that store items of a name."""
    for node in ast.walk(scope):
        if isinstance(node, ast.Call):
            with _quietly():
                code = inspect.unwrap(frame.value(node.func)).__code__
                parts = ast.walk(function_of(code)) if is_users(code.co_filename) else ()
                if any(_sets(part, name) for part in parts):
                    yield node


def _sets(target: ast.AST, name: str) -> bool:
    match target:
        case ast.Subscript(slice=ast.Constant(value), ctx=ast.Store()):
            return bool(value == name)
    return False


def _where_it_ends(function: Any, now: int) -> str:
    """Return where a function fell below 0, by calls of it."""
    is_below: Callable[[int], bool] = lambda step: float(function(step)) < 0  # noqa: E731
    first = bisect_left(range(now), True, key=is_below)
    return f". It fell below 0 in step {first} of {now}: let it end after the last step of the run"


def _is_bad(value: object) -> bool:
    """Return whether a number is not finite, or each one of an array of NumPy."""
    values = [*getattr(value, "flat", [value])]
    of = (isinstance(v, complex) or (isinstance(v, Real) and not math.isfinite(v)) for v in values)
    return bool(values) and all(of)


def _of_spot(frame: _Numbers, node: ast.expr, why: str, ends: str = "") -> Cure:
    """Return the cure that changes a divisor of 0 to 1, a base below 0 to 0, or a result to 0."""
    file, value = frame.place.code.co_filename, frame.value
    source, part, bound = Source(file), node, "max({}, 0.0)"
    match node:
        case _ if ends:
            said = "; below 0, each step raises the loss; at 0 none is taken"
        case ast.BinOp(op=ast.Div(), right=part) if value(part) == 0:
            bound, said = "max({}, 1)", f": `{ast.unparse(part)}` is 0 there"
        case ast.BinOp(left=part, op=ast.Pow()) | ast.Call(args=[part, *_]) if value(part) < 0:
            said = f": `{ast.unparse(part)}` is {value(part):g} there"
        case part:
            bound, said = "", f": `{ast.unparse(part)}` is {value(part)} there"
    edits = source.edited() if bound and source.put(part, bound) else None
    if not edits:
        line = linecache.getline(file, part.lineno).strip()
        return Cure("code", f"{why}{said}{ends}\n{short_path(file)}:{part.lineno}: {line}")
    return pasted(edits, f"{why}{said}{ends}")
