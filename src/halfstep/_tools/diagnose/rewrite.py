"""Rewriting of formulas in the user's source: one expression in place of a chain of calls."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

from halfstep._tools.diagnose.diagnosis import LineEdit
from halfstep._tools.diagnose.edits import row_name
from halfstep._tools.diagnose.source import Placed, Slot, Source, argument, last_name
from halfstep._tools.line import short_path
from halfstep._tools.trace.rows import grouped

_NAMES = {"exp": "exponent", "softmax": "logits", "sigmoid": "logits"}
"""The new names for arguments of functions."""
_SHORT = {
    *("len", "size", "dim", "numel", "int", "range", "arange", "unsqueeze", "squeeze", "view"),
    *("reshape", "flatten", "long", "float", "bool", "t", "transpose", "detach"),
}
"""The functions that an expression may call and be written twice."""
_BINDERS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module, *_BINDERS)


class ArgumentSlot(NamedTuple):
    """Argument of a call, by its position, name or place in the source."""

    call: Placed
    slot: Slot


class Rewrite(NamedTuple):
    """Expression that replaces a call."""

    root: Placed
    tree: ast.expr  # torch and F stand for the modules
    operands: dict[str, ArgumentSlot]  # the other names in it
    parts: list[Placed]  # calls that computed what it replaces


def is_written_out(operand: ArgumentSlot) -> bool:
    """Return whether an argument is a literal in the source, or is left to its default.

    A name may stand for another number in the next step.
    """
    source = None if operand.call.module else Source.of(operand.call.spot.line.file)
    call = None if source is None else source.node(operand.call.spot, operand.call.function)
    if not isinstance(call, ast.expr):
        return bool(operand.call.module)
    node = _argument(call, operand)
    parts = () if node is None else ast.walk(node)
    return all(not isinstance(part, (ast.Name, ast.Call, ast.Subscript)) for part in parts)


def rewritten(rewrites: list[Rewrite]) -> list[LineEdit] | None:
    """Return the edited statements, or None if a formula cannot be rewritten at one place."""
    found: list[LineEdit] = []
    for file, of_file in grouped(rewrites, lambda each: each.root.spot.line.file).items():
        source = Source.of(file)
        edits = None if source is None else _Rewriting(source, file).edits(of_file)
        if edits is None:
            return None
        found += edits
    return found


def in_words(rewrite: Rewrite) -> str:
    """Describe a rewriting that cannot be made at one place in the source."""
    line = rewrite.root.spot.line
    source = Source.of(line.file)
    text, names = (None, {}) if source is None else _Rewriting(source, line.file).words(rewrite)
    where = "".join(
        f", where {name} is what {row_name(call.function)} at "
        f"{short_path(call.spot.line.file)}:{call.spot.line.number} is given"
        for name, call in names.items()
    )
    return (
        f"in place of {row_name(rewrite.root.function)} at {short_path(line.file)}:{line.number}, "
        f"use {text or ast.unparse(rewrite.tree)}{where}"
    )


class _Rewriting:
    def __init__(self, source: Source, file: str) -> None:
        self._source, self._file = source, file
        nodes = list(ast.walk(source.tree))
        self._parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
        self._names = {node.id for node in nodes if isinstance(node, ast.Name)}
        self._hoisted: dict[ast.expr, ast.Name] = {}

    def edits(self, rewrites: list[Rewrite]) -> list[LineEdit] | None:
        return self._source.edited() if all(map(self._put, rewrites)) else None

    def words(self, rewrite: Rewrite) -> tuple[str, dict[str, Placed]]:
        """Return the expression, and the calls that are given what its new names stand for."""
        names: dict[str, ast.expr | None] = {}
        calls: dict[str, Placed] = {}
        for name, operand in rewrite.operands.items():
            is_here = operand.call.spot.line == rewrite.root.spot.line
            node = self._node(operand.call) if is_here else None
            names[name] = None if node is None else _argument(node, operand)
            if names[name] is None:
                new = self._new_name(operand.call.function)
                names[name], calls[new] = ast.Name(new), operand.call
        return _written(rewrite, names), calls

    def _put(self, rewrite: Rewrite) -> bool:
        """Put an expression in place of a call; return whether it can be written there."""
        root = self._node(rewrite.root)
        names = _modules_in(self._source.tree)
        if root is None:
            return False
        for part in rewrite.parts:
            node = self._node(part)
            if node is None or not self._is_before(node, root):
                return False
        for name, operand in rewrite.operands.items():
            uses = [n for n in ast.walk(rewrite.tree) if isinstance(n, ast.Name) and n.id == name]
            names[name] = self._operand(operand, root, is_used_once=len(uses) == 1)
        if None in names.values():
            return False
        return self._source.replace(root, _written(rewrite, names))

    def _operand(
        self, operand: ArgumentSlot, root: ast.expr, *, is_used_once: bool
    ) -> ast.expr | None:
        """Return an expression for an operand at the place of the root; None if there is none."""
        call = self._node(operand.call)
        node = None if call is None else _argument(call, operand)
        if call is None or node is None or node in self._hoisted:
            return None if node is None else self._hoisted.get(node)
        here, there = self._statement(call), self._statement(root)
        is_short = all(_is_short(each) for each in ast.walk(node))
        if here is there:
            is_usable = is_short or is_used_once
        else:
            is_usable = is_short and not self._is_rebound(node, here, there)
        if is_usable:
            return node
        return self._hoist(node, here, operand.call.function, is_kept=here is not there)

    def _hoist(
        self, node: ast.expr, statement: ast.stmt, function: str, *, is_kept: bool
    ) -> ast.expr | None:
        """Compute an expression before its statement, under a new name; return the name."""
        around = list(self._above(node))
        if hasattr(statement, "body") or any(
            isinstance(each, _BINDERS) for each in around[: around.index(statement)]
        ):
            return None
        name = self._new_name(function)
        self._hoisted[node] = ast.Name(name)
        is_put = self._source.insert_before(statement, f"{name} = {ast.unparse(node)}")
        if is_kept:
            is_put &= self._source.replace(node, name)
        return ast.Name(name) if is_put else None

    def _new_name(self, function: str) -> str:
        """Return a name that the file does not use, for an argument of a function."""
        base = _NAMES.get(row_name(function), "value")
        names = (base, *(f"{base}_{number}" for number in range(2, 1000)))
        name = next(each for each in names if each not in self._names)
        self._names.add(name)
        return name

    def _node(self, placed: Placed) -> ast.expr | None:
        if placed.module or placed.spot.line.file != self._file:
            return None
        node = self._source.node(placed.spot, placed.function)
        return node if isinstance(node, ast.expr) else None

    def _above(self, node: ast.AST) -> Iterator[ast.AST]:
        """Yield a node and the nodes around it, the innermost first."""
        while node in self._parents:
            yield node
            node = self._parents[node]
        yield node

    def _statement(self, node: ast.AST) -> ast.stmt:
        return next(each for each in self._above(node) if isinstance(each, ast.stmt))

    def _is_before(self, node: ast.expr, root: ast.expr) -> bool:
        """Return whether a node is always evaluated before another, in the same scope."""
        scopes = [next(n for n in self._above(e) if isinstance(n, _SCOPES)) for e in (node, root)]
        statement = self._statement(node)
        around = list(self._above(root))
        if scopes[0] is not scopes[1]:
            return False
        if statement in around:
            return statement is self._statement(root)
        fields = (value for _, value in ast.iter_fields(self._parents[statement]))
        block = next(each for each in fields if isinstance(each, list) and statement in each)
        return any(each in around for each in block[block.index(statement) :])

    def _is_rebound(self, node: ast.expr, here: ast.stmt, there: ast.stmt) -> bool:
        """Return whether a name in an expression has another value at a later statement."""
        read = {last_name(each) for each in ast.walk(node)} - {""}
        scope = next(each for each in self._above(here) if isinstance(each, _SCOPES))
        return any(
            last_name(each) in read and isinstance(getattr(each, "ctx", None), ast.Store)
            for each in ast.walk(scope)
            if here.lineno <= getattr(each, "lineno", 0) < there.lineno
        )


def _written(rewrite: Rewrite, names: dict[str, ast.expr | None]) -> str:
    return ast.unparse(_Written(names.get).visit(copy.deepcopy(rewrite.tree)))


def _is_short(node: ast.AST) -> bool:
    """Return whether a node may be computed once more than before."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in _SHORT
    return not isinstance(node, (ast.Await, ast.NamedExpr, ast.Yield, ast.YieldFrom))


def _argument(call: ast.expr, operand: ArgumentSlot) -> ast.expr | None:
    if isinstance(call, ast.Subscript):
        return call.slice if operand.slot == 1 else call.value
    if isinstance(operand.slot, str):
        keywords = call.keywords if isinstance(call, ast.Call) else []
        return next((keyword.value for keyword in keywords if keyword.arg == operand.slot), None)
    return argument(call, operand.slot, operand.call)


def _modules_in(tree: ast.AST) -> dict[str, ast.expr | None]:
    """Return expressions for ``torch`` and ``F`` by the names that a file gives them."""
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        for each in node.names if isinstance(node, (ast.Import, ast.ImportFrom)) else ():
            package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            if each.asname or package:
                names[package + each.name] = each.asname or each.name
            else:
                names[each.name.partition(".")[0]] = each.name.partition(".")[0]
    root = names.get("torch")
    functional = names.get("torch.nn.functional") or (root and f"{root}.nn.functional")
    texts = {"torch": root, "F": functional}
    return {
        name: None if text is None else ast.parse(text, mode="eval").body
        for name, text in texts.items()
    }


class Filled(ast.NodeTransformer):
    """Expression with others in place of its names."""

    def __init__(self, of_name: Callable[[str], ast.expr | None]) -> None:
        self._of_name = of_name

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._of_name(node.id) or node


class _Written(Filled):
    """Expression as it is written in a file: without two signs in a row."""

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        inner = node.operand
        is_twice = isinstance(inner, ast.UnaryOp) and type(inner.op) is type(node.op) is ast.USub
        return inner.operand if isinstance(inner, ast.UnaryOp) and is_twice else node
