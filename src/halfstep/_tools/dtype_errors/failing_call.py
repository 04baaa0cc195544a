"""Calls of a traceback: their syntax, the values of their names, and the origins of tensors."""

from __future__ import annotations

import ast
import builtins
import functools
import operator
import re
import textwrap
import threading
import warnings
from collections import ChainMap
from collections.abc import Callable, Iterator
from concurrent.futures import thread as pool
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FrameType, FunctionType, MethodType, TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names
from torch.nn.utils.rnn import PackedSequence

from halfstep._autocast import Region, Settings
from halfstep._autocast.access import settings_of
from halfstep._pytorch import dispatch, modules
from halfstep._pytorch.amp import Switches, switches_of
from halfstep._tools.user_code import (
    FUNCTIONS,
    Place,
    is_of_package,
    is_part_of,
    is_same_view,
    is_users,
    path_to,
    span_of,
    tree_of,
)

_OURS = f"{Path(__file__).parents[2]}/"
_BINDING = (
    ast.Assign,
    ast.AnnAssign,
    ast.AugAssign,
    ast.NamedExpr,
    ast.For,
    ast.AsyncFor,
    ast.withitem,
)
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
ABOUT_DTYPES = re.compile(
    r"\bsame (dtypes?|scalar type|type|datatype)\b|should be the same"
    r"|expected scalar type|expect.*\bdtype|Found dtype .* expected|to have scalar type"
    r"|[Dd]types (match|must be the same)"
    r"|self.dtype to be equal to|Type promoting not supported"
    r"|does not match (weight|mat2|input|b) dtype|parameter types mismatch|different dtypes"
    r"|not implemented for '(Half|BFloat16)'|Low precision dtypes not supported"
    r"|Unsupported dtype (Half|BFloat16)|must be either float or double dtype"
    r"|Expected both inputs to be|unsupported ScalarType BFloat16"
    r"|only supported for half, float and double"
    r"|to type c10::(Half|BFloat16) without overflow"
    r"|assign a gradient with dtype|can't be cast to the desired output type"
    r"|could not create a primitive descriptor",  # of oneDNN, for a state in another dtype
    re.IGNORECASE,
)
_OPERATORS: dict[type[ast.operator | ast.unaryop | ast.cmpop], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
    ast.MatMult: operator.matmul,
    ast.BitAnd: operator.and_,
    ast.BitOr: operator.or_,
    ast.USub: operator.neg,
    ast.Invert: operator.invert,
    ast.Not: operator.not_,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Is: operator.is_,
    ast.IsNot: operator.is_not,
    ast.In: lambda key, of: key in of,
    ast.NotIn: lambda key, of: key not in of,
}
_BUILTINS = (len, range, enumerate, zip, isinstance, int, float, tuple, list, min, max, sum, dict)
_READ = (nn.Module.parameters, nn.Module.named_parameters, nn.Module.buffers)
_PURE = ("torch.functional", "torch.nn.functional", "torch.sparse", "torch.distributions")


class Named(NamedTuple):
    """A tensor with its name, and the expression that has it as its value, if there is one."""

    name: str
    tensor: Tensor
    node: ast.AST | None = None


@dataclass(frozen=True, eq=False)
class Call:
    """The expression that a frame of a traceback was computing."""

    place: Place
    local: dict[str, Any]  # variables of the frame
    other: ast.expr | ast.stmt | None = None  # in place of the expression of the instruction

    @functools.cached_property
    def node(self) -> ast.expr | ast.stmt | None:
        """The expression, or the assignment of which it is the target: ``x[index] = y``."""
        tree = tree_of(self.place.code.co_filename)
        node = self.other or tree.at.get(span_of(self.place.code, self.place.instruction))
        parent = None if node is None else tree.parents[node]
        return parent if isinstance(parent, ast.Assign) and node in parent.targets else node

    @property
    def is_users(self) -> bool:
        return is_users(self.place.code.co_filename)

    @property
    def is_of_package(self) -> bool:
        return is_of_package(self.place.code.co_filename)

    @property
    def is_between(self) -> bool:
        """Whether it passes a call of the user on: halfstep, PyTorch's dispatcher and modes do."""
        return self.place.code.co_filename.startswith((_OURS, *dispatch.DISPATCHER_FILES))

    @property
    def has_no_effects(self) -> bool:
        with suppress(Exception):
            return isinstance(self.node, ast.Call) and has_no_effects(self.value(self.node.func))
        return False

    def around(self) -> list[ast.AST]:
        """Return the nodes around it, innermost first, up to its function."""
        return [*tree_of(self.place.code.co_filename).around(self.node)]

    def value(self, node: ast.AST | None) -> Any:
        """Return the value of an expression without effects; raise an error for other code."""
        match node:
            case ast.Name(id=name):
                return ChainMap(self.local, self.place.names, vars(builtins))[name]
            case ast.Attribute(value=of, attr=attribute):
                return getattr(self.value(of), attribute)
            case ast.Constant(value=value):
                return value
            case ast.Subscript(value=of, slice=key):
                whole = self.value(of)
                if isinstance(whole, (Tensor, list, tuple, dict, nn.Module)):
                    return whole[self.value(key)]  # type: ignore[index]
            case ast.Slice(lower=lower, upper=upper, step=step):
                return slice(*(part and self.value(part) for part in (lower, upper, step)))
            case ast.Tuple(elts=parts):
                return tuple(map(self.value, parts))
            case ast.List(elts=parts):
                return [*map(self.value, parts)]
            case ast.IfExp(test=test, body=body, orelse=other):
                return self.value(body if self.value(test) else other)
            case ast.Compare(left=left, ops=[op], comparators=[right]) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.value(left), self.value(right))
            case ast.UnaryOp(op=op, operand=of) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.value(of))
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](self.value(left), self.value(right))
            case ast.Call(func=func):
                if self.can_call(node, function := self.value(func)):
                    args, named = self.arguments(node)
                    return called(function, args, named)
        raise LookupError(node)

    def can_call(self, node: ast.Call, function: Any) -> bool:
        """Return whether a call has no effects; a function of Python consumes no iterator."""
        given = [self.value(arg) for arg in node.args if isinstance(arg, ast.Name)]
        is_consumed = function in _BUILTINS and any(isinstance(each, Iterator) for each in given)
        return has_no_effects(function) and not is_consumed

    def arguments(self, node: ast.Call) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        for arg in node.args:
            args += self.value(arg.value) if isinstance(arg, ast.Starred) else [self.value(arg)]
        named: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            named |= value if keyword.arg is None else {keyword.arg: value}
        return args, named

    def tensors(self, *, with_integers: bool = False) -> Iterator[Named]:
        """Yield the floating-point tensors that the expression names, longest names first."""
        waiting: list[ast.AST] = []
        match self.node:
            case ast.Assign(
                targets=[ast.Subscript(value=of) | ast.Attribute(value=of)], value=given
            ):
                waiting = [of, given]
            case ast.AST() as failing:
                waiting = [*ast.iter_child_nodes(failing)]
        seen: set[int] = set()
        while waiting:
            node, value = waiting.pop(0), None
            with suppress(Exception):
                value = self.value(node)
            found = [(ast.unparse(node), value)]
            if isinstance(value, PackedSequence):
                found = [(ast.unparse(node), value.data)]
            elif isinstance(value, dict):
                found = [(f"{ast.unparse(node)}[{key!r}]", part) for key, part in value.items()][:4]
            elif isinstance(value, (list, tuple)) and not isinstance(node, (ast.Tuple, ast.List)):
                found = [(f"{ast.unparse(node)}[{n}]", part) for n, part in enumerate(value[:4])]
            elif not isinstance(value, Tensor):
                waiting += ast.iter_child_nodes(node)
            for name, part in found:
                if not isinstance(part, Tensor) or id(part) in seen:
                    continue
                if with_integers or part.is_floating_point():
                    seen.add(id(part))
                    yield Named(name, part, node)

    def within(self, named: Named) -> Iterator[Named]:
        """Yield a tensor and those of which its expression is a view: ``x.T``, ``x[0].view(2)``."""
        yield named
        node = named.node
        while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call, ast.BinOp)):
            if isinstance(node, ast.BinOp):  # ``2 * x``
                node = node.right if isinstance(node.left, ast.Constant) else node.left
            else:
                node = node.func if isinstance(node, ast.Call) else node.value
            with suppress(Exception):
                value = self.value(node)
                if isinstance(value, Tensor) and value.dtype is named.tensor.dtype:
                    yield Named(ast.unparse(node), value, node)


def has_no_effects(function: Any) -> bool:
    """Return whether a call changes no tensor and no module: of PyTorch, or of Python."""
    if isinstance(function, nn.Module):
        return modules.can_be_called_again(function)
    if function in (torch.finfo, torch.autograd.grad, *_BUILTINS):
        return True
    if getattr(function, "__name__", "_").endswith("_"):
        return False
    module = getattr(function, "__module__", None) or ""
    if isinstance(function, BuiltinFunctionType):
        return dispatch.is_torchs(function) or isinstance(function.__self__, Tensor)
    if isinstance(function, MethodType) and isinstance(function.__self__, Tensor):
        return function.__name__ in {"unflatten", "split", "norm", "unique", "stft"}  # in Python
    if isinstance(function, MethodType) and function.__func__ in _READ:
        return True
    return isinstance(function, FunctionType | MethodType | type) and module.startswith(_PURE)


def called(function: Any, args: list[Any], named: dict[str, Any]) -> Any:
    """Call a function without effects; a module has copies of its buffers."""
    if isinstance(function, nn.Module):
        buffers = {name: buffer.clone() for name, buffer in function.named_buffers()}
        return torch.func.functional_call(function, buffers, tuple(args), named)
    return function(*args, **named)


def calls_of(traceback: TracebackType | None) -> list[Call]:
    """Return the calls of a traceback and of the frames around it, outermost first."""
    frames: list[tuple[FrameType, int]] = []
    outer = None if traceback is None else traceback.tb_frame.f_back
    while outer is not None:
        frames.insert(0, (outer, outer.f_lasti))
        outer = outer.f_back
    while traceback is not None:
        frames.append((traceback.tb_frame, traceback.tb_lasti))
        traceback = traceback.tb_next
    return [Call(Place(f.f_code, at, f.f_globals), f.f_locals) for f, at in frames]


# --- origins --------------------------------------------------------------------------------------


def member_of(tensor: Tensor, calls: list[Call]) -> tuple[str, str]:
    """Return the name of a parameter or buffer in the outermost module of the calls, and which."""
    owners = (value for call in calls for value in call.local.values())
    for owner in (value for value in owners if isinstance(value, nn.Module)):
        for kind, members in (
            ("parameter", owner.named_parameters()),
            ("buffer", owner.named_buffers()),
        ):
            for name, member in members:
                if is_same_view(tensor, member):
                    return f"{name} of {type(owner).__name__}", kind
    return "", ""


def origin_of(named: Named, users: list[Call]) -> str:
    """Return the line that assigned a tensor to a variable, in the outermost function that did.

    Empty if it is not known, or if more than two lines of the function may have done so.
    """
    for is_it in (is_same_view, is_part_of):  # of a view, the line of what it is a view of
        for call in users:
            known = {k: v for k, v in call.local.items() if not isinstance(v, nn.Module)}
            here = functools.partial(is_it, named.tensor)
            names = {name for name, value in known.items() if path_to(here, name, value, 3)}
            found = [*dict.fromkeys(_bindings(call, names) if names else ())]
            if 0 < len(found) < 3:
                return ", or ".join(found)
    match named.node:
        case ast.Attribute(value=of, attr=attribute):
            with suppress(Exception):
                methods = vars(type(users[-1].value(of))).values()
                codes = [method.__code__ for method in methods if isinstance(method, FunctionType)]
                found = [
                    _described(by, by.lineno)
                    for by in (node for code in codes for node in nodes_of(code))
                    if isinstance(by, ast.Assign)
                    and attribute in {getattr(target, "attr", None) for target in by.targets}
                ]
                return ", or ".join(found) if len(found) < 3 else ""
    return ""


def _bindings(call: Call, names: set[str]) -> Iterator[str]:
    """Yield the lines of a function that bind one of the names, as text.

    Those that another one surely follows are left out.
    """
    tree, before = tree_of(call.place.code.co_filename), [*_surely_before(call)]
    is_repeated = any(isinstance(each, _LOOPS) for each in call.around())
    end = float("inf") if is_repeated else call.place.line.number
    bound: dict[str, list[tuple[ast.AST, int]]] = {}
    for node in nodes_of(call.place.code):
        target = node
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            is_item = not isinstance(call.local.get(node.value.id), Tensor)  # ``batch["x"] = y``
            target = node.value if is_item else node
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if not is_stored or not isinstance(target, ast.Name) or target.id not in names:
            continue
        if target.lineno <= end:
            by = next((each for each in tree.around(node) if isinstance(each, _BINDING)), node)
            is_failing = by in call.around() and not isinstance(by, (*_LOOPS, ast.withitem))
            if not is_failing or any(isinstance(each, _LOOPS) for each in tree.around(by)):
                bound.setdefault(target.id, []).append((by, target.lineno))
                if target is not node:  # an item leaves the others as they are
                    before = [each for each in before if each is not by]
    for found in bound.values():
        found.sort(key=lambda each: each[1])
        last = max((n for n, (by, _) in enumerate(found) if by in before), default=0)
        for by, line in found[last:]:
            of = getattr(by, "value", None)
            if not isinstance(of, ast.Name) or of.id not in names:  # another name of the same
                yield _described(by, line)


def _surely_before(call: Call) -> Iterator[ast.AST]:
    """Yield the assignments that have run each time when a call runs, in the blocks around it."""
    for inner, outer in pairwise(call.around()):
        for _, block in ast.iter_fields(outer):
            if isinstance(block, list) and inner in block:
                before = block[: block.index(inner)]
                yield from (n for n in before if isinstance(n, (ast.Assign, ast.AnnAssign)))


def _described(by: ast.AST, line: int) -> str:
    text = "with " * isinstance(by, ast.withitem) + ast.unparse(by).partition(":\n")[0]
    return f"of line {line}: {textwrap.shorten(text, 80)}"


def body_of(code: CodeType) -> list[ast.stmt]:
    """Return the statements of a function, or of a file; none if they are not known."""
    tree = tree_of(code.co_filename)
    if code.co_name == "<module>":
        return tree.root.body
    functions = (node for node in tree.parents if isinstance(node, FUNCTIONS))
    lines = ((f, [f.lineno, *(each.lineno for each in f.decorator_list)]) for f in functions)
    return next((f.body for f, starts in lines if code.co_firstlineno in starts), [])


def nodes_of(code: CodeType) -> Iterator[ast.AST]:
    """Yield the nodes of a function, or of a file, without those of the functions in it."""
    rest: list[ast.AST] = [*body_of(code)]
    while rest:
        node = rest.pop(0)
        yield node
        if not isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            rest += ast.iter_child_nodes(node)


# --- autocast around the call ---------------------------------------------------------------------


class Context(NamedTuple):
    """An autocast that the calls have entered."""

    text: str
    switches: Switches
    context: torch_autocast | Region  # to be entered again
    is_here: bool  # whether the failing call ran in the same thread


def contexts_of(calls: list[Call]) -> list[Context]:
    """Return the autocast contexts around the last call, outermost first."""
    codes = [call.place.code for call in calls]
    files = (threading.__file__, pool.__file__)
    threads = [n for n, c in enumerate(codes) if c.co_filename in files and c.co_name == "run"]
    found = []
    for n, call in enumerate(calls):
        for text, made in _entered_by(call):
            switches = settings_of(made).switches if isinstance(made, Region) else switches_of(made)
            found.append(Context(text, switches, made, n >= max(threads, default=0)))
    return found


def _entered_by(call: Call) -> Iterator[tuple[str, torch_autocast | Region]]:
    match call.local:  # of PyTorch's decorator, or of halfstep's
        case {"autocast_instance": torch_autocast() as given, "func": function}:
            yield f"the decorator of {function.__name__}", given
        case {"settings": Settings() as settings, "function": function}:
            yield f"the decorator of {function.__name__}", Region(settings)
    blocks = [each for each in call.around() if isinstance(each, (ast.With, ast.AsyncWith))]
    for node in (item.context_expr for block in reversed(blocks) for item in block.items):
        made = None
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            kind = call.value(node.func) if isinstance(node, ast.Call) else None
            if isinstance(kind, type) and issubclass(kind, (torch_autocast, Region)):
                assert isinstance(node, ast.Call)
                args, named = call.arguments(node)
                made = kind(*args, **named)
            else:
                made = call.value(node)
        if isinstance(made, (torch_autocast, Region)) and call.is_users:
            yield f"line {node.lineno}, {textwrap.shorten(ast.unparse(node), 80)}", made
