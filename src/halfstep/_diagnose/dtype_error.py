"""Explanations of errors about dtypes: the operands of the failing call, and where they are from.

They are read from the frames of the traceback, so nothing has to be recorded before the error.
"""

from __future__ import annotations

import ast
import linecache
import re
import textwrap
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from halfstep._autocast import autocast
from halfstep._diagnose.user_code import is_users, span_of
from halfstep._numerics.formats import dtype_name

_ABOUT_DTYPES = re.compile(
    r"must have the same (dtype|scalar type)|to have (the )?same dtype|should be the same"
    r"|expected scalar type|expected dtype|to have scalar type|(D|d)types (match|must be the same)"
    r"|self.dtype to be equal to|Type promoting not supported|not the same dtype"
    r"|does not match weight dtype|parameter types mismatch|not implemented for '(Half|BFloat16)'"
)


@dataclass(frozen=True)
class Operand:
    """A tensor of the failing call.

    Attributes:
        name: Its name in the user's code, or else where the call was made.
        tensor: Its value.
        origin: Where it comes from; empty if that is not known.
    """

    name: str
    tensor: Tensor
    origin: str

    def __str__(self) -> str:
        dtype, shape = dtype_name(self.tensor.dtype), list(self.tensor.shape)
        return f"{self.name}: {dtype} {shape}" + (f", {self.origin}" if self.origin else "")


@dataclass(frozen=True)
class DtypeError:
    """An explanation of an error about dtypes.

    Attributes:
        where: The line of the user's code.
        text: Its text.
        operands: The floating-point tensors of the failing call.
        cures: Changes with which the call was tried again, and ran.
    """

    where: str
    text: str
    operands: tuple[Operand, ...]
    cures: tuple[str, ...]

    def __str__(self) -> str:
        lines = [f"the tensors that the error is about, at {self.where}:", f"> {self.text}"]
        lines += [f"  {operand}" for operand in self.operands]
        return "\n".join(lines + [f"tried, and it runs: {cure}" for cure in self.cures])


def explain(error: BaseException) -> DtypeError | None:
    """Explain an error of PyTorch about dtypes; None for others, or if no operand is known.

    The failing call is tried again with other dtypes, without gradients. Sync: that of the call.
    """
    if not isinstance(error, (RuntimeError, ValueError)) or not _ABOUT_DTYPES.search(str(error)):
        return None
    calls = [*_calls(error.__traceback__)]
    users = [call for call in calls if is_users(call.frame.f_code.co_filename)]
    if not users:
        return None
    user = users[-1]
    # The innermost one that names tensors: a check of PyTorch may raise, in Python.
    failing, found = next(
        ((call, found) for call in reversed(calls) if (found := call.floats())), (user, [])
    )
    operands = tuple(_operand(name, tensor, calls, users) for name, tensor in found)
    if not operands:
        return None
    is_about_one = re.search("not implemented for|weight dtype", str(error)) is not None
    if not is_about_one and len({operand.tensor.dtype for operand in operands}) == 1:
        return None
    cures = tuple(_cures(failing, operands)) if failing is calls[-1] else ()
    path = Path(user.frame.f_code.co_filename).name
    return DtypeError(f"{path}, line {user.line}", user.text, operands, cures)


# --- what the frames show -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Call:
    """The expression that a frame of a traceback was computing."""

    frame: FrameType
    line: int
    node: ast.AST | None

    @property
    def text(self) -> str:
        return linecache.getline(self.frame.f_code.co_filename, self.line).strip()

    def value(self, node: ast.AST) -> Any:
        """Return the value of a name or an attribute; raise ``LookupError`` for other code."""
        match node:
            case ast.Name(id=name):
                return {**self.frame.f_builtins, **self.frame.f_globals, **self.frame.f_locals}[
                    name
                ]
            case ast.Attribute(value=of, attr=attribute):
                with suppress(AttributeError):
                    return getattr(self.value(of), attribute)
            case ast.Constant(value=value):
                return value
            case ast.Subscript(value=of, slice=ast.Constant(value=key)):
                return self.value(of)[key]
        raise LookupError(ast.dump(node))

    def floats(self) -> list[tuple[str, Tensor]]:
        """Return the floating-point tensors that the expression names, each once."""
        found = {id(t): (name, t) for name, t in self.tensors() if t.is_floating_point()}
        return [*found.values()]

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors that the expression names, longest names first."""
        waiting: list[ast.AST] = [] if self.node is None else [self.node]
        while waiting:
            node = waiting.pop(0)
            value = None
            with suppress(LookupError, TypeError):
                value = self.value(node)
            if isinstance(value, Tensor):
                yield ast.unparse(node), value
            else:
                waiting += ast.iter_child_nodes(node)


def _calls(traceback: TracebackType | None) -> Iterator[_Call]:
    while traceback is not None:
        frame, line = traceback.tb_frame, traceback.tb_lineno
        span = span_of(frame.f_code, traceback.tb_lasti)
        yield _Call(frame, line, _node_at(frame.f_code.co_filename, span))
        traceback = traceback.tb_next


def _node_at(file: str, span: tuple[int | None, ...]) -> ast.AST | None:
    with suppress(SyntaxError, ValueError):
        tree = ast.parse("".join(linecache.getlines(file)))
        for node in ast.walk(tree):
            if isinstance(node, ast.expr):
                place = (node.lineno, node.end_lineno, node.col_offset, node.end_col_offset)
                if place == span:
                    parent = _statement_of(tree, node)
                    return node if parent is None else parent
    return None


def _statement_of(tree: ast.AST, target: ast.expr) -> ast.AST | None:
    """Return the assignment of which an expression is the target: ``x[index] = y``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and target in node.targets:
            return node
    return None


def _operand(name: str, tensor: Tensor, calls: list[_Call], users: list[_Call]) -> Operand:
    """Name an operand as the user's line does, else as a member of a module."""
    own = next((n for n, value in users[-1].tensors() if value is tensor), "")
    member, kind = _as_member(tensor, calls)
    if member:
        return Operand(own or member, tensor, f"a {kind}" + (f", {member}" if own else ""))
    return Operand(own or name, tensor, _as_variable(tensor, users))


def _as_member(tensor: Tensor, calls: list[_Call]) -> tuple[str, str]:
    """Return the name of a parameter or buffer in the outermost module of the traceback."""
    for call in calls:
        for owner in call.frame.f_locals.values():
            if not isinstance(owner, nn.Module):
                continue
            for kind, members in (
                ("parameter", owner.named_parameters()),
                ("buffer", owner.named_buffers()),
            ):
                for name, member in members:
                    if member is tensor:
                        return f"{name} of {type(owner).__name__}", kind
    return "", ""


def _as_variable(tensor: Tensor, users: list[_Call]) -> str:
    """Return the line that assigned a tensor to a variable, in the outermost function that did.

    Not if another line of the function may have done so.
    """
    for call in users:
        names = {name for name, value in call.frame.f_locals.items() if value is tensor}
        nodes = [*_nodes_of(call.frame.f_code)] if names else []
        bound = [each for each in nodes if _binds(each, names)]
        found = next((each for each in nodes if _assigns(each, names)), None)
        if found is not None and len(bound) == 1:
            return f"of line {found.lineno}: {textwrap.shorten(ast.unparse(found), 80)}"
    return ""


def _nodes_of(code: CodeType) -> Iterator[ast.AST]:
    """Yield the nodes of a function, or of a file, without those of the functions in it."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef)
    waiting: list[ast.AST] = []
    with suppress(SyntaxError, ValueError):
        tree = ast.parse("".join(linecache.getlines(code.co_filename)))
        waiting = [tree]
        if code.co_name != "<module>":
            waiting = [
                node
                for node in ast.walk(tree)
                if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
                and code.co_firstlineno in (node.lineno, *(d.lineno for d in node.decorator_list))
            ]
    for first in waiting[:1]:
        rest = [*ast.iter_child_nodes(first)]
        while rest:
            node = rest.pop(0)
            yield node
            if not isinstance(node, functions):
                rest += ast.iter_child_nodes(node)


def _binds(node: ast.AST, names: set[str]) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in names


def _assigns(node: ast.AST, names: set[str]) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and any(_binds(each, names) for each in node.targets)


# --- cures ----------------------------------------------------------------------------------------


def _cures(failing: _Call, operands: tuple[Operand, ...]) -> Iterator[str]:
    """Yield the changes of dtypes with which the call runs."""
    call = _again(failing)
    if call is None:
        return
    dtypes = [operand.tensor.dtype for operand in operands]
    fixed = [o.tensor.dtype for o in operands if isinstance(o.tensor, nn.Parameter)]
    wanted = fixed[0] if fixed else max(dtypes, key=lambda dtype: torch.finfo(dtype).bits)
    if len(set(dtypes)) == 1:
        wanted = torch.float32
    changed = [o for o in operands if o.tensor.dtype is not wanted]
    if changed and _runs(lambda: call(lambda t: t.to(wanted) if t.is_floating_point() else t)):
        yield ", ".join(f"{o.name}.to({wanted}) in place of {o.name}" for o in changed)
    lower = next((d for d in dtypes if d in (torch.float16, torch.bfloat16)), None)
    device = operands[0].tensor.device.type
    if lower is not None and len(set(dtypes)) > 1:

        def under_autocast() -> Any:
            with autocast(device, lower):
                return call(lambda t: t)

        if _runs(under_autocast):
            yield f'the call inside autocast("{device}", {lower})'


def _again(failing: _Call) -> Callable[[Callable[[Tensor], Tensor]], Any] | None:
    """Return the failing call as a function of what happens to its tensors, if it is simple."""
    try:
        match failing.node:
            case ast.Call(func=func, args=args, keywords=keywords):
                function = failing.value(func)
                values = [failing.value(arg) for arg in args]
                named = {k.arg: failing.value(k.value) for k in keywords if k.arg is not None}
                if len(named) != len(keywords):
                    return None
            case ast.BinOp(left=left, op=ast.MatMult(), right=right):
                function, named = torch.matmul, {}
                values = [failing.value(left), failing.value(right)]
            case _:
                return None
    except (LookupError, TypeError):
        return None
    # It would write to its argument, or may run code of the user.
    if "out" in named or getattr(function, "__name__", "_").endswith("_"):
        return None

    def call(change: Callable[[Tensor], Tensor]) -> Any:
        def changed(value: Any) -> Any:
            return change(value) if isinstance(value, Tensor) else value

        given = {name: changed(value) for name, value in named.items()}
        return function(*map(changed, values), **given)

    return call


def _runs(call: Callable[[], Any]) -> bool:
    with suppress(Exception), torch.no_grad():
        call()
        return True
    return False
