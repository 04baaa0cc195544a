"""The names of a source file: their bindings, and the expressions they may stand for."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import TypeAlias

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef
Written: TypeAlias = "tuple[ast.expr, NameScope]"  # an expression, and the scope of its names
Bindings: TypeAlias = "dict[str, list[Written | None]]"
"""The expressions bound to names; None for unknown ones, such as parameters and loop targets."""


@dataclass(eq=False)
class NameScope:
    node: ast.Module | Function
    parent: NameScope | None
    class_name: str = ""  # the class around the function
    bindings: Bindings = field(default_factory=dict)
    functions: dict[str, Function] = field(default_factory=dict)

    @cached_property
    def parameters(self) -> set[str]:
        """The names of the parameters, empty for a file."""
        if isinstance(self.node, ast.Module):
            return set()
        return {arg.arg for arg in ast.iter_child_nodes(self.node.args) if isinstance(arg, ast.arg)}

    def lookup(self, name: str) -> list[Written | None]:
        scope = self.where(name)
        return [] if scope is None else scope.bindings[name]

    def where(self, name: str) -> NameScope | None:
        """Return the scope that binds a name used here."""
        return next((each for each in self._outward() if name in each.bindings), None)

    def function(self, name: str) -> Function | None:
        for scope in self._outward():
            if name in scope.functions or name in scope.bindings:
                return scope.functions.get(name)
        return None

    def _outward(self) -> Iterator[NameScope]:
        scope: NameScope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


class FileNames:
    def __init__(self, tree: ast.Module) -> None:
        self.imports: dict[str, str] = {}  # full names: {"F": "torch.nn.functional"}
        self.scopes: dict[ast.AST, NameScope] = {}  # for the file and each function
        self.attributes: Bindings = {}  # of self.scaler and other attributes
        self.methods: dict[tuple[str, str], Function] = {}  # by class and name
        self.parts: dict[ast.AST, list[ast.AST]] = {}
        self.calls: dict[ast.Call, Function] = {}  # calls of functions of the file
        self.bases: dict[str, list[str]] = {}  # base classes in the file, by class
        self.inheriting: set[str] = set()  # classes with a base class in any file
        self._scope = self.scopes[tree] = NameScope(tree, None)
        self._class = ""
        for statement in tree.body:
            self._visit(statement)
        self._bind_parameters(tree)

    def called(self, call: ast.Call, scope: NameScope) -> Function | None:
        match call.func:
            case ast.Name(id=name):
                return scope.function(name)
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                return self._method(scope.class_name, name)
        return None

    def _method(self, class_name: str, name: str) -> Function | None:
        own = self.methods.get((class_name, name))
        if own is not None:
            return own
        inherited = (self._method(base, name) for base in self.bases.get(class_name, ()))
        return next((each for each in inherited if each is not None), None)

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
                names = [dotted(base) for base in node.bases]
                self.inheriting |= {node.name} if names else set()
                # Only classes that were read before, so that there are no cycles.
                self.bases[node.name] = [name for name in names if name in self.bases]
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
        """Bind the parameters of functions that are called once; others stay unknown."""
        uses: dict[Function, list[tuple[ast.Call, NameScope]]] = {}

        def find_calls(node: ast.AST, scope: NameScope) -> None:
            for child in ast.iter_child_nodes(node):
                inner = self.scopes.get(child, scope)
                if isinstance(child, ast.Call) and (called := self.called(child, inner)):
                    self.calls[child] = called
                    uses.setdefault(called, []).append((child, inner))
                find_calls(child, inner)

        find_calls(tree, self.scopes[tree])
        for scope in self.scopes.values():
            if isinstance(scope.node, ast.Module):
                continue
            known: dict[str, Written] = {}
            if len(uses.get(scope.node, ())) == 1:
                [(call, caller)] = uses[scope.node]
                passed = passed_to(scope.node, call)
                known = {name: (value, caller) for name, value in passed.items()}
            for arg in ast.iter_child_nodes(scope.node.args):
                if isinstance(arg, ast.arg):
                    scope.bindings.setdefault(arg.arg, []).append(known.get(arg.arg))


def passed_to(function: Function, call: ast.Call) -> dict[str, ast.expr]:
    """Return the argument of each parameter in a call, as far as the source shows it."""
    if any(isinstance(arg, ast.Starred) for arg in call.args):
        return {}
    positional = [arg.arg for arg in (*function.args.posonlyargs, *function.args.args)]
    if positional[:1] == ["self"]:
        positional = positional[1:]
    passed = dict(zip(positional, call.args, strict=False))
    return passed | {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def words_of(node: ast.AST) -> Iterator[str]:
    """Yield all names, attributes and keywords in use, without imports."""
    for inner in ast.walk(node):
        match inner:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word):
                yield word
            case ast.keyword(arg=str(word)):
                yield word


def dotted(node: ast.expr) -> str:
    """Return ``a.b.c`` as text, empty for anything but a name with attributes."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (before := dotted(node.value)):
        return f"{before}.{node.attr}"
    return ""
