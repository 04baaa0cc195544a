"""Changes of the user's source, as the statements to paste: edits of calls, rewritten formulas.

A change replaces an expression of the syntax tree; what is around it stays as it was written.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
import linecache
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import nn

from halfstep._pytorch.dispatch import schema_of
from halfstep._tools.diagnose.edits import CALL, OPERAND, USUAL_NAMES, item_of, row_name
from halfstep._tools.line import LineEdit, short_path
from halfstep._tools.trace.rows import grouped
from halfstep._tools.user_code import Spot, tree_in, tree_of

Slot = int | str


@dataclass(frozen=True)
class Placed:
    """Argument of a call, or its result, and the expression to put there."""

    spot: Spot
    function: str
    slot: Slot
    expression: str = ""
    parameters: tuple[str, ...] = ()  # as far as they are known
    module: str = ""  # class of the PyTorch module that makes the call; empty if the user does

    @property
    def is_written_out(self) -> bool:
        """Whether an argument is a literal in the source, or is left to its default.

        A name may stand for another number in the next step.
        """
        call = None if self.module else Source(self.spot.line.file).call(self)
        if call is None:
            return bool(self.module)
        node = argument(call, self)
        names = (ast.Name, ast.Call, ast.Subscript)
        return node is None or not any(isinstance(part, names) for part in ast.walk(node))


class Rewrite(NamedTuple):
    """Expression that replaces a call, and those that computed what it is given."""

    root: Placed
    tree: ast.expr  # torch and F stand for the modules
    operands: dict[str, Placed]  # arguments of calls, for the other names in it
    parts: list[Placed]  # calls that computed what it replaces

    @property
    def spot(self) -> Spot:
        return self.root.spot

    def filled(self, names: dict[str, ast.expr | None]) -> ast.expr:
        filled: ast.expr = _Written(names.get).visit(copy.deepcopy(self.tree))
        return filled


Change = Placed | Rewrite


def edited_lines(changes: Sequence[Change]) -> list[LineEdit] | None:
    """Return each changed statement once, or None if a change cannot be made at one place."""
    found: list[LineEdit] = []
    for file, of_file in grouped(changes, lambda each: each.spot.line.file).items():
        source = Source(file)
        edits = source.edited() if all(map(source.put, of_file)) else None
        if edits is None:
            return None
        found += edits
    return found


def in_words(changes: Sequence[Change]) -> str:
    """Describe changes that cannot be made in the source, with a line for each call."""
    edits = [each for each in changes if isinstance(each, Placed)]
    by_call = grouped(edits, lambda each: each.spot).values()
    rewrites = (each for each in changes if isinstance(each, Rewrite))
    return "\n".join([*map(_edit_in_words, by_call), *map(_rewrite_in_words, rewrites)])


def _edit_in_words(placed: list[Placed]) -> str:
    line, function = placed[0].spot.line, row_name(placed[0].function)
    at = "reached from" if line.text and function not in line.text else "at"
    told = "; ".join(map(_change_in_words, placed))
    return f"in the call of {function} {at} {short_path(line.file)}:{line.number}: {told}"


_ORDINALS = ("first", "second", "third")


def _change_in_words(placed: Placed) -> str:
    slot, text = placed.slot, placed.expression.format
    if slot == OPERAND:
        put = f"use {text('x')} in its place, where x is what it is given"
        return "leave it out" if placed.expression == "{}" else put
    if slot == CALL:
        return f"use {text('x')}, where x is what it returns"
    if (item := item_of(slot)) is not None:
        return f"use {text('x')} for x, item {item + 1} of what it returns"
    if isinstance(slot, str):
        return f"give it {slot}={text(slot)}"
    which = _ORDINALS[slot] if slot < len(_ORDINALS) else f"{slot + 1}th"
    return f"give it {text('x')}, where x is its {which} argument"


def _rewrite_in_words(rewrite: Rewrite) -> str:
    line, source = rewrite.spot.line, Source(rewrite.spot.line.file)
    names: dict[str, ast.expr | None] = {}
    where = ""
    for name, operand in rewrite.operands.items():
        call = source.call(operand) if operand.spot.line == line else None
        names[name] = None if call is None else argument(call, operand)
        if names[name] is None:
            at = f"{short_path(operand.spot.line.file)}:{operand.spot.line.number}"
            names[name] = new = source.new_name(operand.function)
            where += f", where {new.id} is what {row_name(operand.function)} at {at} is given"
    function = row_name(rewrite.root.function)
    at, text = f"{short_path(line.file)}:{line.number}", ast.unparse(rewrite.filled(names))
    return f"in place of {function} at {at}, use {text}{where}"


# --- the source -----------------------------------------------------------------------------------

_NAMES = {"exp": "exponent", "softmax": "logits", "sigmoid": "logits"}
"""The new names for arguments of functions."""
_SHORT = {
    *("len", "size", "dim", "numel", "int", "range", "arange", "unsqueeze", "squeeze", "view"),
    *("reshape", "flatten", "long", "float", "bool", "t", "transpose", "detach"),
}
"""The functions that an expression may call and be written twice."""
_BINDERS = (ast.Lambda, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Module, *_BINDERS)
_CALLS = (ast.Call, ast.BinOp, ast.UnaryOp, ast.AugAssign)
_ATOMS = (ast.Name, ast.Attribute, ast.Call, ast.Subscript, ast.List, ast.Tuple)


class Source:
    """Source of a file, and the changes to make in it."""

    def __init__(self, file: str) -> None:
        self._file, self._tree = file, tree_of(file)
        lines = [line.encode() for line in linecache.getlines(file)]
        self._starts, self._bytes = [0, *accumulate(map(len, lines))], b"".join(lines)
        self._changes: dict[ast.expr, list[Callable[[ast.expr], ast.expr]]] = {}
        self._before: dict[ast.stmt, list[str]] = {}  # lines to insert before statements
        self._after: dict[ast.stmt, str] = {}  # and after them
        self._hoisted: dict[ast.expr, ast.Name] = {}

    @functools.cached_property
    def _modules(self) -> dict[str, ast.expr | None]:
        return _modules_in(self._tree.root)

    @functools.cached_property
    def _names(self) -> set[str]:
        return {node.id for node in self._tree.parents if isinstance(node, ast.Name)}

    def put(self, change: Change) -> bool:
        """Make a change; return whether it can be made here."""
        if isinstance(change, Rewrite):
            return self._rewrite(change)
        node, slot = self.node(change), change.slot
        if node is None:
            return False
        if slot == OPERAND:
            return self._put_operand(node, change)
        if slot == CALL:
            return self._wrap(node, change.expression)
        if (item := item_of(slot)) is not None:
            return self._bind_again(node, item, change.expression)
        if isinstance(slot, int):
            return self._wrap_each(argument(node, change), change)
        return isinstance(node, ast.Call) and self._put_keyword(node, slot, change)

    def edited(self) -> list[LineEdit] | None:
        """Return the changed statements; None if the file could not be parsed with them."""
        edits, lines = list(self._edits()), self._bytes.decode().splitlines()
        for edit in reversed(edits):
            lines[edit.first - 1 : edit.last] = edit.text.splitlines()
        return edits if tree_in("\n".join(lines)).root.body else None

    def _edits(self) -> Iterator[LineEdit]:
        outer = [n for n in self._changes if not self._changes.keys() & {*self._tree.around(n)}]
        puts = [*map(self._put_of, outer)]
        for statement, lines in self._before.items():
            start = self._offset(statement.lineno, statement.col_offset)
            indent = self._indent(statement)
            puts.append((start, start, "".join(f"{line}\n{indent}" for line in lines)))
        for statement, line in self._after.items():
            end = self._starts[statement.end_lineno or 0] - 1
            puts.append((end, end, f"\n{self._indent(statement)}{line}"))
        changed = (*map(self._statement, outer), *self._before, *self._after)
        for first, last in sorted({*map(_lines_of, changed)}):
            start, end = self._starts[first - 1], self._starts[last]
            text = self._bytes[start:end]
            for left, right, new in sorted(puts, reverse=True):
                if start <= left < end:
                    text = text[: left - start] + new.encode() + text[right - start :]
            yield LineEdit(self._file, first, last, text.decode().rstrip("\n"))

    def _put_of(self, node: ast.expr) -> tuple[int, int, str]:
        """Return the start and end of an expression, and the text to put there."""
        now, parent = self._now(node), self._tree.parents[node]
        start = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno or 0, node.end_col_offset or 0)
        text, is_atom = ast.unparse(now), isinstance(now, _ATOMS)
        if b"'" not in self._bytes[start:end] and '"' not in text:
            text = text.replace("'", '"')
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
        """Return a copy of a node with all changes in it."""
        if isinstance(node, list):
            return [*map(self._now, node)]
        if not isinstance(node, ast.AST):
            return node
        now = copy.copy(node)
        for field, value in ast.iter_fields(node):
            setattr(now, field, self._now(value))
        for change in self._changes.get(node, ()):  # type: ignore[call-overload]
            now = change(now)
        return now

    def _offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column

    def _indent(self, statement: ast.stmt) -> str:
        """Return what stands before a statement in its line."""
        start = self._starts[statement.lineno - 1]
        return self._bytes[start : start + statement.col_offset].decode()

    def _statement(self, node: ast.AST) -> ast.stmt:
        return next(each for each in self._tree.around(node) if isinstance(each, ast.stmt))

    def call(self, placed: Placed) -> ast.expr | None:
        """Return the call that is made here, by the user and as an expression; else None."""
        if placed.module or placed.spot.line.file != self._file:
            return None
        node = self.node(placed)
        return node if isinstance(node, ast.expr) else None

    def node(self, placed: Placed) -> ast.expr | ast.AugAssign | None:
        spot, function = placed.spot, placed.function
        kinds = ast.Subscript if function == "__getitem__" else _CALLS
        nodes = [node for node in ast.walk(self._tree.root) if isinstance(node, kinds)]
        if spot.span is None:
            here = [n for n in nodes if n.lineno == spot.line.number and _is_of(n, function)]
            return here[0] if len(here) == 1 else None
        first, last, start, end = spot.span
        ends = [n for n in nodes if (n.end_lineno, n.end_col_offset) == (last, end)]
        exact = [n for n in ends if (n.lineno, n.col_offset) == (first, start)]
        # In a chain of methods over several lines, the span of a call starts at the method's name.
        calls = [n for n in ends if isinstance(n, ast.Call)]
        return next(iter((*exact, *calls)), None)

    # --- edits of calls ---------------------------------------------------------------------------

    def _change(self, node: ast.expr, change: Callable[[ast.expr], ast.expr]) -> bool:
        self._changes.setdefault(node, []).append(change)
        return True

    def _put_operand(self, node: ast.AST, change: Placed) -> bool:
        """Put an expression of what a call is called on in its place, or another module."""
        if not isinstance(node, ast.Call):
            return False
        if change.module:
            made = self._constructor(change.module, last_name(node.func))
            return "{" not in change.expression and self._wrap(made, change.expression)
        around, first = self._around(change.expression), replace(change, slot=0)
        if around is None or argument(node, first) is None:
            return False
        return self._change(node, lambda now: around(argument(now, first) or now))

    def _wrap(self, node: ast.AST | None, expression: str) -> bool:
        """Put an expression around a node, or in its place."""
        around = self._around(expression)
        return isinstance(node, ast.expr) and around is not None and self._change(node, around)

    def _around(self, expression: str) -> Callable[[ast.expr], ast.expr] | None:
        """Return a function that puts an expression around a node; None without its modules."""
        tree, names = ast.parse(expression.format("_"), mode="eval").body, self._modules
        if any(names.get(last_name(each), each) is None for each in ast.walk(tree)):
            return None

        def around(now: ast.expr) -> ast.expr:
            filled: ast.expr = Filled({**names, "_": now}.get).visit(copy.deepcopy(tree))
            return filled

        return around

    def _bind_again(self, node: ast.AST, item: int, expression: str) -> bool:
        """Change the name of an item of a result, in a line after the statement that binds it."""
        around = self._around(expression)
        match self._tree.parents[node], around:
            case ast.Assign([ast.Tuple(names)], value) as statement, Callable():
                is_named = value is node and all(isinstance(each, ast.Name) for each in names)
                if is_named and item < len(names) and not self._indent(statement).strip():
                    name = names[item]
                    self._after[statement] = f"{last_name(name)} = {ast.unparse(around(name))}"
                    return True
        return False

    def _wrap_each(self, node: ast.AST | None, placed: Placed) -> bool:
        """Put an expression around a node, or around the branches of a conditional.

        Branches that are numbers are left out, since numbers have no methods: in
        ``a / (mean if mean is not None else 1.0)`` only ``mean`` is wrapped.
        """
        if placed.expression.startswith("{}") and isinstance(node, ast.IfExp):
            branches = [b for b in (node.body, node.orelse) if not _is_number(b, placed.spot)]
            return bool(branches) and all(self._wrap_each(b, placed) for b in branches)
        return self._wrap(node, placed.expression)

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
        given = ast.keyword(name, ast.parse(placed.expression, mode="eval").body)

        def with_keyword(now: Any) -> ast.expr:
            return ast.Call(now.func, now.args, [*now.keywords, given])

        return self._change(call, with_keyword)

    def _constructor(self, module: str, name: str) -> ast.Call | None:
        """Return the constructor call of a module: the only one of its class, or of its name."""
        nodes = list(ast.walk(self._tree.root))
        calls = [n for n in nodes if isinstance(n, ast.Call) and last_name(n.func) == module]
        if len(calls) > 1:
            assigned = [n for n in nodes if isinstance(n, ast.Assign) and n.value in calls]
            named = [n.value for n in assigned if name in map(last_name, n.targets)]
            calls = [call for call in calls if call in named]
        return calls[0] if len(calls) == 1 else None

    # --- rewritten formulas -----------------------------------------------------------------------

    def _rewrite(self, rewrite: Rewrite) -> bool:
        root, names = self.call(rewrite.root), dict(self._modules)
        parts = [*map(self.call, rewrite.parts)]
        if root is None or not all(p is not None and self._is_before(p, root) for p in parts):
            return False
        for name, operand in rewrite.operands.items():
            uses = [n for n in ast.walk(rewrite.tree) if isinstance(n, ast.Name) and n.id == name]
            names[name] = self._operand(operand, root, is_used_once=len(uses) == 1)
        if None in names.values():
            return False
        tree = rewrite.filled(names)
        return self._change(root, lambda _: tree)

    def _operand(self, operand: Placed, root: ast.expr, *, is_used_once: bool) -> ast.expr | None:
        """Return an expression for an operand at the place of the root; None if there is none."""
        call = self.call(operand)
        node = None if call is None else argument(call, operand)
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
        return self._hoist(node, here, operand.function, is_kept=here is not there)

    def _hoist(
        self, node: ast.expr, statement: ast.stmt, function: str, *, is_kept: bool
    ) -> ast.expr | None:
        """Compute an expression before its statement, under a new name; return the name."""
        around = [*self._tree.around(node)]
        inner = [node, *around[: around.index(statement)]]
        if any(isinstance(each, _BINDERS) for each in inner):
            return None
        if hasattr(statement, "body") or self._indent(statement).strip():
            return None
        name = self._hoisted[node] = self.new_name(function)
        self._before.setdefault(statement, []).append(f"{name.id} = {ast.unparse(node)}")
        if is_kept:
            self._change(node, lambda _: name)
        return name

    def new_name(self, function: str) -> ast.Name:
        """Return a name that the file does not use, for an argument of a function."""
        base = _NAMES.get(row_name(function), "value")
        names = (base, *(f"{base}_{number}" for number in range(2, 1000)))
        name = next(each for each in names if each not in self._names)
        self._names.add(name)
        return ast.Name(name)

    def _is_before(self, node: ast.expr, root: ast.expr) -> bool:
        """Return whether a node is always evaluated before another, in the same scope."""
        around, statement = [root, *self._tree.around(root)], self._statement(node)
        scopes = [
            next(each for each in nodes if isinstance(each, _SCOPES))
            for nodes in ([node, *self._tree.around(node)], around)
        ]
        if scopes[0] is not scopes[1]:
            return False
        if statement in around:
            return statement is self._statement(root)
        fields = (value for _, value in ast.iter_fields(self._tree.parents[statement]))
        block = next(each for each in fields if isinstance(each, list) and statement in each)
        return any(each in around for each in block[block.index(statement) :])

    def _is_rebound(self, node: ast.expr, here: ast.stmt, there: ast.stmt) -> bool:
        """Return whether a name in an expression has another value at a later statement."""
        read = {last_name(each) for each in ast.walk(node)} - {""}
        scope = next(each for each in self._tree.around(here) if isinstance(each, _SCOPES))
        return any(
            last_name(each) in read and isinstance(getattr(each, "ctx", None), ast.Store)
            for each in ast.walk(scope)
            if here.lineno <= getattr(each, "lineno", 0) < there.lineno
        )


def _lines_of(statement: ast.stmt) -> tuple[int, int]:
    """Return the first and last line of a statement; of `with`, `for`, `def`, of its head."""
    inner: list[Any] = [statement]
    if hasattr(statement, "body"):
        for node in inner:
            children = ast.iter_child_nodes(node)
            inner += [c for c in children if not isinstance(c, (ast.stmt, ast.ExceptHandler))]
        inner = [each for each in inner[1:] if hasattr(each, "end_lineno")]
    return statement.lineno, max(each.end_lineno for each in inner)


def _is_short(node: ast.AST) -> bool:
    """Return whether a node may be computed once more than before."""
    if isinstance(node, ast.Call):
        return last_name(node.func) in _SHORT
    return not isinstance(node, (ast.Await, ast.MatMult, ast.NamedExpr, ast.Yield, ast.YieldFrom))


# --- nodes ----------------------------------------------------------------------------------------

_OPERATORS: dict[type[ast.operator], tuple[str, ...]] = {
    ast.Div: ("div", "true_divide", "rdiv", "rtruediv", "reciprocal"),
    ast.Pow: ("pow", "rpow"),
    ast.Mult: ("mul", "rmul"),
    ast.Add: ("add", "radd"),
    ast.Sub: ("sub", "rsub"),
    ast.MatMult: ("matmul", "rmatmul", "mm", "bmm", "addmm"),
}


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
    if isinstance(node, ast.BinOp):
        return _is_number(node.left, spot) and _is_number(node.right, spot)
    if isinstance(node, ast.Call):
        return last_name(node.func) in _TO_NUMBERS
    return isinstance(node, ast.Constant) or ast.unparse(node) in spot.numbers


_TO_NUMBERS = ("float", "int", "len", "item")


def argument(node: ast.AST, placed: Placed) -> ast.expr | None:
    """Return the node of an argument of a call, by its position or name."""
    slot = placed.slot
    if isinstance(slot, str):
        names = placed.parameters
        return _keyword(node, slot, placed, names) if isinstance(node, ast.Call) else None
    match node:
        case ast.Subscript():
            return node.slice if slot == 1 else node.value
        case ast.UnaryOp():
            return node.operand if slot == 0 else None
        case ast.AugAssign():
            return node.value if slot == 1 else None
        case ast.BinOp(left=left, right=right):
            is_reflected = placed.function.startswith(("__r", "rsub", "reciprocal")) or (
                isinstance(node.op, (ast.Add, ast.Mult)) and _is_number(left, placed.spot)
            )
            return (left, right)[slot ^ is_reflected] if slot in (0, 1) else None
        case ast.Call() if placed.module or _is_of(node, placed.function):
            return _positional(node, slot, placed)
        case _:
            return None


def _positional(call: ast.Call, slot: int, placed: Placed) -> ast.expr | None:
    if _is_method(call, placed):
        if slot == 0:
            assert isinstance(call.func, ast.Attribute)
            return call.func.value
        slot -= 1
    if slot < len(call.args):
        is_starred = any(isinstance(arg, ast.Starred) for arg in call.args)
        return None if is_starred else call.args[slot]
    offset = slot + _is_method(call, placed)
    names = placed.parameters[offset : offset + 1] or USUAL_NAMES[offset : offset + 1]
    return next((keyword.value for keyword in call.keywords if keyword.arg in names), None)


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
