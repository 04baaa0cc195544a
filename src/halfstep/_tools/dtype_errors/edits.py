"""Edits of the user's code: what stands in place of nodes, and the lines of the files with it."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch.amp.autocast_mode import autocast as torch_autocast  # halfstep run replaces names

from halfstep._autocast import autocast, custom_bwd, custom_fwd
from halfstep._tools.line import LineEdit
from halfstep._tools.source import Source

Edits = Mapping[Any, str]
"""The text in place of an expression, a statement or a function; {} in it is what stood there."""

NAMES = {
    "torch": SimpleNamespace(**{**vars(torch), "autocast": torch_autocast}),
    "halfstep": SimpleNamespace(autocast=autocast, custom_fwd=custom_fwd, custom_bwd=custom_bwd),
}
"""What the names of an edit stand for."""


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


def edited_lines(edits: Edits, files: Iterable[str]) -> tuple[LineEdit, ...]:
    """Return the changed lines of files; none if one of them cannot be changed so."""
    found: list[LineEdit] = []
    for file in dict.fromkeys(files):
        source = Source(file)
        if own := {node: text for node, text in edits.items() if node in source.tree.parents}:
            lines = source.edited() if all(map(source.put, own, own.values())) else None
            if lines is None:
                return ()
            found += lines
    return tuple(found)
