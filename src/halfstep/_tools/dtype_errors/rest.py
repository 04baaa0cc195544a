"""The rest of a function after a failing line, run with a change of the line: does it end?

Statements are evaluated without effects: assignments to names, and what ``Call.value`` can compute.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep._autocast import HALVES
from halfstep._tools.dtype_errors.failing_call import Call

Casts = Mapping[str, torch.dtype]
"""The dtypes of expressions of a statement, by their text."""


def failing_line(
    line: Call, casts: Casts, *, before: bool = False, later: Mapping[int, Casts] | None = None
) -> int | None:
    """Run a statement with casts, and those after it; return the line that fails, 0 if none does.

    If ``before``, the names are bound to the casts before the statement, and stay so. ``later`` has
    casts in other statements, by their lines. None if the statements cannot be evaluated.
    """
    now, statements = replace(line, local={**line.local}), [*_from(line)]
    if before:
        now.local.update((name, line.local[name].to(dtype)) for name, dtype in casts.items())
        casts = {}
    for number, statement in enumerate(statements):
        try:
            given = (later or {}).get(statement.lineno, {}) if number else casts
            if _done(now, statement, given, None if number else line.node):
                return 0
        except (RuntimeError, TypeError, ValueError) as error:
            return None if isinstance(error, NotImplementedError) else statement.lineno
        except Exception:
            return None
    return 0 if statements else None


def _from(line: Call) -> Iterator[ast.stmt]:
    """Yield the statement of a line and those after it, up to the end of its function or loop."""
    around = [*line.around()]
    inner = [each for each in (line.node, *around) if each is not None]
    is_first = True
    for node, outer in pairwise(inner):
        for _, block in ast.iter_fields(outer):
            if isinstance(block, list) and node in block and isinstance(node, ast.stmt):
                yield from block[block.index(node) + (not is_first) :]
                is_first = False
        if isinstance(outer, (ast.For, ast.While, ast.AsyncFor)):
            return


def _is_in(node: ast.AST, whole: ast.AST) -> bool:
    spans: list[Any] = [vars(each) for each in (node, whole)]
    (start, end), (first, last) = (
        ((s["lineno"], s["col_offset"]), (s["end_lineno"], s["end_col_offset"])) for s in spans
    )
    return bool(first <= start and end <= last)


def _done(line: Call, statement: ast.stmt, casts: Casts, within: ast.AST | None) -> bool:
    """Carry out a statement, with casts within a part of it; return if it ends the function."""
    names: dict[str, Tensor] = {}

    class Cast(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> ast.AST:
            text = ast.unparse(node) if isinstance(node, ast.expr) else ""
            is_read = not isinstance(getattr(node, "ctx", None), ast.Store)
            if text in casts and is_read and (within is None or _is_in(node, within)):
                name = f"__cast{len(names)}"
                names[name] = line.value(node).to(casts[text])
                return ast.Name(name, ast.Load())
            return self.generic_visit(node)

    changed = Cast().visit(copy.deepcopy(statement)) if casts else statement
    line.local.update(names)
    match changed:
        case ast.Return(value=value):
            line.value(value or ast.Constant(None))
            return True
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            line.local[name] = line.value(value)
        case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
            for target, part in zip(targets, line.value(value), strict=True):
                if not isinstance(target, ast.Name):
                    raise LookupError(target)
                line.local[target.id] = part
        case ast.AugAssign(target=ast.Name(id=name), op=op, value=value):
            line.local[name] = line.value(ast.BinOp(ast.Name(name), op, value))
        case ast.Expr(value=ast.Constant()):
            pass
        case _:
            raise LookupError(changed)
    return False


# --- the order of cures ---------------------------------------------------------------------------


class Cure(NamedTuple):
    """Change of a line, and the casts of its expressions that it is made of, if any."""

    text: str
    casts: Casts | None = None


def ordered(cures: list[Cure], line: Call) -> list[str]:
    """Return cures with those first with which the function of the line runs to its end.

    A cure after which a later line fails is completed by a cast there, or by one before the line.
    """
    last: list[str] = []
    for number, (cure, casts) in enumerate(cures, start=1):
        others = [other.text for other in cures[number:]]
        at = None if casts is None else failing_line(line, casts)
        if casts is None or not at:
            return [cure, *others, *last]
        last.append(f"{cure} (then line {at} fails)")
        if all(map(str.isidentifier, casts)) and failing_line(line, casts, before=True) == 0:
            better = "; ".join(f"{name} = {name}.to({dtype})" for name, dtype in casts.items())
            return [f"{better} before this line", *others, *last]
        if (more := _cast_at(line, casts, at)) is not None:
            return [f"{cure}; {more}", *others, *last]
    return last


def _cast_at(line: Call, casts: Casts, at: int) -> str | None:
    """Return a cast of a name at a later line with which the function runs to its end."""
    failing = [statement for statement in _from(line) if statement.lineno == at]
    nodes = [node for statement in failing for node in ast.walk(statement)]
    names = dict.fromkeys(node.id for node in nodes if isinstance(node, ast.Name))
    tensors = [value for value in line.local.values() if isinstance(value, Tensor)]
    halves = {tensor.dtype for tensor in tensors}.intersection(HALVES)
    for name, dtype in product(names, (torch.float32, *halves)):
        if failing_line(line, casts, later={at: {name: dtype}}) == 0:
            return f"{name}.to({dtype}) in place of {name} at line {at}"
    return None
