"""The rest of a run after a failing line, evaluated with a change of the code: does it fail again?

Statements and functions of the user are evaluated without effects: names are bound in copies of the
frames, and methods that write to a tensor write to a copy.
"""

from __future__ import annotations

import ast
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise, product
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names

from halfstep._autocast import HALVES, Region, autocast
from halfstep._pytorch import modules
from halfstep._pytorch.amp import switches_of
from halfstep._tools.dtype_errors.failing_call import (
    Call,
    body_of,
    contexts_of,
    has_no_effects,
)
from halfstep._tools.user_code import Place, is_users

Casts = Mapping[str, torch.dtype]
"""The dtypes of expressions of a statement, by their text."""
Edits = dict[ast.AST, list[ast.stmt]]
"""What stands in place of statements."""

_LEFT = 4
"""The most turns of a loop that are evaluated after the failing one."""
_CONTEXTS = (torch_autocast, Region, torch.no_grad, torch.enable_grad)
_OF_LOOPS = (list, tuple, dict, range, enumerate, zip, Tensor, nn.ModuleList, nn.Sequential)
_BUILTINS = (len, range, enumerate, zip, isinstance, int, float, tuple, list, min, max)


class _Fails(Exception):  # noqa: N818
    def __init__(self, frame: _Frame, statement: ast.stmt) -> None:
        self.frame, self.statement = frame, statement
        self.where = f"line {statement.lineno}"
        self.operands = [each.name for each in replace(frame, other=statement).tensors()]


def _ours(context: Any) -> Any:
    """Return halfstep's autocast in place of a plain ``torch.autocast``."""
    if not isinstance(context, torch_autocast):
        return context
    switches = switches_of(context)
    return autocast(switches.device, switches.dtype, enabled=switches.enabled)


# --- evaluation -----------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Frame(Call):
    """A copy of a frame, in which statements are evaluated."""

    edits: Edits | None = None
    entered: Callable[[Any], Any] = lambda context: context  # what is entered in its place

    def value(self, node: ast.AST | None) -> Any:
        if not isinstance(node, ast.Call):
            return super().value(node)
        function, (args, named) = self.value(node.func), self.arguments(node)
        return self._called(node.func, function, args, named)

    def _called(self, node: ast.expr, function: Any, args: list[Any], named: dict[str, Any]) -> Any:
        of, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(of, Tensor) and name.endswith("_") and not name.startswith("_"):
            result = getattr(of.clone(), name)(*args, **named)
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                self.local[node.value.id] = result
            return result
        is_context = isinstance(function, type) and issubclass(function, _CONTEXTS)
        is_read = function in _BUILTINS and not any(isinstance(a, Iterator) for a in args)
        if is_context or is_read or has_no_effects(function):
            return function(*args, **named)
        if isinstance(function, nn.Sequential):
            for part in function:
                args = [self._called(node, part, args, {})]
            return args[0]
        if isinstance(function, nn.Module):
            if modules.has_forward_hooks(function):
                raise LookupError(function)
            function = function.forward
        if isinstance(function, MethodType):
            function, args = function.__func__, [function.__self__, *args]
        if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename):
            raise LookupError(function)
        given = inspect.signature(function, follow_wrapped=False).bind(*args, **named)
        given.apply_defaults()
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        local = dict(zip(function.__code__.co_freevars, cells, strict=True)) | given.arguments
        place = Place(function.__code__, 0, function.__globals__)
        frame = _Frame(place, local, None, self.edits, self.entered)
        return next(iter(frame.run(body_of(function.__code__)) or ()), None)

    def run(self, statements: Sequence[ast.stmt]) -> tuple[Any] | None:
        """Evaluate statements; return what they return, in a tuple, and None if they do not."""
        for statement in statements:
            for each in (self.edits or {}).get(statement, [statement]):
                try:
                    returned = self._done(each)
                except (RuntimeError, TypeError, ValueError) as error:
                    raise _Fails(self, statement) from error
                if returned is not None:
                    return returned
        return None

    def _done(self, statement: ast.stmt) -> tuple[Any] | None:
        match statement:
            case ast.Return(value=value):
                return (None if value is None else self.value(value),)
            case (
                ast.Assign(targets=[target], value=value)
                | ast.AnnAssign(target=target, value=ast.expr() as value)
            ):
                self._assign(target, self.value(value))
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                before, result = self.value(target), self.value(ast.BinOp(target, op, value))
                self.local[name] = result.to(before.dtype) if isinstance(before, Tensor) else result
            case ast.If(test=test, body=body, orelse=other):
                return self.run(body if self.value(test) else other)
            case ast.For(target=target, iter=of, body=body, orelse=[]):
                for item in self.items(of):
                    self._assign(target, item)
                    if (returned := self.run(body)) is not None:
                        return returned
            case ast.With(items=items, body=body):
                with ExitStack() as stack:
                    for context in [self.value(item.context_expr) for item in items]:
                        if not isinstance(context, _CONTEXTS):
                            raise LookupError(context)
                        stack.enter_context(self.entered(context))
                    return self.run(body)
            case ast.Expr(value=value):
                self.value(value)
            case ast.Pass() | ast.Assert():
                pass
            case _:
                raise LookupError(statement)
        return None

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.local[name] = value
            case ast.Tuple(elts=targets):
                for each, part in zip(targets, value, strict=True):
                    self._assign(each, part)
            case ast.Subscript(value=of, slice=key):
                whole = self.value(of)
                changed = whole.clone() if isinstance(whole, Tensor) else copy.copy(whole)
                changed[self.value(key)] = value
                if not isinstance(of, ast.Name):
                    raise LookupError(target)
                self.local[of.id] = changed
            case _:
                raise LookupError(target)

    def items(self, node: ast.expr) -> list[Any]:
        if not isinstance(values := self.value(node), _OF_LOOPS):
            raise LookupError(node)
        return [*values]

    def rest(self) -> Iterator[tuple[ast.stmt, ast.stmt]]:
        """Yield the statement of the call and those after it; in place of a loop, what is left."""
        is_first = True
        for node, outer in pairwise([self.node or ast.Pass(), *self.around()]):
            for _, block in ast.iter_fields(outer):
                if isinstance(block, list) and node in block and isinstance(node, ast.stmt):
                    for each in block[block.index(node) + (not is_first) :]:
                        yield each, each
                    is_first = False
            if isinstance(outer, ast.While | ast.AsyncFor):
                return
            if isinstance(outer, ast.For):
                items = self.items(outer.iter)
                items = items[items.index(self.value(outer.target)) + 1 :][:_LEFT]
                yield outer, ast.For(outer.target, ast.Constant(items), outer.body, [])  # type: ignore[arg-type]


def _failure(
    calls: list[Call],
    number: int,
    edits: Edits,
    entered: Callable[[Any], Any] = lambda context: context,
) -> _Fails | None:
    """Evaluate the rest of a frame, and what it calls; return where it fails, if it does.

    It ends at code that cannot be evaluated.
    """
    call = calls[number]
    frame = _Frame(call.place, {**call.local}, call.node, edits, entered)
    try:
        for at, statement in frame.rest():
            with torch.no_grad(), ExitStack() as stack:
                for context in contexts_of([*calls[:number], replace(call, other=at)]):
                    if context.is_here:
                        stack.enter_context(entered(context.context))
                if frame.run([statement]) is not None:
                    return None
    except _Fails as failure:
        return failure
    except Exception:  # also of an object of the user
        return None
    return None


# --- edits ----------------------------------------------------------------------------------------


def statement_of(call: Call) -> ast.stmt:
    nodes = [call.node, *call.around()]
    return next(node for node in nodes if isinstance(node, ast.stmt))


def _cast_in(statement: ast.stmt, casts: Casts, within: ast.AST) -> Edits:
    """Return a statement with casts of expressions within a part of it."""

    class Cast(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            if isinstance(node, ast.Attribute) and node.attr.endswith("_"):
                return node  # what ``out.add_(x)`` writes to
            text = ast.unparse(node) if isinstance(node, ast.expr) else ""
            if text in casts and not isinstance(getattr(node, "ctx", None), ast.Store):
                return _to(node, casts[text])
            return self.generic_visit(node)

    copies: dict[int, Any] = {}
    changed = copy.deepcopy(statement, copies)
    Cast().generic_visit(copies[id(within)])
    return {statement: [changed]}


def _to(node: Any, dtype: torch.dtype) -> ast.Call:
    return ast.Call(ast.Attribute(node, "to"), [ast.Constant(dtype)], [])  # type: ignore[arg-type]


def cast_text(name: str, dtype: torch.dtype) -> str:
    is_sum = isinstance(ast.parse(name, mode="eval").body, (ast.BinOp, ast.UnaryOp, ast.IfExp))
    return f"({name}).to({dtype})" if is_sum else f"{name}.to({dtype})"


# --- the order of cures ---------------------------------------------------------------------------


class Cure(NamedTuple):
    """Change of a line: casts of its expressions, or a context around it, if it is one of these."""

    text: str
    casts: Casts | None = None
    context: Callable[[], Any] | None = None


def ordered(cures: list[Cure], calls: list[Call], user: Call) -> list[str]:
    """Return cures with those first with which the rest of the run does not fail, as far as known.

    The run is evaluated from the outermost call on that fails as it did. A cure after which a later
    line fails is completed: by a cast there or before the line, or by a context around an outer
    call.
    """
    numbers = [n for n, call in enumerate(calls[: calls.index(user) + 1]) if call.is_users]
    failures = ((n, _failure(calls, n, {})) for n in numbers)
    is_it = statement_of(user)
    first = next((n for n, each in failures if each and each.statement is is_it), None)
    if first is None:
        return [cure.text for cure in cures]
    fails = partial(_failure, calls, first)
    outer = [statement_of(calls[number]) for number in numbers if first <= number][:-1]
    good, failing = list[str](), list[str]()
    for cure in cures:
        edits = _edits_of(cure, user, is_it)
        if not edits or (failure := fails(edits)) is None:
            good.append(cure.text)
            continue
        if cure.casts is None:
            lines = [each.lineno for each in outer if not fails(_edits_of(cure, user, each))]
            better = [f"{cure.text} at line {line}" for line in lines[:1]]
        else:
            better = _completed(cure, failure, user, fails)
        good += better
        if cure.casts is not None or not better:
            failing.append(f"{cure.text} (then {failure.where} fails)")
    plain = [c for c in contexts_of(calls) if c.is_here and isinstance(c.context, torch_autocast)]
    if plain and plain[-1].text.startswith("line ") and not fails({}, _ours):
        line, _, text = plain[-1].text.partition(", ")
        good.append(f"halfstep.autocast in place of {text.partition('(')[0]} at {line}")
    return [*good, *failing]


def _edits_of(cure: Cure, call: Call, statement: ast.stmt) -> Edits:
    if cure.casts is not None:
        return _cast_in(statement, cure.casts, call.node or statement)
    if cure.context is not None:
        item = ast.withitem(ast.Constant(cure.context()))
        return {statement: [ast.With([item], [copy.copy(statement)])]}
    return {}


def _completed(
    cure: Cure, failure: _Fails, user: Call, fails: Callable[[Edits], _Fails | None]
) -> list[str]:
    """Return a cure with a cast before the line, or at the line that fails, if one is enough."""
    casts, statement, at = cure.casts or {}, statement_of(user), failure.statement
    if all(map(str.isidentifier, casts)):
        before = [ast.Assign([ast.Name(name)], _to(ast.Name(name), casts[name])) for name in casts]
        if not fails({statement: [*before, statement]}):
            changes = (f"{name} = {name}.to({dtype})" for name, dtype in casts.items())
            return [f"{'; '.join(changes)} before this line"]
    tensors = [value for value in user.local.values() if isinstance(value, Tensor)]
    halves = {tensor.dtype for tensor in tensors}.intersection(HALVES)
    for name, dtype in product(failure.operands, (torch.float32, *halves)):
        if not fails(_edits_of(cure, user, statement) | _cast_in(at, {name: dtype}, at)):
            more = f"{cast_text(name, dtype)} in place of {name} at {failure.where}"
            return [f"{cure.text}; {more}"]
    return []
