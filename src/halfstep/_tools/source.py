"""Changes of the user's source, as the statements to paste.

A change replaces an expression of the syntax tree, or puts lines around a statement. What is around
it, and what of it does not change, stays as it was written.
"""

from __future__ import annotations

import ast
import copy
import functools
import json
import linecache
import re
from collections import ChainMap
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names

from halfstep._autocast import autocast, custom_bwd, custom_fwd
from halfstep._tools.line import LineEdit
from halfstep._tools.user_code import FUNCTIONS, tree_in, tree_of

NAMES = {
    "torch": SimpleNamespace(**{**vars(torch), "autocast": torch_autocast}),
    "F": torch.nn.functional,
    "halfstep": SimpleNamespace(autocast=autocast, custom_fwd=custom_fwd, custom_bwd=custom_bwd),
}
"""What the names of modules stand for in the text of a change."""
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple)
_AS_WRITTEN = (*_ATOMS[:-1], ast.Constant, ast.Dict, ast.JoinedStr, ast.ListComp)
_Put = tuple[int, int, str]  # start, end, new text
_IMPORTS = (ast.Import, ast.ImportFrom)
_MODULES = re.compile(r"\b(torch|F|halfstep)(?=\.)")


def value_with(text: str, value: Any, *names: Mapping[str, Any]) -> Any:
    """Return the value of a text, among names, that takes the place of a value."""
    known = NAMES | {"_": value}
    return eval(text.format("_"), known, ChainMap(known, *names))  # type: ignore[arg-type]


class Filled(ast.NodeTransformer):
    """Expression with others in place of its names, without two signs in a row."""

    def __init__(self, of_name: Callable[[str], ast.expr | None]) -> None:
        self._of_name = of_name

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self._of_name(node.id) or node

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        self.generic_visit(node)
        match node:
            case ast.UnaryOp(ast.USub(), ast.UnaryOp(ast.USub(), operand)):
                return operand
        return node


class Source:
    """Source of a file, and the changes to make in it.

    In a text, ``{}`` is what stood there, and ``torch``, ``F`` and ``halfstep`` are the modules, by
    whatever name the file has them; those that it lacks it imports.
    """

    def __init__(self, file: str) -> None:
        self.file, self.tree = file, tree_of(file)
        lines = [line.encode() for line in linecache.getlines(file)]
        self._starts, self._bytes = [0, *accumulate(map(len, lines))], b"".join(lines)
        self._changes: dict[ast.AST, list[Callable[[Any], ast.expr]]] = {}
        self._lines: dict[ast.stmt, list[str]] = {}  # to put around statements

    @functools.cached_property
    def modules(self) -> dict[str, str]:
        """The expressions for the modules that the file imports."""
        names: dict[str, str] = {}
        for node in self.tree.parents:
            for each in node.names if isinstance(node, _IMPORTS) else ():
                package = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
                name = each.name if each.asname or package else each.name.partition(".")[0]
                names[package + name] = each.asname or name
        at = names.get("torch.nn.functional", f"{names.get('torch', '')}.nn.functional")
        return names if at.startswith(".") else names | {"F": at}

    def put(self, node: ast.AST | None, text: str) -> bool:
        """Put a text in place of an expression or a statement; return whether that is possible."""
        known = {"F": "torch.nn.functional", **self.modules}
        text = _MODULES.sub(lambda name: known.get(name[0], name[0]), text)
        imports = [each for each in self.tree.root.body if isinstance(each, _IMPORTS)]
        for name in sorted(({"torch", "halfstep"} - known.keys()) & {*re.findall(r"\w+", text)}):
            first = next((e for e in imports if getattr(e, "module", "") != "__future__"), None)
            if first is None:
                return False
            self.modules[name] = name
            self.put_lines(first, f"import {name}\n{{}}")
        if isinstance(node, ast.stmt):
            return self.put_lines(node, text)
        tree = ast.parse(text.format("_"), mode="eval").body
        return isinstance(node, ast.expr) and self.change(
            node, lambda now: Filled({"_": now}.get).visit(copy.deepcopy(tree))
        )

    def change(self, node: ast.AST, change: Callable[[Any], ast.expr]) -> bool:
        """Change an expression, after the changes that it has."""
        self._changes.setdefault(node, []).append(change)
        return True

    def put_lines(self, statement: ast.stmt, text: str) -> bool:
        """Put lines before or after a statement, or a ``with`` around it."""
        self._lines.setdefault(statement, []).append(text)
        return True

    def edited(self) -> list[LineEdit] | None:
        """Return the changed statements; None if the file could not be parsed with them."""
        edits, lines = list(self._edits()), self._bytes.decode().splitlines()
        for edit in reversed(edits):
            lines[edit.first - 1 : edit.last] = edit.text.splitlines()
        return edits if tree_in("\n".join(lines)).root.body else None

    def _edits(self) -> Iterator[LineEdit]:
        outer = [n for n in self._changes if not self._changes.keys() & {*self.tree.around(n)}]
        puts = [*map(self._put_of, outer)]
        for statement, texts in self._lines.items():
            puts += self._puts_at(statement, texts, puts)
        heads = [_lines_of(self.tree.statement(node), is_head=True) for node in outer]
        wholes = [_lines_of(each, is_head=isinstance(each, FUNCTIONS)) for each in self._lines]
        spans = {*heads, *wholes}
        inner = {s for s in spans for o in spans if s != o and o[0] <= s[0] and s[1] <= o[1]}
        for first, last in sorted(spans - inner):
            start, end = self._starts[first - 1], self._starts[last]
            text = self._bytes[start:end]
            for left, right, new in sorted(puts, reverse=True):
                if start <= left < end:
                    text = text[: left - start] + new.encode() + text[right - start :]
            yield LineEdit(self.file, first, last, text.decode().rstrip("\n"))

    def _puts_at(self, statement: ast.stmt, texts: list[str], puts: list[_Put]) -> Iterator[_Put]:
        start, _ = self._extent(statement)
        last = statement.end_lineno or 0
        end, new_line = self._starts[last] - 1, f"\n{self.indent(statement)}"
        starts = self._starts[statement.lineno : last]
        outer = [at for at in starts if not any(left < at < right for left, right, _ in puts)]
        for at in outer * sum(text.startswith("with ") for text in texts):
            yield at, at, "    "
        before = "".join(text.removesuffix("{}") for text in texts if not text.startswith("{}"))
        after = "".join(text.removeprefix("{}") for text in texts if text.startswith("{}"))
        yield start, start, before.replace("\n", new_line)
        yield end, end, after.replace("\n", new_line)

    def _put_of(self, node: ast.AST) -> _Put:
        """Return the start and end of an expression, and the text to put there."""
        now, parent = self._now(node), self.tree.parents[node]
        start, end = self._extent(node)
        text, is_atom = ast.unparse(self._as_written(now)), isinstance(now, _ATOMS)
        before, after = self._bytes[:start].rstrip(), self._bytes[end:]
        is_argument = isinstance(parent, ast.Call) and node is not parent.func
        if is_argument or isinstance(parent, ast.keyword):
            return start, end, text
        if before.endswith(b"(") and after.lstrip().startswith(b")"):
            if is_atom and not before[-2:-1].isalnum():  # its parentheses go
                return len(before) - 1, self._bytes.index(b")", end) + 1, text
            return start, end, text
        is_alone = isinstance(parent, ast.stmt) and getattr(parent, "value", None) is node
        return start, end, text if is_atom or is_alone else f"({text})"

    def _now(self, node: Any) -> Any:
        """Return a node with all changes in it."""
        if isinstance(node, list):
            return [*map(self._now, node)]
        if not isinstance(node, ast.AST) or not self._changes.keys() & {*ast.walk(node)}:
            return node
        now = copy.copy(node)
        for field, value in ast.iter_fields(node):
            setattr(now, field, self._now(value))
        for change in self._changes.get(node, ()):
            now = change(now)
        return now

    def _as_written(self, node: Any) -> Any:
        """Return a copy in which the parts of one line of the file stand for themselves."""
        if isinstance(node, list):
            return [*map(self._as_written, node)]
        if not isinstance(node, ast.AST):
            return node
        if node in self.tree.parents and isinstance(node, _AS_WRITTEN):
            start, end = self._extent(node)
            if b"\n" not in self._bytes[start:end]:
                return ast.Name(self._bytes[start:end].decode())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            return ast.Name(json.dumps(node.value, ensure_ascii=False))
        new = copy.copy(node)
        for field, value in ast.iter_fields(node):
            setattr(new, field, self._as_written(value))
        return new

    def _extent(self, node: Any) -> tuple[int, int]:
        start = self._starts[node.lineno - 1] + node.col_offset
        return start, self._starts[node.end_lineno - 1] + node.end_col_offset

    def indent(self, statement: ast.stmt) -> str:
        """Return what stands before a statement in its line."""
        start = self._starts[statement.lineno - 1]
        return self._bytes[start : start + statement.col_offset].decode()


def _lines_of(statement: ast.stmt, *, is_head: bool) -> tuple[int, int]:
    """Return the first and last line of a statement; of `with`, `for`, `def`, of its head."""
    parts: list[ast.AST] = [statement]
    if is_head and hasattr(statement, "body"):
        children, inner = ast.iter_child_nodes(statement), (ast.stmt, ast.ExceptHandler)
        parts = [each for each in children if not isinstance(each, inner)]
    ends = (getattr(node, "end_lineno", 0) for part in parts for node in ast.walk(part))
    return statement.lineno, max([statement.lineno, *ends])
