"""The rest of a function after a failing line, run with a change of the line: does it end?

Statements are evaluated without effects: assignments to names, and what ``Call.value`` can compute.
"""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from halfstep._tools.dtype_errors.failing_call import Call

Casts = Mapping[str, torch.dtype]
"""The dtypes of expressions of a statement, by their text."""


@dataclass(frozen=True)
class Ending:
    """How the rest of a function ended: at a failing statement, or at its end if that is None."""

    line: Call
    failing: ast.stmt | None

    def more_casts(self) -> Iterator[Casts]:
        """Yield casts of one tensor of the failing statement to another dtype of its tensors."""
        found: dict[str, Tensor] = {}
        for node in ast.walk(self.failing or ast.Module([], [])):
            if isinstance(node, ast.Name) and node.id in self.line.local:
                value = self.line.local[node.id]
                if isinstance(value, Tensor) and value.is_floating_point():
                    found[node.id] = value
        halves = {value.dtype for value in found.values()} - {torch.float32}
        for name, value in found.items():
            for dtype in (torch.float32, *halves):
                if dtype is not value.dtype:
                    yield {name: dtype}


def ending(line: Call, casts: Casts, *, before: bool = False) -> Ending | None:
    """Run a statement with casts, and those after it; None if that cannot be done.

    If ``before``, the names are bound to the casts before the statement, and stay so.
    """
    statements = [*_from(line)]
    if not statements:
        return None
    return _run(line, statements, casts, before, line.node)


def ending_after(found: Ending, casts: Casts) -> Ending | None:
    """Run the rest from a failing statement on, with casts in it."""
    statements = [*_from(found.line)]
    if found.failing not in statements:
        return None
    return _run(found.line, statements[statements.index(found.failing) :], casts)


def _run(
    line: Call,
    statements: list[ast.stmt],
    casts: Casts,
    before: bool = False,
    within: ast.AST | None = None,
) -> Ending | None:
    now = replace(line, local={**line.local})
    if before:
        for name, dtype in casts.items():
            now.local[name] = now.local[name].to(dtype)
        casts = {}
    for number, statement in enumerate(statements):
        given = {} if number else casts
        try:
            if _done(now, statement, given, within):
                return Ending(now, None)
        except (LookupError, NotImplementedError, SyntaxError):
            return None
        except (RuntimeError, TypeError, ValueError):
            return Ending(now, statement)
        except Exception:
            return None
    return Ending(now, None)


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

_IN_PLACE = re.compile(r"(?:\()?(.+?)\)?\.to\(torch\.(\w+)\) in place of (.+)$")


def ordered(cures: list[str], line: Call) -> list[str]:
    """Return cures with those first with which the function of the line runs to its end.

    A cure after which a later line fails is completed by a cast there, or by one before the line.
    """
    last: list[str] = []
    for number, cure in enumerate(cures):
        casts = _casts(cure)
        found = None if casts is None else ending(line, casts)
        if found is None or found.failing is None or casts is None:
            return [*cures[number:], *last]
        last.append(f"{cure} (then line {found.failing.lineno} fails)")
        better = _before(line, casts) or _with_more(cure, found)
        if better is not None:
            return [better, *cures[number + 1 :], *last]
    return last


def _casts(cure: str) -> Casts | None:
    """Return the casts of a cure that is made of them; None for another one."""
    found = [_IN_PLACE.match(part) for part in re.split(r", (?=\S+ in place of )", cure)]
    if not all(found):
        return None
    return {each[3]: getattr(torch, each[2]) for each in found if each is not None}


def _before(line: Call, casts: Casts) -> str | None:
    if not all(name.isidentifier() for name in casts):
        return None
    found = ending(line, casts, before=True)
    if found is None or found.failing is not None:
        return None
    return "; ".join(f"{n} = {n}.to({d})" for n, d in casts.items()) + " before this line"


def _with_more(cure: str, found: Ending) -> str | None:
    assert found.failing is not None
    for casts in found.more_casts():
        after = ending_after(found, casts)
        if after is not None and after.failing is None:
            ((name, dtype),) = casts.items()
            at = found.failing.lineno
            return f"{cure}; {name}.to({dtype}) in place of {name} at line {at}"
    return None
