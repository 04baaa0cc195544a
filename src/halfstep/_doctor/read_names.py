"""The names of a source file: their bindings, and the expressions they may stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import FunctionType, ModuleType
from typing import Any, TypeAlias

import torch

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Bindings: TypeAlias = "dict[str, list[tuple[ast.expr, NameScope] | None]]"


@dataclass(eq=False)
class NameScope:
    """The names of a file or a function.

    Attributes:
        node: The file or the function.
        parent: The scope around it.
        class_name: The class around the function; empty if there is none.
        bindings: The expressions bound to each name, with their scopes; None for unknown ones, as
            parameters and the targets of loops.
        functions: The functions that are defined in it.
    """

    node: ast.Module | Function
    parent: NameScope | None
    class_name: str = ""
    bindings: Bindings = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    def lookup(self, name: str) -> list[tuple[ast.expr, NameScope] | None]:
        """Return the possible bindings of a name that is used here."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.bindings:
                return scope.bindings[name]
            scope = scope.parent
        return []

    def function(self, name: str) -> Function | None:
        """Return the function that a name used here refers to."""
        scope: NameScope | None = self
        while scope is not None:
            if name in scope.functions:
                return scope.functions[name]
            if name in scope.bindings:
                return None
            scope = scope.parent
        return None


class FileNames:
    """All names of a file.

    Args:
        tree: The file.

    Attributes:
        imports: The full names of imported names: ``{"F": "torch.nn.functional"}``.
        scopes: Of the file and of each function.
        attributes: The bindings of ``self.scaler`` and other attributes.
        methods: By class and name.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.imports: dict[str, str] = {}
        self.scopes: dict[ast.AST, NameScope] = {}
        self.attributes: Bindings = {}
        self.methods: dict[tuple[str, str], Function] = {}
        self._scope = self.scopes[tree] = NameScope(tree, None)
        self._class = ""
        for statement in tree.body:
            self._visit(statement)
        self._bind_parameters(tree)

    def method(self, call: ast.expr, scope: NameScope) -> Function | None:
        """Return the method of this class that ``self.name`` refers to."""
        if isinstance(call, ast.Attribute) and dotted(call.value) == "self":
            return self.methods.get((scope.class_name, call.attr))
        return None

    # --- collecting -------------------------------------------------------------------------------

    def _visit(self, node: ast.AST) -> None:
        match node:
            case ast.Import() | ast.ImportFrom():
                self._import(node)
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                self._define(node)
                return
            case ast.ClassDef():
                outer, self._class = self._class, node.name
                self._children(node)
                self._class = outer
                return
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._bind(target, value)
            case ast.AnnAssign(target=target, value=value) if value is not None:
                self._bind(target, value)
            case ast.NamedExpr(target=target, value=value):
                self._bind(target, value)
            case (
                ast.AugAssign(target=target)
                | ast.For(target=target)
                | ast.AsyncFor(target=target)
                | ast.comprehension(target=target)
            ):
                self._bind(target, None)
            case ast.withitem(optional_vars=target) if target is not None:
                self._bind(target, None)
        self._children(node)

    def _children(self, node: ast.AST) -> None:
        for child in ast.iter_child_nodes(node):
            self._visit(child)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if isinstance(node, ast.ImportFrom):
                origin = f"{node.module or ''}.{alias.name}"
                self.imports[alias.asname or alias.name] = origin
            elif alias.asname:
                self.imports[alias.asname] = alias.name
            else:
                first = alias.name.partition(".")[0]
                self.imports[first] = first

    def _define(self, node: Function) -> None:
        outer = self._scope
        is_method = bool(self._class) and outer.class_name != self._class
        if is_method:
            self.methods[self._class, node.name] = node
        else:
            outer.functions[node.name] = node
        inner = NameScope(node, outer, self._class or outer.class_name)
        for decorator in node.decorator_list:
            self._visit(decorator)
        self._scope = self.scopes[node] = inner
        for statement in [node.args, *node.body]:
            self._visit(statement)
        self._scope = outer

    def _bind(self, target: ast.expr, value: ast.expr | None) -> None:
        if isinstance(target, ast.Tuple | ast.List):
            values: list[ast.expr] | list[None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                values = value.elts
            for part, part_value in zip(target.elts, values, strict=True):
                self._bind(part, part_value)
            return
        bound = None if value is None else (value, self._scope)
        if isinstance(target, ast.Name):
            self._scope.bindings.setdefault(target.id, []).append(bound)
        elif isinstance(target, ast.Attribute) and (name := dotted(target)):
            self.attributes.setdefault(name, []).append(bound)

    def _bind_parameters(self, tree: ast.Module) -> None:
        """Bind the arguments of functions that are called once; others stay unknown."""
        calls: dict[Function, list[tuple[ast.Call, NameScope]]] = {}
        for call, scope in self._all_calls(tree):
            called = self._called(call, scope)
            if called is not None:
                calls.setdefault(called, []).append((call, scope))
        for node, scope in self.scopes.items():
            if isinstance(node, ast.Module):
                continue
            uses = calls.get(node, [])  # type: ignore[call-overload]
            known = _passed(node, *uses[0]) if len(uses) == 1 else {}  # type: ignore[arg-type]
            for name in _parameter_names(node.args):  # type: ignore[attr-defined]
                scope.bindings.setdefault(name, []).append(known.get(name))

    def _called(self, call: ast.Call, scope: NameScope) -> Function | None:
        if isinstance(call.func, ast.Name):
            return scope.function(call.func.id)
        return self.method(call.func, scope)

    def _all_calls(self, tree: ast.Module) -> Iterator[tuple[ast.Call, NameScope]]:
        def below(node: ast.AST, scope: NameScope) -> Iterator[tuple[ast.Call, NameScope]]:
            for child in ast.iter_child_nodes(node):
                inner = self.scopes.get(child, scope)
                if isinstance(child, ast.Call):
                    yield child, inner
                yield from below(child, inner)

        return below(tree, self.scopes[tree])


def _parameter_names(args: ast.arguments) -> list[str]:
    plain = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    rest = [arg for arg in (args.vararg, args.kwarg) if arg is not None]
    return [arg.arg for arg in (*plain, *rest)]


def _passed(
    function: Function, call: ast.Call, scope: NameScope
) -> Mapping[str, tuple[ast.expr, NameScope]]:
    """Return the argument of each parameter in a call, as far as the source shows it."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        return {}
    positional = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    if positional[:1] == ["self"]:
        positional = positional[1:]
    passed = dict(zip(positional, call.args, strict=False))
    passed |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    return {name: (value, scope) for name, value in passed.items()}


def words_of(node: ast.AST) -> Iterator[str]:
    """Yield all names, attributes and keywords in use, without imports."""
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                yield word
            case ast.keyword(arg=str(word)):
                yield word


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` as text; empty for anything else than a name with attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""


# --- values ---------------------------------------------------------------------------------------


Written: TypeAlias = "tuple[ast.expr, NameScope]"
_MISSING: Any = object()


class Values:
    """Follows the expressions of a file to their possible values.

    Args:
        tree: The file.
        known: Objects that names of the file stand for in a running program.
    """

    def __init__(self, tree: ast.Module, known: Mapping[str, object]) -> None:
        self.names = FileNames(tree)
        self._known = known

    def candidates(self, node: ast.expr, scope: NameScope) -> list[Written | None]:
        """Return the expressions that ``node`` may stand for; None for an unknown one."""
        return list(self._follow(node, scope, frozenset()))

    def _follow(
        self, node: ast.expr, scope: NameScope, seen: frozenset[tuple[str, NameScope]]
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
        self,
        node: ast.Name | ast.Attribute,
        scope: NameScope,
        seen: frozenset[tuple[str, NameScope]],
    ) -> Iterator[Written | None]:
        text = dotted(node)
        first = text.partition(".")[0]
        is_local = first != "self" and first in scope.bindings and scope.parent is not None
        if not is_local and self.object(node) is not None:
            yield node, scope  # its current value, whatever the file assigns
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
        """Return the object that a name stands for; None if unknown."""
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

    def qualified(self, node: ast.expr, scope: NameScope) -> str:
        """Return the full name of an expression, ``torch.cuda.amp.autocast``; empty if unknown."""
        names = {self._qualified_as_written(*each) for each in self.candidates(node, scope) if each}
        return names.pop() if len(names) == 1 else ""

    def _qualified_as_written(self, node: ast.expr, scope: NameScope) -> str:
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

    def dtype(self, node: ast.expr, scope: NameScope) -> str:
        """Return the name of a dtype, ``"float16"``; empty if uncertain."""
        found = {
            self._dtype_as_written(*each) if each else "" for each in self.candidates(node, scope)
        }
        return found.pop() if len(found) == 1 else ""

    def _dtype_as_written(self, node: ast.expr, scope: NameScope) -> str:
        known = self.object(node)
        if isinstance(known, torch.dtype):
            return str(known).removeprefix("torch.")
        name = self._qualified_as_written(node, scope)
        dtype = getattr(torch, name.removeprefix("torch."), None) if name else None
        return str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else ""

    def constant(self, node: ast.expr, scope: NameScope) -> Any:
        """Return the value of a literal; None if uncertain."""
        found = [
            _literal(each[0], self.object(each[0])) if each else _MISSING
            for each in self.candidates(node, scope)
        ]
        first = found[0] if found else _MISSING
        is_certain = first is not _MISSING and all(value == first for value in found)
        return first if is_certain else None

    def local(self, call: ast.Call, scope: NameScope) -> Function | None:
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
    """Return the argument of a call with a name or at a position (-1: by name only)."""
    for keyword in call.keywords:
        if keyword.arg == name:
            return keyword.value
    if 0 <= position < len(call.args) and not any(
        isinstance(arg, ast.Starred) for arg in call.args[: position + 1]
    ):
        return call.args[position]
    return None
