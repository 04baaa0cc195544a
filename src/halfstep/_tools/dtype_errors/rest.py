"""The rest of a run after a failing line, evaluated with a change of the code: does it fail again?

Statements and functions of the user are evaluated without effects: names and attributes are bound
in copies, and methods that write to a tensor write to a copy. What cannot be evaluated is unknown.
"""

from __future__ import annotations

import ast
import copy
import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep._autocast import Region, autocast
from halfstep._pytorch import autograd, modules
from halfstep._tools.dtype_errors.failing_call import (
    CONTEXTS,
    ERRORS,
    Call,
    called,
    contexts_of,
    function_of,
    has_no_effects,
    is_about_dtypes,
    is_about_integers,
    wanted_by,
)
from halfstep._tools.source import NAMES, value_with
from halfstep._tools.user_code import FUNCTIONS, Place, is_of_package, is_users

Edits = Mapping[Any, str]
"""The text in place of an expression, a statement or a function; {} in it is what stood there."""

_LEFT = 4  # turns of a loop at most after the failing one; one of a training loop
_SECONDS = 10.0  # of this thread, after which nothing more is evaluated
_OF_LOOPS: tuple[Any, ...] = (list, tuple, dict, range, enumerate, zip, Tensor, nn.ModuleList)
_OF_LOOPS += (nn.Sequential, type({}.items()), type({}.values()), type({}.keys()))
_OF_LISTS = ("append", "extend", "insert", "pop")
_OF_CTX = ("save_for_backward", "mark_non_differentiable", "set_materialize_grads")
_SCOPES = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_WITHOUT_TENSORS = (ast.Pass, ast.Assert, ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom)
_UNKNOWN = object()


def cast_to(dtype: torch.dtype) -> str:
    return {torch.int64: "{}.long()", torch.bool: "{}.bool()"}.get(dtype, f"{{}}.to({dtype})")


class _Fails(Exception):  # noqa: N818
    """An error about dtypes of a call, or of the backward pass of what it returned."""

    def __init__(self, call: Call, error: Exception) -> None:
        self.call, self.error, self.wanted = call, error, wanted_by(error)
        self.named = [*call.tensors(with_integers=is_about_integers(error))]
        self.statement: Any = None


class _Jump(Exception):  # noqa: N818
    """A ``continue`` or a ``break``, which is its argument."""


# --- evaluation -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Run:
    """What the frames of an evaluation share."""

    edits: Edits
    until: float = field(default_factory=lambda: time.thread_time() + _SECONDS)
    attributes: dict[tuple[int, str], Any] = field(default_factory=dict)  # set since, by object
    untried: list[tuple[str, ast.stmt]] = field(default_factory=list)  # with their files
    made: dict[Any, Call] = field(default_factory=dict)  # what made the result of a graph's node


@dataclass(frozen=True, eq=False)
class Frame(Call):
    """A copy of a frame, in which statements are evaluated."""

    all: Run = None  # type: ignore[assignment]

    def value(self, node: ast.AST | None) -> Any:
        try:
            value = self._value(node)
        except ERRORS as error:
            if not _is_raised(error):
                raise
            raise _Fails(self._differentiated(node) or self.at(node), error) from error
        is_made = isinstance(value, Tensor) and value.grad_fn is not None
        if is_made and isinstance(node, (ast.Call, ast.BinOp)):
            self.all.made.setdefault(value.grad_fn, self.at(node))
        text = None if node is None else self.all.edits.get(node)
        return value if text is None else value_with(text, value, self.local, self.place.names)

    def at(self, node: Any) -> Frame:
        return replace(self, other=node)

    def _value(self, node: ast.AST | None) -> Any:
        match node:
            case ast.Name(id=name) if name in NAMES and name not in self.place.names:
                value = NAMES[name]
            case ast.Call(func=func):
                function, (args, named) = self.value(func), self.arguments(node)
                return self._called(node, function, args, named)
            case ast.ListComp(part, [loop]) | ast.GeneratorExp(part, [loop]) if not loop.ifs:
                inner, parts = replace(self, local={**self.local}), []
                for each in self.items(loop.iter):
                    inner._assign(loop.target, each)
                    parts.append(inner.value(part))
                return parts
            case ast.DictComp(key, part, loops):
                return dict(self._value(ast.ListComp(ast.Tuple([key, part], ast.Load()), loops)))
            case ast.Attribute(value=of, attr=name):
                owner = self.value(of)
                known = getattr(owner, name, _UNKNOWN)
                value, _ = self.all.attributes.get((id(owner), name), (known, owner))
            case _:
                value = super().value(node)
        if value is _UNKNOWN:
            raise LookupError(node)
        return value

    def _called(self, node: ast.Call, function: Any, args: list[Any], named: dict[str, Any]) -> Any:
        of, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if name == "backward" and isinstance(loss := args[0] if args else of, Tensor):
            return _backward(loss)
        if name == "scale" and hasattr(of, "unscale_"):
            return args[0]
        is_written = name.endswith("_") if isinstance(of, Tensor) else name in _OF_LISTS
        if is_written and isinstance(of, (Tensor, list)) and isinstance(node.func, ast.Attribute):
            copied = of.clone() if isinstance(of, Tensor) else [*of]
            result = getattr(copied, name)(*args, **named)
            with suppress(LookupError):  # a result of a call
                self._assign(node.func.value, copied)
            return result
        if isinstance(out := named.get("out"), Tensor) and has_no_effects(function):
            result = function(*args, **named | {"out": out.clone()})
            self._assign(next(each.value for each in node.keywords if each.arg == "out"), result)
            return result
        reads = isinstance(of, dict | nn.ModuleDict) and name in ("items", "values", "keys", "get")
        if reads or name in _OF_CTX or self.can_call(node, function):
            return called(function, args, named)
        if function is checkpoint:
            function, *args = args
            named.pop("use_reentrant", None)
        if isinstance(function, nn.Sequential):
            for part in function:
                args = [self._called(node, part, args, {})]
            return args[0]
        if isinstance(of, type) and issubclass(of, torch.autograd.Function) and name == "apply":
            names = ("forward", "backward")
            methods = {each: staticmethod(self._method(of, each)) for each in names}
            again = type(of.__name__, (torch.autograd.Function,), methods)
            return getattr(again, name)(*args)
        return self.result_of(function, args, named)

    def _method(self, function: type, name: str) -> Any:
        def method(*args: Any) -> Any:
            return self.result_of(own, [*args], {})

        own = getattr(function, name)
        text = self.all.edits.get(function_of(own.__code__), "")
        return value_with(text.partition("\n")[0][1:], None)(method) if text else method

    def result_of(self, function: Any, args: list[Any], named: dict[str, Any]) -> Any:
        """Evaluate a function, or a module, of the user."""
        if isinstance(function, nn.Module):
            if modules.has_forward_hooks(function):
                raise LookupError(function)
            function = function.forward
        if isinstance(function, partial):
            args, named = [*function.args, *args], function.keywords | named
            function = function.func
        if isinstance(function, MethodType):
            function, args = function.__func__, [function.__self__, *args]
        function = autograd.without_grad_mode(function)
        if not isinstance(function, FunctionType) or not is_users(function.__code__.co_filename):
            raise LookupError(function)
        given = inspect.signature(function, follow_wrapped=False).bind(*args, **named)
        given.apply_defaults()
        cells = (cell.cell_contents for cell in function.__closure__ or ())
        local = dict(zip(function.__code__.co_freevars, cells, strict=True)) | given.arguments
        place = Place(function.__code__, 0, function.__globals__)
        frame = replace(self, place=place, local=local, other=None)
        node = function_of(function.__code__)
        body = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
        returned = next(iter(frame.run(body) or ()), None)
        if returned is _UNKNOWN or not body:
            raise LookupError(function)
        return returned

    def run(self, statements: Sequence[ast.stmt]) -> tuple[Any] | None:
        """Evaluate statements; return what they return, in a tuple, and None if they do not."""
        for statement in statements:
            text = self.all.edits.get(statement)
            for each in [statement] if text is None else _statements_with(text, statement):
                if time.thread_time() > self.all.until:
                    raise TimeoutError
                try:
                    returned = self._done_or_forgotten(each)
                except (*ERRORS, _Fails) as error:
                    end = error if isinstance(error, _Fails) else _Fails(self.at(statement), error)
                    end.statement = end.statement or statement
                    raise end from error
                if returned is not None:
                    return returned
        return None

    def _differentiated(self, node: ast.AST | None) -> Call | None:
        """Return the call that a node of a failing backward pass is of which mixes dtypes."""
        if not _is_backward(node):
            return None
        named = [*self.at(node).tensors()]
        waiting: list[tuple[Any, Call | None]] = [(each.tensor.grad_fn, None) for each in named]
        seen = {None}
        for of, made in waiting:
            if of not in seen:
                seen.add(of)
                saved = (t.dtype for t in autograd.saved_by(of).values() if t.is_floating_point())
                made = self.all.made.get(of, made)
                if len({*saved}) > 1:
                    return made
                waiting += [(each, made) for each, _ in of.next_functions]
        return None

    def _done_or_forgotten(self, statement: ast.stmt) -> tuple[Any] | None:
        try:
            return self._done(statement)
        except Exception as error:
            if _is_raised(error):
                raise
        if hasattr(statement, "lineno"):  # or else it was made here, of others
            self.all.untried.append((self.place.code.co_filename, statement))
        nodes = [*ast.walk(statement)][1:]
        is_loop = isinstance(statement, (ast.For, ast.While))
        jumps = ast.Return if is_loop else (ast.Return, ast.Continue, ast.Break)
        if any(isinstance(each, jumps) for each in nodes):
            raise LookupError(statement)
        if not any(isinstance(each, ast.stmt) for each in nodes):
            self._parts(statement)
        names = (each for each in nodes if isinstance(each, ast.Name))
        self.local.update({n.id: _UNKNOWN for n in names if isinstance(n.ctx, ast.Store)})
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
                if isinstance(before, Tensor):  # which does not hold each result
                    result = before.clone().zero_().add_(result)
                self._assign(target, result)
            case ast.If(test=test, body=body, orelse=other):
                return self.run(body if self.value(test) else other)
            case ast.For(target=target, iter=of, body=body, orelse=[]):
                for item in self.items(of):
                    self._assign(target, item)
                    try:
                        returned = self.run(body)
                    except _Jump as jump:
                        if isinstance(jump.args[0], ast.Break):
                            return None
                        continue
                    if returned is not None:
                        return returned
            case ast.Continue() | ast.Break():
                raise _Jump(statement)
            case ast.With(items=items, body=body):
                with ExitStack() as stack:
                    for context in [self.value(item.context_expr) for item in items]:
                        if not isinstance(context, CONTEXTS):
                            raise LookupError(context)
                        stack.enter_context(context)
                    return self.run(body)
            case ast.Expr(value=value):
                self.value(value)
            case _ if not isinstance(statement, _WITHOUT_TENSORS):
                raise LookupError(statement)
        return None

    def _assign(self, target: ast.expr, value: Any) -> None:
        match target:
            case ast.Name(id=name):
                self.local[name] = value
            case ast.Attribute(value=of, attr=name):
                owner = self.value(of)
                if isinstance(owner, Tensor) and name == "grad":
                    owner.detach().requires_grad_().grad = value
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
        for node, outer in pairwise(self.around()):
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


def _statements_with(text: str, statement: ast.stmt) -> list[ast.stmt]:
    """Return an edited statement: with others before it, or in a ``with``."""
    *before, last = ast.parse(text.replace("{}", "pass")).body
    inner = copy.copy(statement)  # which no edit replaces again
    if isinstance(last, ast.With):
        context = ast.Constant(value_with(ast.unparse(last.items[0].context_expr), None))
        return [*before, ast.With([ast.withitem(context)], [inner])]
    return [*before, inner]


def _backward(loss: Tensor) -> None:
    leaves = autograd.leaves_of([loss])
    torch.autograd.grad(loss.sum(), leaves, retain_graph=True, allow_unused=True)


def _is_raised(error: Exception) -> bool:
    """Return whether an error ends the evaluation: it is about dtypes, or one of the evaluation."""
    return isinstance(error, (_Fails, _Jump, TimeoutError)) or is_about_dtypes(error)


def _failure(calls: list[Call], number: int, run: Run) -> _Fails | None:
    """Evaluate the rest of a frame, and what it calls; return where it fails, if it does.

    It ends at code that cannot be evaluated. If a backward pass fails, the forward pass before it
    is evaluated again.
    """
    call = calls[number]
    frame = Frame(call.place, {**call.local}, call.node, run)
    outer = [Frame(each.place, each.local, each.other, run) for each in calls[:number]]
    is_inference = any(isinstance(v, Tensor) and v.is_inference() for v in call.local.values())
    is_whole = any(each.place.code is autograd.ENGINE_CODE for each in calls[number:])
    try:
        for at, statement, is_before in frame.rest(is_whole=is_whole):
            with torch.inference_mode(is_inference), ExitStack() as stack:
                stack.enter_context(torch.set_grad_enabled(not is_inference))
                for context in contexts_of([*outer, frame.at(at)]):
                    if context.is_here:
                        stack.enter_context(context.context)
                before, known = {**frame.local} if is_before else {}, len(run.untried)
                if frame.run([statement]) is not None:
                    return None
                unknown = {name for name, value in frame.local.items() if value is _UNKNOWN}
                frame.local.update((name, before[name]) for name in unknown & before.keys())
                if is_before or at is not statement:  # it has run, or only another turn is unknown
                    del run.untried[known:]
    except _Fails as failure:
        return failure
    except TimeoutError:
        raise
    except Exception:  # also of an object of the user
        return None
    return None


# --- the failing call ---------------------------------------------------------------------------


def evaluated(call: Call) -> Call:
    """Return a call whose values may be results of functions of the user."""
    return Frame(call.place, {**call.local}, call.node, Run({}))


def error_of(call: Call, edits: Edits, context: str = "") -> Exception | None:
    """Return the error of a call with edits or in a context, or of its backward pass, or None."""
    frame = Frame(call.place, {**call.local}, call.node, Run(edits))
    try:
        with value_with(context or "torch.no_grad()", None):
            if isinstance(call, Frame):
                with torch.enable_grad():
                    _backward(frame.value(call.node))
            elif isinstance(call.node, ast.stmt):
                text = edits.get(call.node)
                for each in [call.node] if text is None else _statements_with(text, call.node):
                    frame._done(each)
            else:
                frame.value(call.node)
    except Exception as error:
        return error.error if isinstance(error, _Fails) else error
    return None


def _occurrences(name: str, within: ast.AST) -> Iterator[ast.expr]:
    """Yield the outermost expressions of a text that code reads, without what it writes to."""
    for node in ast.iter_child_nodes(within):
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if is_stored and isinstance(node, ast.Subscript):
            yield from _occurrences(name, ast.Expr(node.slice))
        if is_stored or getattr(node, "attr", "").endswith("_") or isinstance(node, ast.stmt):
            continue
        if isinstance(node, ast.expr) and ast.unparse(node) == name:
            yield node
        else:
            yield from _occurrences(name, node)


def casts_of(names: Iterable[str], call: Call, text: str) -> Edits:
    """Return casts of names in a call; of ``h[0]``, of each part; of ``h``, before ``h += 1``."""
    casts: dict[ast.AST, str] = {}
    given = call.place.code.co_varnames[: call.place.code.co_argcount]
    for name in names:
        whole, within = name.rpartition("[")[0], call.node or ast.Pass()
        found = [*_occurrences(name, within)]
        casts |= dict.fromkeys(found, text)
        for node in _occurrences(whole, within) if whole and not found else ():
            if isinstance(value := call.value(node), (list, tuple)):
                casts[node] = f"{type(value).__name__}({text.format('each')} for each in {{}})"
        match within:
            case ast.AugAssign(ast.Name(id=target)) if target == name and name not in given:
                casts[within] = f"{name} = {text.format(name)}\n{{}}"
    return casts


# --- the order of cures ---------------------------------------------------------------------------


def ordered(
    cures: list[Edits], calls: list[Call], user: Call, line: Call
) -> list[tuple[Edits, str]]:
    """Return cures with which the rest of a run does not fail, or else all, and what runs then.

    The run is evaluated, as far as it can be, from the outermost call on that fails as it did. A
    cure after which a later line fails is completed: by casts before the line or there, or by a
    context around an outer call.
    """
    until, tried = Run({}).until, list[Run]()
    first, _ = next(_same_failures(calls, user, until), (None, None))
    if first is None:
        return [(cure, _ran(None, user, line)) for cure in cures]

    def fails(edits: Edits) -> _Fails | None:
        tried.append(Run(edits, until))
        return _failure(calls, first, tried[-1])

    texts = {text for cure in cures for text in cure.values()}
    dtypes = {torch.float32, *(each.tensor.dtype for each in user.tensors())}
    dtypes |= {each for each in (torch.float16, torch.bfloat16) if cast_to(each) in texts}
    outer = [c for c in calls[first : calls.index(user)] if c.is_users and not c.is_of_package]
    torchs = [c for c in contexts_of(calls) if type(c.context) not in (Region, autocast)]
    good, failing = list[Edits](), list[tuple[Edits, str]]()
    with suppress(TimeoutError):
        for cure in cures:
            is_out = calls[first] is user and any(isinstance(node, FUNCTIONS) for node in cure)
            if is_out or (failure := fails(cure)) is None:  # its function has been called before
                good.append(cure)
                continue
            what = "this call" if failure.call.statement is line.statement else "it"
            failing.append((cure, f"{what} runs (then line {failure.statement.lineno} fails)"))
            better = next((each for each in _wider(cure, line, outer) if not fails(each)), None)
            if better is None and all(isinstance(n, ast.expr) and "{}" in cure[n] for n in cure):
                better = _completed(cure, failure, fails, dtypes)
            good += [] if better is None else [better]
        for theirs in [context for context in torchs if context.is_here][-1:]:
            ours = {theirs.function: "halfstep.autocast"}
            good += [] if theirs.function is None or fails(ours) else [ours]
    by_edits = {id(run.edits): run for run in tried}
    ran = [(edits, _ran(by_edits.get(id(edits)), user, line)) for edits in good]
    return ran or failing or [(cure, _ran(None, user, line)) for cure in cures]


def _ran(run: Run | None, user: Call, line: Call) -> str:
    """Return what ran with a cure, and which later line was not tried; None: only the call ran."""
    statement, untried = line.statement, [] if run is None else run.untried
    at = (line.place.code.co_filename, getattr(statement, "lineno", 0))  # of a copy, if edited
    is_whole = user is line and line.node in (statement, getattr(statement, "value", None))
    if at in {(file, n.lineno) for file, n in untried} or not (run or is_whole):
        return "this call runs (the rest of the line was not tried)"
    # Those that only report, or end the step, have no part in the tensors.
    own = (n for file, n in untried if not is_of_package(file))
    matter = (n for n in own if not isinstance(n, ast.Expr) or _is_backward(n.value))
    changed = {getattr(node, "lineno", 0) for node in (run.edits if run else ())}
    for each in matter:
        what = "the change of line" if each.lineno in changed else "line"
        return f"it runs ({what} {each.lineno} was not tried)"
    return "it runs"


def differentiated(calls: list[Call], user: Call) -> Call | None:
    """Return the call that made what a failing backward pass cannot differentiate."""
    made = (each.call for _, each in _same_failures(calls, user, Run({}).until))
    return next((call for call in made if not _is_backward(call.node)), None)


def _same_failures(calls: list[Call], user: Call, until: float) -> Iterator[tuple[int, _Fails]]:
    """Yield the calls, outermost first, whose evaluation fails where the traceback ends."""
    failing = calls[: calls.index(user) + 1]
    with suppress(TimeoutError):
        for number in (n for n, call in enumerate(failing) if call.is_users):
            failure = _failure(calls, number, Run({}, until))
            if failure and failure.statement in [call.statement for call in failing[number:]]:
                yield number, failure


def _is_backward(node: Any) -> bool:
    return isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "backward"


def _wider(cure: Edits, line: Call, outer: list[Call]) -> Iterator[Edits]:
    """Yield what may replace a cure: a context around outer calls, casts before a line."""
    for text in cure.values():
        if text.startswith("with "):
            yield from ({call.statement: text} for call in outer)
    if all(map(_is_variable, cure)):
        values = {ast.unparse(node): text for node, text in cure.items()}
        values = {name: text.replace("{}", name) for name, text in values.items()}
        yield {line.statement: f"{', '.join(values)} = {', '.join(values.values())}\n{{}}"}


def _is_variable(node: Any) -> bool:
    is_item = isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant)
    return isinstance(node, ast.Name) or (is_item and isinstance(node.slice.value, str))


def _completed(
    edits: Edits,
    failure: _Fails,
    fails: Callable[[Edits], _Fails | None],
    dtypes: set[torch.dtype],
    more: int = 3,
) -> Edits | None:
    """Return a cure with casts at the lines that fail after it, if a few are enough."""
    dtypes = dtypes | {x.tensor.dtype for x in failure.named if x.tensor.is_floating_point()}
    dtypes = dtypes if failure.wanted is None else {failure.wanted}
    by_use = sorted(dtypes, key=lambda dtype: (cast_to(dtype) not in edits.values(), str(dtype)))
    for casts in _casts(failure, by_use):
        after = fails(both := {**edits, **casts})
        if after is None:
            return both
        is_elsewhere = after.call.node is not failure.call.node
        if more and is_elsewhere and (found := _completed(both, after, fails, dtypes, more - 1)):
            return found
    return None


def _casts(failure: _Fails, dtypes: list[torch.dtype]) -> Iterator[Edits]:
    """Yield casts of one of the tensors of a call, or of all of them, to a dtype."""
    for dtype in dtypes:
        others = (each for each in failure.named if each.tensor.dtype is not dtype)
        wrong = [each.name for each in others if dtype.is_complex or not each.tensor.is_complex()]
        for names in dict.fromkeys([*((name,) for name in wrong), tuple(wrong)]):
            if casts := casts_of(names, failure.call, cast_to(dtype)):
                yield casts
