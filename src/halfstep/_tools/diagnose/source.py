"""Source text of edits: the user's statements with the edits applied."""

from __future__ import annotations

import ast
import functools
import inspect
import linecache
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep._pytorch.dispatch import schema_of
from halfstep._tools.diagnose.diagnosis import LineEdit
from halfstep._tools.diagnose.edits import CALL, USUAL_NAMES, row_name
from halfstep._tools.line import short_path
from halfstep._tools.trace.rows import grouped
from halfstep._tools.user_code import Spot

Slot = int | str


@dataclass(frozen=True)
class Placed:
    """Expression to put at a slot of a call."""

    spot: Spot
    function: str
    slot: Slot
    expression: str
    parameters: tuple[str, ...] = ()  # as far as they are known
    module: str = ""  # class of the PyTorch module that makes the call; empty if the user does


def edited_lines(placed: list[Placed]) -> list[LineEdit] | None:
    """Return each edited statement once, or None if a call is not found in its file."""
    found: list[LineEdit] = []
    for file, of_file in grouped(placed, lambda each: each.spot.line.file).items():
        source = Source.of(file)
        edits = source.edited() if source is not None and all(map(source.put, of_file)) else None
        if edits is None:
            return None
        found += edits
    return found


@functools.lru_cache(8)
def _parsed(source: str) -> ast.Module | None:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError):
        return None


def in_words(placed: list[Placed]) -> str:
    """Describe in words the edits of a call that is not found in its source."""
    line, function = placed[0].spot.line, row_name(placed[0].function)
    at = "reached from" if line.text and function not in line.text else "at"
    where = f"in the call of {function} {at} {short_path(line.file)}:{line.number}"
    return f"{where}: {'; '.join(map(_change, placed))}"


_ORDINALS = ("first", "second", "third")


def _change(placed: Placed) -> str:
    slot, text = placed.slot, placed.expression.format
    if slot == CALL:
        return f"use {text('x')}, where x is what it returns"
    if isinstance(slot, str):
        return f"give it {slot}={text(slot)}"
    which = _ORDINALS[slot] if slot < len(_ORDINALS) else f"{slot + 1}th"
    return f"give it {text('x')}, where x is its {which} argument"


class Source:
    """Source of a file, its syntax tree, and the edits to insert into it."""

    def __init__(self, file: str, source: str, tree: ast.Module) -> None:
        self._file = file
        self._lines = [line.encode() for line in source.splitlines(keepends=True)]
        self._starts = [0]
        for line in self._lines:
            self._starts.append(self._starts[-1] + len(line))
        self._bytes, self.tree = source.encode(), tree
        self._puts: list[tuple[int, int, int, int, bytes]] = []
        """Position, rank and order at the same position, number of bytes replaced, and text."""
        self._statements: dict[tuple[int, int], None] = {}

    @classmethod
    def of(cls, file: str) -> Source | None:
        """Return the source of a file; None if it cannot be parsed."""
        source = "".join(linecache.getlines(file))
        tree = _parsed(source)
        return None if tree is None else cls(file, source, tree)

    def put(self, placed: Placed) -> bool:
        """Put an expression at its slot; return whether the slot was found."""
        node = self.node(placed.spot, placed.function)
        if node is None:
            return False
        slot = placed.slot
        if slot == CALL:
            return self._wrap(node, placed.expression)
        if isinstance(slot, int):
            target = argument(node, slot, placed)
            return target is not None and self._wrap_each(target, placed)
        return isinstance(node, ast.Call) and self._put_keyword(node, slot, placed)

    def edited(self) -> list[LineEdit] | None:
        """Return the edited statements; None if the file could not be parsed with them."""
        edits, lines = list(self._edits()), self._bytes.decode().splitlines()
        for edit in reversed(edits):
            lines[edit.first - 1 : edit.last] = edit.text.splitlines()
        return None if _parsed("\n".join(lines)) is None else edits

    def _edits(self) -> Iterator[LineEdit]:
        for first, last in sorted(self._statements):
            start, end = self._starts[first - 1], self._starts[last]
            text = self._bytes[start:end]
            for position, _, _, length, new in sorted(self._puts, reverse=True):
                if start <= position < end or position == end == len(self._bytes):
                    at = position - start
                    text = text[:at] + new + text[at + length :]
            yield LineEdit(self._file, first, last, text.decode().rstrip("\n"))

    def replace(self, node: ast.expr, text: str) -> bool:
        """Replace an expression by another, in parentheses if the statement needs them."""
        start, end = self._extent(node)
        is_alone = self._is_argument(node) or self._is_in_parentheses(start, end)
        is_alone |= any(
            isinstance(each, ast.stmt) and getattr(each, "value", None) is node
            for each in ast.walk(self.tree)
        )
        is_atom = isinstance(ast.parse(text, mode="eval").body, _ATOMS)
        self._put_at(start, 1, text if is_alone or is_atom else f"({text})", length=end - start)
        return self.note(node)

    def insert_before(self, statement: ast.stmt, text: str) -> bool:
        """Insert a statement before another; return whether the other begins its line."""
        start = self._offset(statement.lineno, statement.col_offset)
        indent = self._bytes[self._starts[statement.lineno - 1] : start].decode()
        self._put_at(start, 0, f"{text}\n{indent}")
        return not indent.strip()

    # --- nodes ------------------------------------------------------------------------------------

    def node(self, spot: Spot, function: str) -> ast.expr | ast.AugAssign | None:
        kinds = ast.Subscript if function == "__getitem__" else _CALLS
        nodes = [node for node in ast.walk(self.tree) if isinstance(node, kinds)]
        if spot.span is None:
            here = [n for n in nodes if n.lineno == spot.line.number and _is_of(n, function)]
            return here[0] if len(here) == 1 else None
        first, last, start, end = spot.span
        ends = [n for n in nodes if (n.end_lineno, n.end_col_offset) == (last, end)]
        exact = [n for n in ends if (n.lineno, n.col_offset) == (first, start)]
        # In a chain of methods over several lines, the span of a call starts at the method's name.
        calls = [n for n in ends if isinstance(n, ast.Call)]
        return next(iter((*exact, *calls)), None)

    def _constructor(self, module: str, name: str) -> ast.Call | None:
        """Return the constructor call of a module: the only one of its class, or of its name."""
        nodes = list(ast.walk(self.tree))
        calls = [n for n in nodes if isinstance(n, ast.Call) and last_name(n.func) == module]
        if len(calls) > 1:
            assigned = [n for n in nodes if isinstance(n, ast.Assign) and n.value in calls]
            named = [n.value for n in assigned if name in map(last_name, n.targets)]
            calls = [call for call in calls if call in named]
        return calls[0] if len(calls) == 1 else None

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _extent(self, node: ast.expr) -> tuple[int, int]:
        start = self._offset(node.lineno, node.col_offset)
        return start, self._offset(node.end_lineno or 0, node.end_col_offset or 0)

    # --- texts ------------------------------------------------------------------------------------

    def _put_keyword(self, call: ast.Call, name: str, placed: Placed) -> bool:
        value = _keyword(call, name, placed, () if placed.module else placed.parameters)
        if value is None and placed.module:
            made = self._constructor(placed.module, last_name(call.func))
            if made is None:
                return False
            call = made
            value = _keyword(call, name, placed, parameters_of(getattr(nn, placed.module, None)))
        if value is not None:
            return self._wrap(value, placed.expression)
        if "{" in placed.expression:
            return False  # the edit needs an existing argument
        if not placed.module and not _is_of(call, placed.function):
            return False  # the call at this line is another function, which calls this one
        end = self._extent(call)[1] - 1
        comma = "" if self._bytes[:end].rstrip().endswith((b"(", b",")) else ", "
        self._put_at(end, 1, f"{comma}{name}={placed.expression}")
        return self.note(call)

    def _wrap_each(self, node: ast.expr, placed: Placed) -> bool:
        """Put an expression around a node, or around the branches of a conditional.

        Branches that are numbers are left out, since numbers have no methods: in
        ``a / (mean if mean is not None else 1.0)`` only ``mean`` is wrapped.
        """
        if placed.expression.startswith("{}") and isinstance(node, ast.IfExp):
            branches = [b for b in (node.body, node.orelse) if not _is_number(b, placed.spot)]
            return bool(branches) and all(self._wrap_each(b, placed) for b in branches)
        return self._wrap(node, placed.expression)

    def _wrap(self, node: ast.expr | ast.AugAssign, expression: str) -> bool:
        """Put an expression around a node, or replace the node."""
        if not isinstance(node, ast.expr):
            return False
        start, end = self._extent(node)
        if "{}" not in expression:
            old = self._bytes[start:end].decode()
            self._put_at(start, 0, expression.format(old), length=end - start)
            return self.note(node)
        before, after = expression.split("{}")
        is_argument = self._is_argument(node)
        is_grouped = not is_argument and self._is_in_parentheses(start, end)
        if after.startswith("."):
            if is_grouped:
                end = self._bytes.index(b")", end) + 1
            elif not isinstance(node, _ATOMS):
                before, after = before + "(", ")" + after
        elif after.startswith(" "):
            if not isinstance(node, (*_ATOMS, ast.Constant, ast.BinOp, ast.UnaryOp)):
                before, after = before + "(", ")" + after
            if not is_argument and not is_grouped:
                before, after = "(" + before, after + ")"
        number = len(self._puts)
        self._put_at(start, 1, before, order=-number)
        self._put_at(end, 0, after, order=number)
        return self.note(node)

    def _is_argument(self, node: ast.expr) -> bool:
        calls = (each for each in ast.walk(self.tree) if isinstance(each, ast.Call))
        return any(
            node in (*call.args, *(keyword.value for keyword in call.keywords)) for call in calls
        )

    def _is_in_parentheses(self, start: int, end: int) -> bool:
        before, after = self._bytes[:start].rstrip(), self._bytes[end:].lstrip()
        return before.endswith(b"(") and after.startswith(b")")

    def _put_at(
        self, position: int, rank: int, text: str, *, order: int = 0, length: int = 0
    ) -> None:
        """Insert a text at a position; the end of a node (rank 0) precedes the start of another."""
        self._puts.append((position, rank, order, length, text.encode()))

    def note(self, node: ast.AST) -> bool:
        """Note the innermost statement around a node."""
        found: ast.stmt | None = None
        for each in ast.walk(self.tree):
            if isinstance(each, ast.stmt) and node in own_nodes(each):
                found = each
        if found is None:
            return False
        inner = [each for each in own_nodes(found) if hasattr(each, "end_lineno")]
        ends = inner if hasattr(found, "body") else [found]  # only the head of `with`, `for`, `def`
        first, last = found.lineno, max(end.end_lineno for end in ends)
        self._statements[(first, last)] = None
        return True


_CALLS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.AugAssign)
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple)
_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Div: ("div", "true_divide", "rdiv", "rtruediv", "reciprocal"),
    ast.Pow: ("pow", "rpow"),
    ast.Mult: ("mul", "rmul"),
    ast.Add: ("add", "radd"),
    ast.Sub: ("sub", "rsub"),
    ast.MatMult: ("matmul", "rmatmul", "mm", "bmm", "addmm"),
}


def own_nodes(statement: ast.stmt) -> list[ast.AST]:
    """Return the nodes of a statement, without those of the statements inside it."""
    found: list[ast.AST] = []
    todo: list[ast.AST] = [statement]
    while todo:
        node = todo.pop()
        for child in ast.iter_child_nodes(node):
            if not isinstance(child, (ast.stmt, ast.ExceptHandler)):
                found.append(child)
                todo.append(child)
    return found


def last_name(node: ast.AST) -> str:
    """Return the name that a node reads or binds, without what stands before its dot, or ""."""
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def _is_of(node: ast.AST, function: str) -> bool:
    """Return whether a node may be a call of a function, judged by its name."""
    if isinstance(node, ast.Call):
        return row_name(last_name(node.func)) == row_name(function)
    if isinstance(node, (ast.BinOp, ast.AugAssign)):
        return row_name(function) in _OPERATORS.get(type(node.op), ())
    return False


def _is_method(call: ast.Call, placed: Placed) -> bool:
    """Return whether a call is a method call, whose object is the first argument."""
    if not isinstance(call.func, ast.Attribute) or placed.module:
        return False
    root: ast.expr = call.func.value
    while isinstance(root, ast.Attribute):
        root = root.value
    return not (isinstance(root, ast.Name) and root.id in placed.spot.modules)


def _keyword(
    call: ast.Call, name: str, placed: Placed, parameters: tuple[str, ...]
) -> ast.expr | None:
    """Return the argument of a call for a parameter, or None if there is none."""
    is_name = str.endswith if placed.module else str.__eq__  # such as src_key_padding_mask
    for keyword in call.keywords:
        if is_name(keyword.arg or "", name):
            return keyword.value
    if name not in parameters:
        return None
    index = parameters.index(name) - _is_method(call, placed)
    return call.args[index] if index < len(call.args) else None


@functools.cache
def parameters_of(function: Any) -> tuple[str, ...]:
    """Return the names of the parameters of a function or a class, as far as they are known."""
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):  # C functions have no signature, but an op may have their name
        packet = getattr(torch.ops.aten, getattr(function, "__name__", ""), None)
        overload = getattr(packet, "default", None)
        arguments = () if overload is None else schema_of(overload).arguments
        return tuple("input" if each.name == "self" else each.name for each in arguments)


def _is_number(node: ast.expr, spot: Spot) -> bool:
    """Return whether a node is a Python number; the other operand's method was then called."""
    if isinstance(node, ast.UnaryOp):
        return _is_number(node.operand, spot)
    if isinstance(node, ast.Call):
        return last_name(node.func) in _TO_NUMBERS
    return isinstance(node, ast.Constant) or getattr(node, "id", None) in spot.numbers


_TO_NUMBERS = ("float", "int", "len", "item")


def argument(node: ast.expr | ast.AugAssign, slot: int, placed: Placed) -> ast.expr | None:
    """Return the node of the argument at a position of a call."""
    if isinstance(node, ast.UnaryOp):
        return node.operand if slot == 0 else None
    if isinstance(node, ast.AugAssign):
        return node.value if slot == 1 else None
    if isinstance(node, ast.BinOp):
        is_reflected = placed.function.startswith(("__r", "rsub", "reciprocal")) or (
            isinstance(node.op, (ast.Add, ast.Mult)) and _is_number(node.left, placed.spot)
        )
        return (node.left, node.right)[slot ^ is_reflected] if slot in (0, 1) else None
    if not isinstance(node, ast.Call):
        return None
    if not placed.module and not _is_of(node, placed.function):
        return None
    if _is_method(node, placed):
        if slot == 0:
            assert isinstance(node.func, ast.Attribute)
            return node.func.value
        slot -= 1
    if slot < len(node.args):
        found = node.args[slot]
        return None if any(isinstance(arg, ast.Starred) for arg in node.args) else found
    offset = slot + _is_method(node, placed)
    names = placed.parameters[offset : offset + 1] or USUAL_NAMES[offset : offset + 1]
    return next((keyword.value for keyword in node.keywords if keyword.arg in names), None)
