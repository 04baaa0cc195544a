"""The rest of a run after a failing line, evaluated with a change of the code: does it fail again?

Statements and functions of the user are evaluated without effects: names and attributes are bound
in copies, and methods that write to a tensor write to a copy. What cannot be evaluated is unknown.
"""

from __future__ import annotations

import ast
import copy
import inspect
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise, product
from types import FunctionType, MethodType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names
from torch.utils.checkpoint import checkpoint

from halfstep._autocast import Region, autocast
from halfstep._autocast.access import settings_of
from halfstep._pytorch import autograd, modules
from halfstep._pytorch.amp import switches_of
from halfstep._tools.dtype_errors.failing_call import (
    ABOUT_DTYPES,
    Call,
    body_of,
    called,
    contexts_of,
)
from halfstep._tools.user_code import Place, is_users

Casts = Mapping[str, torch.dtype]
"""The dtypes of expressions, by their text."""
Edits = dict[ast.AST, list[ast.stmt]]
"""What stands in place of statements."""

_LEFT = 4
"""The most turns of a loop that are evaluated after the failing one; one of a training loop."""
_SECONDS = 10.0
"""The time after which nothing more is evaluated."""
_CONTEXTS = (torch_autocast, Region, torch.no_grad, torch.enable_grad, nullcontext)
_OF_LOOPS: tuple[Any, ...] = (list, tuple, dict, range, enumerate, zip, Tensor, nn.ModuleList)
_OF_LOOPS += (nn.Sequential, type({}.items()), type({}.values()), type({}.keys()))
_OF_LISTS = ("append", "extend", "insert", "pop")
_OF_CTX = ("save_for_backward", "mark_non_differentiable", "set_materialize_grads")
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_UNKNOWN = object()


class Change(NamedTuple):
    """Casts within a part of a statement."""

    statement: ast.stmt
    within: ast.AST
    casts: Casts


class _Fails(Exception):  # noqa: N818
    def __init__(self, frame: _Frame, statement: ast.stmt) -> None:
        self.statement = statement
        self.where = f"line {statement.lineno}"
        named = [*replace(frame, other=statement).tensors()]
        self.operands = [each.name for each in named]


class _Jump(Exception):  # noqa: N818
    """A ``continue`` or a ``break``."""

    def __init__(self, statement: ast.stmt) -> None:
        self.statement = statement


def _ours(context: Any) -> Any:
    """Return halfstep's autocast in place of ``torch.autocast``, or of what stands in for it."""
    if not _is_torchs(context):
        return context
    is_theirs = isinstance(context, torch_autocast)
    switches = switches_of(context) if is_theirs else settings_of(context).switches
    return autocast(switches.device, switches.dtype, enabled=switches.enabled)


def _is_torchs(context: Any) -> bool:
    return isinstance(context, (torch_autocast, Region)) and type(context) not in (Region, autocast)


# --- evaluation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Run:
    """What the frames of an evaluation share."""

    edits: Edits
    entered: Callable[[Any], Any]  # what is entered in place of a context
    decorators: Mapping[str, Callable[..., Any]]  # of the methods of each autograd.Function
    until: float
    attributes: dict[tuple[int, str], Any] = field(default_factory=dict)  # set since, by object


@dataclass(frozen=True, eq=False)
class _Frame(Call):
    """A copy of a frame, in which statements are evaluated."""

    all: _Run = None  # type: ignore[assignment]

    def value(self, node: ast.AST | None) -> Any:
        match node:
            case ast.Call(func=func):
                function, (args, named) = self.value(func), self.arguments(node)
                return self._called(node, function, args, named)
            case ast.ListComp(part, [ast.comprehension(target, of, [])]) | ast.GeneratorExp(
                part, [ast.comprehension(target, of, [])]
            ):
                inner, parts = replace(self, local={**self.local}), []
                for each in self.items(of):
                    inner._assign(target, each)
                    parts.append(inner.value(part))
                return parts
            case ast.Attribute(value=of, attr=name):
                owner = self.value(of)
                value = self.all.attributes.get(
                    (id(owner), name), (getattr(owner, name, _UNKNOWN),)
                )[0]
            case _:
                value = super().value(node)
        if value is _UNKNOWN:
            raise LookupError(node)
        return value

    def _called(self, node: ast.Call, function: Any, args: list[Any], named: dict[str, Any]) -> Any:
        of, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if name == "backward" and isinstance(loss := args[0] if args else of, Tensor):
            leaves = autograd.leaves_of([loss])
            torch.autograd.grad(loss.sum(), leaves, retain_graph=True, allow_unused=True)
            return None
        if name == "scale" and hasattr(of, "unscale_"):
            return args[0]
        is_written = name.endswith("_") if isinstance(of, Tensor) else name in _OF_LISTS
        if is_written and isinstance(of, (Tensor, list)) and isinstance(node.func, ast.Attribute):
            copied = of.clone() if isinstance(of, Tensor) else [*of]
            result = getattr(copied, name)(*args, **named)
            with suppress(LookupError):  # a result of a call
                self._assign(node.func.value, copied)
            return result
        is_context = isinstance(function, type) and issubclass(function, _CONTEXTS)
        is_read = isinstance(of, dict) and name in ("items", "values", "keys", "get")
        if is_context or is_read or name in _OF_CTX or self.can_call(node, function):
            return called(function, args, named)
        if function is checkpoint:
            function, *args = args
            named.pop("use_reentrant", None)
        if isinstance(function, nn.Sequential):
            for part in function:
                args = [self._called(node, part, args, {})]
            return args[0]
        if isinstance(of, type) and issubclass(of, torch.autograd.Function) and name == "apply":
            methods = {
                each: staticmethod(self._method(of, each)) for each in ("forward", "backward")
            }
            again = type(of.__name__, (torch.autograd.Function,), methods)
            return getattr(again, name)(*args)
        return self._users(function, args, named)

    def _method(self, function: type, name: str) -> Any:
        def method(*args: Any) -> Any:
            return self._users(getattr(function, name), [*args], {})

        decorator = self.all.decorators.get(name)
        return method if decorator is None else decorator(method)

    def _users(self, function: Any, args: list[Any], named: dict[str, Any]) -> Any:
        """Evaluate a function, or a module, of the user."""
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
        frame = _Frame(Place(function.__code__, 0, function.__globals__), local, None, self.all)
        returned = next(iter(frame.run(body_of(function.__code__)) or ()), None)
        if returned is _UNKNOWN:
            raise LookupError(function)
        return returned

    def run(self, statements: Sequence[ast.stmt]) -> tuple[Any] | None:
        """Evaluate statements; return what they return, in a tuple, and None if they do not."""
        for statement in statements:
            for each in self.all.edits.get(statement, [statement]):
                if time.monotonic() > self.all.until:
                    raise TimeoutError
                try:
                    returned = self._done_or_forgotten(each)
                except (RuntimeError, TypeError, ValueError) as error:
                    raise _Fails(self, statement) from error
                if returned is not None:
                    return returned
        return None

    def _done_or_forgotten(self, statement: ast.stmt) -> tuple[Any] | None:
        try:
            return self._done(statement)
        except Exception as error:
            if _is_raised(error):
                raise
        nodes = [*ast.walk(statement)][1:]
        is_loop = isinstance(statement, (ast.For, ast.While))
        jumps = ast.Return if is_loop else (ast.Return, ast.Continue, ast.Break)
        if any(isinstance(each, jumps) for each in nodes):
            raise LookupError(statement)
        if not any(isinstance(each, ast.stmt) for each in nodes):
            self._parts(statement)
        stored = (each.id for each in nodes if isinstance(each, ast.Name) and _is_stored(each))
        self.local.update(dict.fromkeys(stored, _UNKNOWN))
        return (_UNKNOWN,) if isinstance(statement, ast.Return) else None

    def _parts(self, node: ast.AST) -> None:
        """Evaluate the parts of code that is unknown."""
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.expr) and not isinstance(part, _SCOPES):
                try:
                    self.value(part)
                except Exception as error:
                    if _is_raised(error):
                        raise
                    self._parts(part)

    def _done(self, statement: ast.stmt) -> tuple[Any] | None:
        match statement:
            case ast.Return(value=value):
                return (None if value is None else self.value(value),)
            case ast.Assign(targets=targets, value=value):
                made = self.value(value)
                for target in targets:
                    self._assign(target, made)
            case ast.AnnAssign(target=target, value=ast.expr() as value):
                self._assign(target, self.value(value))
            case ast.AugAssign(target=target, op=op, value=value):
                before, result = self.value(target), self.value(ast.BinOp(target, op, value))
                is_tensor = isinstance(before, Tensor)
                self._assign(target, result.to(before.dtype) if is_tensor else result)
            case ast.If(test=test, body=body, orelse=other):
                return self.run(body if self.value(test) else other)
            case ast.For(target=target, iter=of, body=body, orelse=[]):
                for item in self.items(of):
                    self._assign(target, item)
                    try:
                        returned = self.run(body)
                    except _Jump as jump:
                        if isinstance(jump.statement, ast.Break):
                            return None
                        continue
                    if returned is not None:
                        return returned
            case ast.Continue() | ast.Break():
                raise _Jump(statement)
            case ast.With(items=items, body=body):
                with ExitStack() as stack:
                    for context in [self.value(item.context_expr) for item in items]:
                        if not isinstance(context, _CONTEXTS):
                            raise LookupError(context)
                        stack.enter_context(self.all.entered(context))
                    return self.run(body)
            case ast.Expr(value=value):
                self.value(value)
            case ast.Pass() | ast.Assert() | ast.FunctionDef() | ast.ClassDef() | ast.Import():
                pass
            case _:
                raise LookupError(statement)
        return None

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.local[name] = value
            case ast.Attribute(value=of, attr=name):
                owner = self.value(of)
                self.all.attributes[id(owner), name] = (value, owner)
            case ast.Tuple(elts=targets) | ast.List(elts=targets):
                for each, part in zip(targets, value, strict=True):
                    self._assign(each, part)
            case ast.Subscript(value=of, slice=key):
                whole = self.value(of)
                changed = whole.clone() if isinstance(whole, Tensor) else copy.copy(whole)
                changed[self.value(key)] = value
                self._assign(of, changed)
            case _:
                raise LookupError(target)

    def items(self, node: ast.expr) -> list[Any]:
        values = self.value(node)
        if isinstance(values, _OF_LOOPS):
            return [*values]
        raise LookupError(node)

    def rest(self, *, is_whole: bool) -> Iterator[tuple[ast.stmt, ast.stmt, bool]]:
        """Yield the statement of the call and those after it; in place of a loop, what is left.

        ``is_whole``: also those before it in its block, whose names have values already.
        """
        is_first = True
        for node, outer in pairwise([self.node or ast.Pass(), *self.around()]):
            for _, block in ast.iter_fields(outer):
                if isinstance(block, list) and node in block and isinstance(node, ast.stmt):
                    at = block.index(node)
                    for n, each in enumerate(block):
                        if n > at or (is_first and (n == at or is_whole)):
                            yield each, each, n < at
                    is_first = False
            if isinstance(outer, ast.While | ast.AsyncFor):
                return
            if isinstance(outer, ast.For):
                items = self.items(outer.iter)
                is_training = any(getattr(n, "attr", "") == "backward" for n in ast.walk(outer))
                left = 1 if is_training else _LEFT
                items = items[items.index(self.value(outer.target)) + 1 :][:left]
                yield outer, ast.For(outer.target, ast.Constant(items), outer.body, []), False  # type: ignore[arg-type]


def _is_raised(error: Exception) -> bool:
    """Return whether an error ends the evaluation: it is about dtypes, or one of the evaluation."""
    is_ours = isinstance(error, (_Fails, _Jump, TimeoutError))
    is_torchs = isinstance(error, (RuntimeError, TypeError, ValueError))
    return is_ours or (is_torchs and ABOUT_DTYPES.search(str(error)) is not None)


def _failure(
    calls: list[Call],
    number: int,
    until: float,
    edits: Edits,
    entered: Callable[[Any], Any] = lambda context: context,
    decorators: Mapping[str, Callable[..., Any]] = {},
) -> _Fails | None:
    """Evaluate the rest of a frame, and what it calls; return where it fails, if it does.

    It ends at code that cannot be evaluated. If a backward pass fails, the forward pass before it
    is evaluated again.
    """
    call = calls[number]
    frame = _Frame(call.place, {**call.local}, call.node, _Run(edits, entered, decorators, until))
    tensors = [value for value in call.local.values() if isinstance(value, Tensor)]
    is_inference = any(tensor.is_inference() for tensor in tensors)
    is_whole = any(each.place.code is autograd.ENGINE_CODE for each in calls[number:])
    try:
        for at, statement, is_before in frame.rest(is_whole=is_whole):
            with (
                torch.inference_mode(is_inference),
                torch.set_grad_enabled(not is_inference),
                ExitStack() as stack,
            ):
                for context in contexts_of([*calls[:number], replace(call, other=at)]):
                    if context.is_here:
                        stack.enter_context(entered(context.context))
                before = {**frame.local} if is_before else {}
                if frame.run([statement]) is not None:
                    return None
                unknown = {name for name, value in frame.local.items() if value is _UNKNOWN}
                frame.local.update((name, before[name]) for name in unknown & before.keys())
    except _Fails as failure:
        return failure
    except Exception:  # also of an object of the user
        return None
    return None


# --- edits ----------------------------------------------------------------------------------------


def statement_of(call: Call) -> ast.stmt:
    nodes = [call.node, *call.around()]
    return next(node for node in nodes if isinstance(node, ast.stmt))


def _with_casts(changes: Sequence[Change]) -> Edits:
    """Return the statements of changes with their casts."""
    edits: Edits = {}
    for statement in dict.fromkeys(change.statement for change in changes):
        copies: dict[int, Any] = {}
        changed = copy.deepcopy(statement, copies)
        for change in changes:
            if change.statement is statement:
                _Cast(change.casts).generic_visit(copies[id(change.within)])
        edits[statement] = [changed]
    return edits


class _Cast(ast.NodeTransformer):
    def __init__(self, casts: Casts) -> None:
        self.casts = casts

    def visit(self, node: ast.AST) -> ast.AST:
        if isinstance(node, ast.Attribute) and node.attr.endswith("_"):
            return node  # what ``out.add_(x)`` writes to
        text = ast.unparse(node) if isinstance(node, ast.expr) else ""
        if text in self.casts and not _is_stored(node):
            return _to(node, self.casts[text])
        return self.generic_visit(node)


def _to(node: Any, dtype: torch.dtype) -> ast.Call:
    return ast.Call(ast.Attribute(node, "to"), [ast.Constant(dtype)], [])  # type: ignore[arg-type]


def cast_text(name: str, dtype: torch.dtype) -> str:
    is_sum = isinstance(ast.parse(name, mode="eval").body, (ast.BinOp, ast.UnaryOp, ast.IfExp))
    return f"({name}).to({dtype})" if is_sum else f"{name}.to({dtype})"


# --- the order of cures ---------------------------------------------------------------------------


class Cure(NamedTuple):
    """Casts of a line's expressions, a context around it, or decorators of a Function's methods."""

    text: str
    casts: Casts | None = None
    context: Callable[[], Any] | None = None
    decorators: Mapping[str, Callable[..., Any]] | None = None


def cast_cure(casts: Casts, line: Call) -> Cure:
    """Return casts of expressions of a call; its text names the call where they stand elsewhere."""
    node, statement = line.node or ast.Pass(), statement_of(line)
    if all(_count(name, node) == _count(name, statement) for name in casts):
        parts = (f"{cast_text(name, dtype)} in place of {name}" for name, dtype in casts.items())
        return Cure(", ".join(parts), casts)
    changed = _Cast(casts).generic_visit(copy.deepcopy(node))
    return Cure(f"{ast.unparse(changed)} in place of {ast.unparse(node)}", casts)


def _count(name: str, within: ast.AST) -> int:
    read = (n for n in ast.walk(within) if isinstance(n, ast.expr) and not _is_stored(n))
    return sum(ast.unparse(node) == name for node in read)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store)


def ordered(cures: list[Cure], calls: list[Call], user: Call, line: Call) -> list[str]:
    """Return cures of a line with those first with which the rest of the run does not fail.

    The run is evaluated, as far as it can be, from the outermost call on that fails as it did. A
    cure after which a later line fails is completed: by casts before the line or there, or by a
    context around an outer call.
    """
    numbers = [n for n, call in enumerate(calls[: calls.index(user) + 1]) if call.is_users]
    until = time.monotonic() + _SECONDS
    failures = ((n, _failure(calls, n, until, {})) for n in numbers)
    at, edited = statement_of(user), statement_of(line)
    first = next((n for n, each in failures if each and each.statement is at), None)
    if first is None:
        return [cure.text for cure in cures]
    fails = partial(_failure, calls, first, until)
    casts = (dtype for cure in cures for dtype in (cure.casts or {}).values())
    dtypes = {torch.float32, *casts, *(each.tensor.dtype for each in user.tensors())}
    outer = [statement_of(calls[number]) for number in numbers if first <= number][:-1]
    good, failing = list[str](), list[str]()
    for cure in cures:
        changes = [Change(edited, line.node or edited, cure.casts or {})]
        edits = _with_casts(changes) if cure.context is None else _inside(cure.context, edited)
        is_out = cure.decorators is not None and first == numbers[-1]  # of what is evaluated
        if is_out or (failure := fails(edits, decorators=cure.decorators or {})) is None:
            good.append(cure.text)
            continue
        if cure.decorators is not None:
            better = []
        elif cure.context is not None:
            lines = [each.lineno for each in outer if not fails(_inside(cure.context, each))]
            better = [f"{cure.text} at line {line}" for line in lines[:1]]
        else:
            better = _before(changes[0], fails)
            better = better or _completed(cure.text, changes, failure, fails, dtypes)
        good += better
        if cure.casts is not None or not better:
            failing.append(f"{cure.text} (then {failure.where} fails)")
    theirs = [c for c in contexts_of(calls) if c.is_here and _is_torchs(c.context)]
    if theirs and theirs[-1].text.startswith("line ") and not fails({}, _ours):
        place, _, text = theirs[-1].text.partition(", ")
        good.append(f"halfstep.autocast in place of {text.partition('(')[0]} at {place}")
    return [*good, *failing]


def _inside(context: Callable[[], Any], statement: ast.stmt) -> Edits:
    item = ast.withitem(ast.Constant(context()))
    return {statement: [ast.With([item], [copy.copy(statement)])]}


def _before(change: Change, fails: Callable[[Edits], _Fails | None]) -> list[str]:
    """Return the casts of variables before their line, if that is enough."""
    if not all(map(str.isidentifier, change.casts)):
        return []
    before = [ast.Assign([ast.Name(n)], _to(ast.Name(n), d)) for n, d in change.casts.items()]
    if fails({change.statement: [*before, change.statement]}):
        return []
    values = (cast_text(name, dtype) for name, dtype in change.casts.items())
    return [f"{', '.join(change.casts)} = {', '.join(values)} before this line"]


def _completed(
    text: str,
    changes: list[Change],
    failure: _Fails,
    fails: Callable[[Edits], _Fails | None],
    dtypes: set[torch.dtype],
    more: int = 3,
) -> list[str]:
    """Return a cure with casts at the lines that fail after it, if a few are enough."""
    at = failure.statement
    if any(change.statement is at for change in changes):
        return []
    for name, dtype in product(failure.operands, dtypes if more else ()):
        cast = f"{cast_text(name, dtype)} in place of {name} at {failure.where}"
        both = [*changes, Change(at, at, {name: dtype})]
        after = fails(_with_casts(both))
        if after is None:
            return [f"{text}; {cast}"]
        if found := _completed(f"{text}; {cast}", both, after, fails, dtypes, more - 1):
            return found
    return []
