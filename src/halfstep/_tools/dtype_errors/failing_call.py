"""Calls of a traceback: their syntax, the values of their names, and the origins of tensors."""

from __future__ import annotations

import ast
import builtins
import functools
import math
import re
import textwrap
import threading
import tomllib
import warnings
from collections import ChainMap
from collections.abc import Iterator
from concurrent.futures import thread as pool
from contextlib import nullcontext, suppress
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
from halfstep._common.formats import dtype_name
from halfstep._pytorch import dispatch, modules
from halfstep._pytorch.amp import Switches, switches_of
from halfstep._tools.user_code import (
    FUNCTIONS,
    OURS,
    Place,
    is_of_package,
    is_part_of,
    is_same_view,
    is_users,
    path_to,
    span_of,
    tree_of,
)

_LOOPS = (ast.For, ast.AsyncFor, ast.While)
_BINDING = (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr, ast.withitem, *_LOOPS)
CONTEXTS = (torch_autocast, Region, torch.no_grad, torch.enable_grad, nullcontext)
_MESSAGES = tomllib.loads(Path(__file__).with_name("messages.toml").read_text(encoding="utf-8"))
_DTYPES = re.compile("|".join(_MESSAGES["dtypes"]), re.IGNORECASE)
_INTEGERS, _ONE = (re.compile("|".join(_MESSAGES[about])) for about in ("integers", "one"))
_WANTED = {
    getattr(torch, name): re.compile("|".join(said)) for name, said in _MESSAGES["wanted"].items()
}
ERRORS = (RuntimeError, TypeError, ValueError, IndexError)
_BUILTINS: tuple[Any, ...] = (len, range, enumerate, zip, reversed, sorted, sum, min, max, all, any)
_BUILTINS += (abs, divmod, pow, round, bool, int, float, str, tuple, list, dict, isinstance, type)
_OPERATIONS = (ast.Compare, ast.UnaryOp, ast.BinOp, ast.Tuple, ast.List, ast.Dict)
_READ = (nn.Module.parameters, nn.Module.named_parameters, nn.Module.buffers)
_PURE: tuple[str, ...] = ("torch.ops.quantized", "torch.functional", "torch.nn.functional")
_PURE += ("torch.sparse", "torch.distributions")


def is_about_dtypes(error: BaseException) -> bool:
    is_said = _DTYPES.search(str(error)) or wanted_by(error)
    return isinstance(error, ERRORS) and is_said is not None


def wanted_by(error: BaseException) -> torch.dtype | None:
    """Return the dtype that an error wants of one operand, if it does."""
    return next((dtype for dtype, said in _WANTED.items() if said.search(str(error))), None)


def is_about_one(error: BaseException) -> bool:
    """Return whether an error is about one operand, whatever the others are."""
    return wanted_by(error) is not None or _ONE.search(str(error)) is not None


def is_about_integers(error: BaseException) -> bool:
    return wanted_by(error) is not None or _INTEGERS.search(str(error)) is not None


class Named(NamedTuple):
    """A tensor with its name, the expression that has it as its value, and what assigned it."""

    name: str
    tensor: Tensor
    node: ast.AST | None = None
    origin: str = ""  # empty if it is not known

    def __str__(self) -> str:
        dtype, shape = dtype_name(self.tensor.dtype), list(self.tensor.shape)
        return f"{self.name}: {dtype} {shape}" + (f", {self.origin}" if self.origin else "")


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
        parent = None if node is None else tree.parents.get(node)
        return parent if isinstance(parent, ast.Assign) and node in parent.targets else node

    @property
    def statement(self) -> ast.stmt | None:
        return next((n for n in self.around() if isinstance(n, ast.stmt)), None)

    @property
    def is_users(self) -> bool:
        return is_users(self.place.code.co_filename)

    @property
    def is_of_package(self) -> bool:
        return is_of_package(self.place.code.co_filename)

    @property
    def is_between(self) -> bool:
        """Whether it passes a call of the user on: halfstep, PyTorch's dispatcher and modes do."""
        return self.place.code.co_filename.startswith((OURS, *dispatch.DISPATCHER_FILES))

    @property
    def has_no_effects(self) -> bool:
        with suppress(Exception):
            return isinstance(self.node, ast.Call) and has_no_effects(self.value(self.node.func))
        return False

    @property
    def name_and_written(self) -> tuple[str, Tensor | None]:
        """The name of the op, and the tensor that it writes to, or to a copy of it."""
        match self.node:
            case ast.Assign(targets=[ast.Subscript(value=of)]):
                return "index_put_", self.value(of)
            case ast.Assign(targets=[ast.Attribute(value=of, attr="grad")]):
                return "grad", self.value(of)
            case ast.AugAssign(target=target, op=op):
                return f"{type(op).__name__.lower()}_", self.value(target)
            case ast.Call(func=func, keywords=keywords):
                function = self.value(func)
                name = getattr(function, "__name__", "").removeprefix("_")  # F.threshold
                is_written = name.endswith("_") or "scatter" in name or name.startswith("index_")
                out = next((self.value(each.value) for each in keywords if each.arg == "out"), None)
                return name, getattr(function, "__self__", None) if is_written else out
        return "matmul", None

    def around(self) -> list[ast.AST]:
        """Return it and the nodes around it, innermost first, up to its function."""
        around = tree_of(self.place.code.co_filename).around(self.node)
        return [] if self.node is None else [self.node, *around]

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
            case ast.IfExp(test=test, body=body, orelse=other):
                return self.value(body if self.value(test) else other)
            case ast.expr() if isinstance(node, _OPERATIONS):
                parts, code = _operation(node)
                return eval(code, {f"_{n}": self.value(part) for n, part in enumerate(parts)})
            case ast.Call(func=func):
                if self.can_call(node, function := self.value(func)):
                    args, named = self.arguments(node)
                    return called(function, args, named)
        raise LookupError(node)

    def can_call(self, node: ast.Call, function: Any) -> bool:
        """Return whether a call has no effects; a function of Python consumes no iterator."""
        given = [self.value(arg) for arg in node.args if isinstance(arg, ast.Name)]
        is_consumed = function in _BUILTINS and any(isinstance(each, Iterator) for each in given)
        is_written = any(keyword.arg == "out" for keyword in node.keywords)
        return has_no_effects(function) and not is_consumed and not is_written

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
        """Yield the real and complex tensors that the expression names, longest names first."""
        waiting: list[ast.AST] = []
        match self.node:
            case ast.Assign(
                targets=[ast.Subscript(value=of) | ast.Attribute(value=of) as target], value=given
            ):
                waiting = [of, given, *[target.slice for _ in [0] if hasattr(target, "slice")]]
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
                if with_integers or part.is_floating_point() or part.is_complex():
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


@functools.lru_cache(4096)
def _operation(node: ast.expr) -> tuple[list[ast.expr], CodeType]:
    """Return the operands of an operation, and its code with ``_0``, ``_1`` in their place."""
    parts = [part for part in ast.iter_child_nodes(node) if isinstance(part, ast.expr)]

    def named(part: Any) -> Any:
        if isinstance(part, list):
            return [*map(named, part)]
        return ast.Name(f"_{parts.index(part)}", ast.Load()) if part in parts else part

    made = type(node)(**{field: named(part) for field, part in ast.iter_fields(node)})
    made.ctx = ast.Load()  # type: ignore[attr-defined]
    return parts, compile(ast.fix_missing_locations(ast.Expression(made)), "", "eval")


def has_no_effects(function: Any) -> bool:
    """Return whether a call changes no tensor and no module: of PyTorch, or of Python."""
    if isinstance(function, nn.Module):
        return modules.can_be_called_again(function)
    module = getattr(function, "__module__", None) or ""
    is_known = isinstance(function, type) and issubclass(function, CONTEXTS)
    is_known |= isinstance(function, type) and module.startswith("torch.nn.modules")
    known = (torch.finfo, torch.autograd.grad, *_BUILTINS, *vars(math).values())
    if is_known or function in known or type(function).__name__ == "ufunc":  # of NumPy
        return True
    if getattr(function, "__name__", "_").endswith("_"):
        return False
    if isinstance(function, BuiltinFunctionType) and isinstance(function.__self__, Tensor):
        return True
    if isinstance(function, MethodType) and isinstance(function.__self__, Tensor):
        return function.__name__ in {"unflatten", "split", "norm", "unique", "stft"}  # in Python
    is_read = isinstance(function, MethodType) and function.__func__ in _READ
    return is_read or module.startswith(_PURE) or dispatch.is_torchs(function)


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
        kinds = {"parameter": owner.named_parameters(), "buffer": owner.named_buffers()}
        for kind, members in kinds.items():
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
    """Yield the lines of a function that bind a name, without those that another surely follows."""
    tree, before = tree_of(call.place.code.co_filename), [*_surely_before(call)]
    is_repeated = any(isinstance(each, _LOOPS) for each in call.around())
    end = float("inf") if is_repeated else getattr(call.node, "lineno", 0)
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


def function_of(code: CodeType) -> Any:
    """Return the node of a function, a lambda or a file; an empty file if it is not known."""
    tree = tree_of(code.co_filename)
    if code.co_name == "<module>":
        return tree.root
    functions = (node for node in tree.parents if isinstance(node, (*FUNCTIONS, ast.Lambda)))
    named = (f for f in functions if getattr(f, "name", "<lambda>") == code.co_name)
    lines = ((f, [f.lineno, *(d.lineno for d in getattr(f, "decorator_list", ()))]) for f in named)
    at = [function for function, starts in lines if code.co_firstlineno in starts]
    return at[0] if len(at) == 1 else ast.Module([], [])


def nodes_of(code: CodeType) -> Iterator[ast.AST]:
    """Yield the nodes of a function, or of a file, without those of the functions in it."""
    body = function_of(code).body
    rest: list[ast.AST] = [*body] if isinstance(body, list) else [body]
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
    function: ast.expr | None  # what a ``with`` of the user calls


def contexts_of(calls: list[Call]) -> list[Context]:
    """Return the autocast contexts around the last call, outermost first."""
    codes = [call.place.code for call in calls]
    files = (threading.__file__, pool.__file__)
    threads = [n for n, c in enumerate(codes) if c.co_filename in files and c.co_name == "run"]
    found = []
    for n, call in enumerate(calls):
        for text, made, node in _entered_by(call):
            switches = settings_of(made).switches if isinstance(made, Region) else switches_of(made)
            function = node.func if isinstance(node, ast.Call) else None
            found.append(Context(text, switches, made, n >= max(threads, default=0), function))
    return found


def _entered_by(call: Call) -> Iterator[tuple[str, torch_autocast | Region, ast.expr | None]]:
    match call.local:  # of PyTorch's decorator, or of halfstep's
        case {"autocast_instance": torch_autocast() as given, "func": function}:
            yield f"the decorator of {function.__name__}", given, None
        case {"settings": Settings() as settings, "function": function}:
            yield f"the decorator of {function.__name__}", Region(settings), None
    blocks = [each for each in call.around()[1:] if isinstance(each, (ast.With, ast.AsyncWith))]
    for node in (item.context_expr for block in reversed(blocks) for item in block.items):
        made = None
        with suppress(Exception), warnings.catch_warnings(action="ignore"):
            made = call.value(node)
        if isinstance(made, (torch_autocast, Region)) and call.is_users:
            text = f"line {node.lineno}, {textwrap.shorten(ast.unparse(node), 80)}"
            yield text, made, node
