"""What an expression may be, followed through imports, variables and parameters."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch

from halfstep._doctor.reading.scopes import Function, Names, Scope, dotted

Written: TypeAlias = "tuple[ast.expr, Scope]"
_MISSING: Any = object()


class Values:
    """Answers what expressions of a file may be.

    Args:
        tree: The file.
        known: Objects that names of the file are known to stand for, from a running program.
    """

    def __init__(self, tree: ast.Module, known: Mapping[str, object]) -> None:
        self.names = Names(tree)
        self._known = known

    def candidates(self, node: ast.expr, scope: Scope) -> list[Written | None]:
        """Return the expressions that ``node`` may stand for; None among them for anything else."""
        return list(self._follow(node, scope, frozenset()))

    def _follow(
        self, node: ast.expr, scope: Scope, seen: frozenset[tuple[str, Scope]]
    ) -> Iterator[Written | None]:
        match node:
            case ast.IfExp(body=body, orelse=orelse):
                yield from self._follow(body, scope, seen)
                yield from self._follow(orelse, scope, seen)
            case ast.BoolOp(values=values):
                for value in values:
                    yield from self._follow(value, scope, seen)
            case ast.NamedExpr(value=value):
                yield from self._follow(value, scope, seen)
            case ast.Name() | ast.Attribute():
                yield from self._follow_name(node, scope, seen)
            case _:
                yield node, scope

    def _follow_name(
        self, node: ast.Name | ast.Attribute, scope: Scope, seen: frozenset[tuple[str, Scope]]
    ) -> Iterator[Written | None]:
        text = dotted(node)
        first = text.partition(".")[0]
        is_local = first != "self" and first in scope.bindings and scope.parent is not None
        if not is_local and self.object(node) is not None:
            yield node, scope  # what it is at this moment, whatever the file has assigned
            return
        bound = (
            scope.lookup(text)
            if isinstance(node, ast.Name)
            else self.names.attributes.get(text, [])
        )
        if not bound:
            yield node, scope
        elif (text, scope) not in seen:
            for each in bound:
                if each is None:
                    yield None
                else:
                    yield from self._follow(*each, seen | {(text, scope)})

    def object(self, node: ast.expr) -> object:
        """Return the object that a name is known to stand for; None if it is not known."""
        if not self._known:
            return None
        first, *rest = dotted(node).split(".")
        found = self._known.get(first, _MISSING)
        for attribute in rest:
            if found is _MISSING:
                return None
            held = vars(found) if hasattr(found, "__dict__") else {}
            found = held.get(attribute, _MISSING)
        return None if found is _MISSING else found

    def qualified(self, node: ast.expr, scope: Scope) -> str:
        """Return the full name of what is named, ``torch.cuda.amp.autocast``; empty if unknown."""
        names = {self._qualified_as_written(*each) for each in self.candidates(node, scope) if each}
        return names.pop() if len(names) == 1 else ""

    def _qualified_as_written(self, node: ast.expr, scope: Scope) -> str:
        first, *rest = dotted(node).split(".")
        if first in self.names.imports:
            return ".".join([self.names.imports[first], *rest])
        known = self.object(node)
        if isinstance(known, ModuleType):
            return known.__name__
        if isinstance(known, type | FunctionType):
            return f"{known.__module__}.{known.__qualname__}"
        module = self._known.get(first)
        if isinstance(module, ModuleType):
            return ".".join([module.__name__, *rest])
        return ""

    def dtype(self, node: ast.expr, scope: Scope) -> str:
        """Return the name of a dtype, ``"float16"``; empty if it is not certain."""
        found = {
            self._dtype_as_written(*each) if each else "" for each in self.candidates(node, scope)
        }
        return found.pop() if len(found) == 1 else ""

    def _dtype_as_written(self, node: ast.expr, scope: Scope) -> str:
        known = self.object(node)
        if isinstance(known, torch.dtype):
            return str(known).removeprefix("torch.")
        name = self._qualified_as_written(node, scope)
        dtype = getattr(torch, name.removeprefix("torch."), None) if name else None
        return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else ""

    def constant(self, node: ast.expr, scope: Scope) -> Any:
        """Return a literal's value; None if it is not certain."""
        found = [
            _literal(each[0], self.object(each[0])) if each else _MISSING
            for each in self.candidates(node, scope)
        ]
        first = found[0] if found else _MISSING
        is_certain = first is not _MISSING and all(value == first for value in found)
        return first if is_certain else None

    def local(self, call: ast.Call, scope: Scope) -> Function | None:
        """Return the function of this file that a call runs."""
        if isinstance(call.func, ast.Name):
            return scope.function(call.func.id)
        return self.names.method(call.func, scope)


def _literal(node: ast.expr, known: object) -> Any:
    if isinstance(known, bool | int | float | str):
        return known
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, RecursionError):
        return _MISSING


def argument(call: ast.Call, name: str, position: int) -> ast.expr | None:
    """Return what a call passes under a name or at a position (-1: by name only)."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if 0 <= position < len(call.args) and not any(
        isinstance(arg, ast.Starred) for arg in call.args[: position + 1]
    ):
        return call.args[position]
    return None
