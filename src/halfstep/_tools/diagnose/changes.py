"""Changes of the user's source, as the statements to paste: edits of calls, rewritten formulas.

A change replaces an expression of the syntax tree; what is around it stays as it was written.
"""

from __future__ import annotations

import ast
import copy
import functools
import inspect
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from halfstep._pytorch.dispatch import schema_of
from halfstep._tools.diagnose.edits import CALL, OPERAND, USUAL_NAMES, item_of, row_name
from halfstep._tools.line import LineEdit, short_path
from halfstep._tools.source import Filled, Source
from halfstep._tools.trace.rows import grouped
from halfstep._tools.user_code import Spot

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
        call = None if self.module else Changes(self.spot.line.file).call(self)
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
        filled: ast.expr = Filled(names.get).visit(copy.deepcopy(self.tree))
        return filled


Change = Placed | Rewrite


def edited_lines(changes: Sequence[Change]) -> list[LineEdit] | None:
    """Return each changed statement once, or None if a change cannot be made at one place."""
    found: list[LineEdit] = []
    for file, of_file in grouped(changes, lambda each: each.spot.line.file).items():
        source = Changes(file)
        if not all(map(source.make, of_file)) or (edits := source.edited()) is None:
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
    if Changes(line.file).is_all_of_its_line(placed[0]):
        return f"leave out line {line.number} of {short_path(line.file)}: {line.text}"
    told = "; ".join(map(_change_in_words, placed))
    return f"in the call of {function} {at} {short_path(line.file)}:{line.number}: {told}"


_ORDINALS = ("first", "second", "third")


def _change_in_words(placed: Placed) -> str:
    slot, text = placed.slot, placed.expression.format
    if slot == OPERAND:
        put = f"use {text('x')} in its place, where x is its input"
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
    line, source = rewrite.spot.line, Changes(rewrite.spot.line.file)
    names: dict[str, ast.expr | None] = {}
    where = ""
    for name, operand in rewrite.operands.items():
        call = source.call(operand) if operand.spot.line == line else None
        names[name] = None if call is None else argument(call, operand)
        if names[name] is None:
            at = f"{short_path(operand.spot.line.file)}:{operand.spot.line.number}"
            names[name] = new = source.new_name(operand.function)
            where += f", where {new.id} is the input of {row_name(operand.function)} at {at}"
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


class Changes(Source):
    """Source of a file, and the changes of calls and formulas to make in it."""

    def __init__(self, file: str) -> None:
        super().__init__(file)
        self._hoisted: dict[ast.expr, ast.Name] = {}

    @functools.cached_property
    def _names(self) -> set[str]:
        return {node.id for node in self.tree.parents if isinstance(node, ast.Name)}

    def make(self, change: Change) -> bool:
        """Make a change; return whether it can be made here."""
        if isinstance(change, Rewrite):
            return self._rewrite(change)
        node, slot = self.node(change), change.slot
        if node is None:
            return False
        if slot == OPERAND:
            return self._put_operand(node, change)
        if slot == CALL:
            return self.put(node, change.expression)
        if (item := item_of(slot)) is not None:
            return self._bind_again(node, item, change.expression)
        if isinstance(slot, int):
            given = argument(node, change)
            if change.expression.count("{0}") > 2 and isinstance(given, ast.expr):
                self._name(given, change.function)
            return self._wrap_each(given, change)
        return isinstance(node, ast.Call) and self._put_keyword(node, slot, change)

    def call(self, placed: Placed) -> ast.expr | None:
        """Return the call that is made here, by the user and as an expression; else None."""
        if placed.module or placed.spot.line.file != self.file:
            return None
        node = self.node(placed)
        return node if isinstance(node, ast.expr) else None

    def node(self, placed: Placed) -> ast.expr | ast.AugAssign | None:
        spot, function = placed.spot, placed.function
        kinds = ast.Subscript if function == "__getitem__" else _CALLS
        nodes = [node for node in ast.walk(self.tree.root) if isinstance(node, kinds)]
        if spot.span is None:
            here = [n for n in nodes if n.lineno == spot.line.number and _is_of(n, function)]
            return here[0] if len(here) == 1 else None
        first, last, start, end = spot.span
        ends = [n for n in nodes if (n.end_lineno, n.end_col_offset) == (last, end)]
        exact = [n for n in ends if (n.lineno, n.col_offset) == (first, start)]
        # In a chain of methods over several lines, the span of a call starts at the method's name.
        return next(iter((*exact, *(n for n in ends if isinstance(n, ast.Call)))), None)

    # --- edits of calls ---------------------------------------------------------------------------

    def _put_operand(self, node: ast.AST, change: Placed) -> bool:
        """Put an expression of what a call is called on in its place, or another module."""
        if not isinstance(node, ast.Call):
            return False
        if change.module:
            made = self._constructor(change.module, last_name(node.func))
            return "{" not in change.expression and self.put(made, change.expression)
        first = replace(change, slot=0)
        if argument(node, first) is None or self.is_all_of_its_line(change):
            return False
        self.change(node, lambda now: argument(now, first) or now)
        return self.put(node, change.expression)

    def is_all_of_its_line(self, change: Placed) -> bool:
        """Return whether nothing is left without a call, as of ``x = x.half()``."""
        node = self.call(change) if change.slot == OPERAND and change.expression == "{}" else None
        read = node and argument(node, replace(change, slot=0))
        match node and self.tree.parents[node]:
            case ast.Assign([ast.Name(name)]):
                return isinstance(read, ast.Name) and read.id == name
        return False

    def _bind_again(self, node: ast.AST, item: int, expression: str) -> bool:
        """Change the name of an item of a result, in a line after the statement that binds it."""
        match self.tree.parents[node]:
            case ast.Assign([ast.Tuple(names)], value) as statement:
                is_named = value is node and all(isinstance(each, ast.Name) for each in names)
                if is_named and item < len(names) and not self.indent(statement).strip():
                    name = last_name(names[item])
                    return self.put(statement, f"{{}}\n{name} = {expression.format(name)}")
        return False

    def _wrap_each(self, node: ast.AST | None, placed: Placed) -> bool:
        """Put an expression around a node, or around the branches of a conditional.

        Branches that are numbers are left out, since numbers have no methods: in
        ``a / (mean if mean is not None else 1.0)`` only ``mean`` is wrapped.
        """
        if placed.expression.startswith("{}") and isinstance(node, ast.IfExp):
            branches = [b for b in (node.body, node.orelse) if not _is_number(b, placed.spot)]
            return bool(branches) and all(self._wrap_each(b, placed) for b in branches)
        return self.put(node, placed.expression)

    def _put_keyword(self, call: ast.Call, name: str, placed: Placed) -> bool:
        value = _keyword(call, name, placed, () if placed.module else placed.parameters)
        if value is None and placed.module:
            made = self._constructor(placed.module, last_name(call.func))
            if made is None:
                return False
            call = made
            value = _keyword(call, name, placed, parameters_of(getattr(nn, placed.module, None)))
        if value is not None:  # if it is that already, another call has made the module
            return ast.unparse(value) != placed.expression and self.put(value, placed.expression)
        if "{" in placed.expression:
            return False  # the edit needs an existing argument
        if not placed.module and not _is_of(call, placed.function):
            return False  # the call at this line is another function, which calls this one
        given = ast.keyword(name, ast.parse(placed.expression, mode="eval").body)
        return self.change(call, lambda now: ast.Call(now.func, now.args, [*now.keywords, given]))

    def _constructor(self, module: str, name: str) -> ast.Call | None:
        """Return the constructor call of a module: the only one of its class, or of its name."""
        nodes = list(ast.walk(self.tree.root))
        calls = [n for n in nodes if isinstance(n, ast.Call) and last_name(n.func) == module]
        if len(calls) > 1:
            assigned = [n for n in nodes if isinstance(n, ast.Assign) and n.value in calls]
            named = [n.value for n in assigned if name in map(last_name, n.targets)]
            calls = [call for call in calls if call in named]
        return calls[0] if len(calls) == 1 else None

    # --- rewritten formulas -----------------------------------------------------------------------

    def _rewrite(self, rewrite: Rewrite) -> bool:
        root, parts = self.call(rewrite.root), [*map(self.call, rewrite.parts)]
        texts = ((name, self.modules.get(name)) for name in ("torch", "F"))
        names = {name: ast.parse(text, mode="eval").body if text else None for name, text in texts}
        if root is None or not all(p is not None and self._is_before(p, root) for p in parts):
            return False
        if isinstance(root, ast.Call) and not _is_of(root, rewrite.root.function):
            return False  # it calls that function, as a distribution does, and returns another
        for name, operand in rewrite.operands.items():
            uses = [n for n in ast.walk(rewrite.tree) if isinstance(n, ast.Name) and n.id == name]
            names[name] = self._operand(operand, root, is_used_once=len(uses) == 1)
        if None in names.values():
            return False
        tree = rewrite.filled(names)
        return self.change(root, lambda _: tree)

    def _operand(self, operand: Placed, root: ast.expr, *, is_used_once: bool) -> ast.expr | None:
        """Return an expression for an operand at the place of the root; None if there is none."""
        call = self.call(operand)
        node = None if call is None else argument(call, operand)
        if call is None or node is None or node in self._hoisted:
            return None if node is None else self._hoisted.get(node)
        here, there = self.tree.statement(call), self.tree.statement(root)
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
        around = [*self.tree.around(node)]
        inner = [node, *around[: around.index(statement)]]
        if any(isinstance(each, _BINDERS) for each in inner):
            return None
        if hasattr(statement, "body") or self.indent(statement).strip():
            return None
        name = self._hoisted[node] = self.new_name(function)
        self.put_lines(statement, f"{name.id} = {ast.unparse(node)}\n{{}}")
        if is_kept:
            self.change(node, lambda _: name)
        return name

    def _name(self, node: ast.expr, function: str) -> None:
        """Compute a long expression that is read more than once before its statement."""
        if not all(map(_is_short, ast.walk(node))):
            self._hoist(node, self.tree.statement(node), function, is_kept=True)

    def new_name(self, function: str) -> ast.Name:
        """Return a name that the file does not use, for an argument of a function."""
        base = _NAMES.get(row_name(function), "value")
        names = (base, *(f"{base}_{number}" for number in range(2, 1000)))
        name = next(each for each in names if each not in self._names)
        self._names.add(name)
        return ast.Name(name)

    def _is_before(self, node: ast.expr, root: ast.expr) -> bool:
        """Return whether a node is always evaluated before another, in the same scope."""
        around, statement = [root, *self.tree.around(root)], self.tree.statement(node)
        scopes = [
            next(each for each in nodes if isinstance(each, _SCOPES))
            for nodes in ([node, *self.tree.around(node)], around)
        ]
        if scopes[0] is not scopes[1]:
            return False
        if statement in around:
            return statement is self.tree.statement(root)
        fields = (value for _, value in ast.iter_fields(self.tree.parents[statement]))
        block = next(each for each in fields if isinstance(each, list) and statement in each)
        return any(each in around for each in block[block.index(statement) :])

    def _is_rebound(self, node: ast.expr, here: ast.stmt, there: ast.stmt) -> bool:
        """Return whether a name in an expression has another value at a later statement."""
        read = {last_name(each) for each in ast.walk(node)} - {""}
        scope = next(each for each in self.tree.around(here) if isinstance(each, _SCOPES))
        return any(
            last_name(each) in read and isinstance(getattr(each, "ctx", None), ast.Store)
            for each in ast.walk(scope)
            if here.lineno <= getattr(each, "lineno", 0) < there.lineno
        )


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
