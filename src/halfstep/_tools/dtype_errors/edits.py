"""Edits of the user's code: what stands in place of nodes, and the lines of the files with it."""

from __future__ import annotations

import ast
import copy
import linecache
from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names

from halfstep._autocast import autocast, custom_bwd, custom_fwd
from halfstep._tools.line import LineEdit
from halfstep._tools.user_code import FUNCTIONS, tree_in, tree_of

Edits = Mapping[Any, str]
"""The text in place of an expression, a statement or a function; {} in it is what stood there."""

NAMES = {
    "torch": SimpleNamespace(**{**vars(torch), "autocast": torch_autocast}),
    "halfstep": SimpleNamespace(autocast=autocast, custom_fwd=custom_fwd, custom_bwd=custom_bwd),
}
"""What the names of an edit stand for."""
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def cast_to(dtype: torch.dtype) -> str:
    return {torch.int64: "{}.long()", torch.bool: "{}.bool()"}.get(dtype, f"{{}}.to({dtype})")


def value_with(text: str, value: Any) -> Any:
    """Return the value of an edited expression of which ``value`` stood there."""
    return eval(text.replace("{}", "_"), NAMES | {"_": value})


def statements_with(text: str, statement: ast.stmt) -> list[ast.stmt]:
    """Return an edited statement: with others before it, or in a ``with``."""
    *before, last = ast.parse(text.replace("{}", "pass")).body
    inner = copy.copy(statement)  # which no edit replaces again
    if isinstance(last, ast.With):
        context = ast.Constant(value_with(ast.unparse(last.items[0].context_expr), None))
        return [*before, ast.With([ast.withitem(context)], [inner])]
    return [*before, inner]


def occurrences(name: str, within: ast.AST) -> Iterator[ast.expr]:
    """Yield the outermost expressions of a text that code reads, without what it writes to."""
    for node in ast.iter_child_nodes(within):
        is_stored = isinstance(getattr(node, "ctx", None), ast.Store)
        if is_stored and isinstance(node, ast.Subscript):
            yield from occurrences(name, ast.Expr(node.slice))
        if is_stored or getattr(node, "attr", "").endswith("_") or isinstance(node, ast.stmt):
            continue
        if isinstance(node, ast.expr) and ast.unparse(node) == name:
            yield node
        else:
            yield from occurrences(name, node)


# --- the lines ------------------------------------------------------------------------------------


class _Put(NamedTuple):
    """Text to put between two places; what ends at a place comes before what starts there."""

    start: int
    is_start: bool
    order: int
    end: int
    text: str


def edited_lines(edits: Edits, files: Iterable[str]) -> tuple[LineEdit, ...]:
    """Return the changed lines of files; none if one of them cannot be parsed with them."""
    found: list[LineEdit] = []
    for file in dict.fromkeys(files):
        parents, lines = tree_of(file).parents, [*linecache.getlines(file)]
        own = {node: text for node, text in edits.items() if node in parents}
        if any("halfstep." in text for text in own.values()):
            own = _import(tree_of(file).root) | own
        new = [*_edited(file, own)]
        for edit in reversed(new):
            lines[edit.first - 1 : edit.last] = [f"{edit.text}\n"]
        if own and not tree_in("".join(lines)).root.body:
            return ()
        found += new
    return tuple(found)


def _import(root: ast.Module) -> dict[Any, str]:
    """Return the edit that imports halfstep before the other imports, unless a file does so."""
    imports = [each for each in root.body if isinstance(each, ast.Import)]
    names = {each.asname or each.name for statement in imports for each in statement.names}
    return dict.fromkeys(imports[:1], "import halfstep\n{}") if "halfstep" not in names else {}


def _edited(file: str, edits: Edits) -> Iterator[LineEdit]:
    tree, lines = tree_of(file), [line.encode() for line in linecache.getlines(file)]
    starts, source = [0, *accumulate(map(len, lines))], b"".join(lines)
    puts = sorted(put for node, text in edits.items() for put in _puts(node, text, starts, source))
    spans: list[list[int]] = []
    for first, last in sorted(_lines_of(node, tree.around(node)) for node in edits):
        if spans and first <= spans[-1][1]:
            spans[-1][1] = max(last, spans[-1][1])
        else:
            spans.append([first, last])
    for first, last in spans:
        at, text = starts[first - 1], b""
        for put in puts:
            if starts[first - 1] <= put.start < starts[last]:
                text += source[at : put.start] + put.text.encode()
                at = put.end
        text += source[at : starts[last]]
        yield LineEdit(file, first, last, text.decode().rstrip("\n"))


def _lines_of(node: Any, around: Iterable[ast.AST]) -> tuple[int, int]:
    """Return the lines of a statement, or those of its head if only that changes."""
    statement = next(each for each in (node, *around) if isinstance(each, ast.stmt))
    is_function = isinstance(node, FUNCTIONS)
    body = getattr(statement, "body", []) if statement is not node or is_function else []
    end = max(statement.lineno, body[0].lineno - 1) if body else statement.end_lineno
    return statement.lineno, end or 0


def _puts(node: Any, text: str, starts: list[int], source: bytes) -> Iterator[_Put]:
    start = starts[node.lineno - 1] + node.col_offset
    end = starts[node.end_lineno - 1] + node.end_col_offset
    before, is_around, after = text.partition("{}")
    if not is_around:
        yield _Put(start, True, -end, end, text)
        return
    if isinstance(node, ast.stmt):
        indent = source[starts[node.lineno - 1] : start].decode()
        before = before.replace("\n", f"\n{indent}")
        if text.startswith("with "):
            for at in starts[node.lineno : node.end_lineno]:
                yield _Put(at, False, 0, at, "    ")
    elif not isinstance(node, _ATOMS):
        before, after = f"({before}", f"){after}"
    yield _Put(start, True, -end, start, before)
    yield _Put(end, False, -start, end, after)
