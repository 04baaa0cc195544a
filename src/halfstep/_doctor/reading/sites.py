"""The calls of a file in the order in which they run, each with what it runs inside of."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Literal, TypeAlias

from halfstep._doctor.reading.meaning import Autocast, Meaning
from halfstep._doctor.reading.scopes import Function, Scope

Kind: TypeAlias = Literal["autocast", "grad", "loop", "arm", "call"]

MOST_NESTED_CALLS = 5
"""Functions are followed so deep into others."""
MOST_SITES = 5000
"""Of a root so many calls are listed: functions that call each other many times over add up."""


@dataclass(frozen=True)
class Around:
    """One thing that a call is inside of.

    Attributes:
        kind: An autocast; a switch of gradient recording; a loop; an arm of an ``if``; a call of a
            function of the same file.
        node: Where it begins: a condition, a loop, a call.
        autocast: Which, for an autocast.
        grad: Whether gradients are recorded, for a switch of that.
        arm: For an arm: the condition, and whether (or which of several) it is.
        is_decorator: It is around all of a function.
        function: For a call: which.
    """

    kind: Kind
    node: ast.AST
    autocast: Autocast | None = None
    grad: bool = True
    arm: tuple[str, int] = ("", 0)
    is_decorator: bool = False
    function: Function | None = None


@dataclass(frozen=True)
class Site:
    """A call where it stands.

    Attributes:
        call: The call.
        scope: The names that are seen there.
        statement: The statement it is part of.
        inside: What it is inside of, the outermost first.
    """

    call: ast.Call
    scope: Scope
    statement: ast.stmt
    inside: tuple[Around, ...]

    @property
    def line(self) -> int:
        """Its line in the file."""
        return self.call.lineno

    @property
    def method(self) -> str:
        """The name behind the last dot: ``step``; empty for a plain function."""
        return self.call.func.attr if isinstance(self.call.func, ast.Attribute) else ""

    @property
    def owner(self) -> ast.expr:
        """What stands before the last dot; the function itself if there is none."""
        return self.call.func.value if isinstance(self.call.func, ast.Attribute) else self.call.func

    @property
    def autocast_at(self) -> int:
        """The position in ``inside`` of the autocast that decides; -1 if there is none."""
        at = [n for n, around in enumerate(self.inside) if around.kind == "autocast"]
        return at[-1] if at else -1

    @property
    def autocast(self) -> Autocast | None:
        """The autocast that is on there, or may be."""
        at = self.autocast_at
        found = self.inside[at].autocast if at >= 0 else None
        return found if found is not None and found.enabled is not False else None

    @property
    def has_grad(self) -> bool:
        """Whether gradients are recorded."""
        return all([around.grad for around in self.inside if around.kind == "grad"][-1:])

    @property
    def loops(self) -> tuple[ast.AST, ...]:
        """The loops around it."""
        return tuple(around.node for around in self.inside if around.kind == "loop")

    @property
    def calls(self) -> tuple[ast.AST, ...]:
        """The calls of functions of the file that lead to it: one run of one function."""
        return tuple(around.node for around in self.inside if around.kind == "call")

    @property
    def arms(self) -> dict[str, int]:
        """The conditions around it."""
        return dict(around.arm for around in self.inside if around.kind == "arm")

    def excludes(self, other: Site) -> bool:
        """Say whether the two are in different arms of one condition."""
        theirs = other.arms
        return any(theirs.get(test, arm) != arm for test, arm in self.arms.items())


class Walk:
    """Lists the calls that a file or a function makes.

    Args:
        meaning: Says what is an autocast.
    """

    def __init__(self, meaning: Meaning) -> None:
        self._meaning = meaning
        self._values = meaning.values

    def of(self, root: ast.Module | Function) -> list[Site]:
        """Return the calls of a root, and of the functions that it calls, in order."""
        return list(islice(self._body(root, ()), MOST_SITES))

    def _body(self, root: ast.Module | Function, inside: tuple[Around, ...]) -> Iterator[Site]:
        scope = self._values.names.scopes[root]
        if not isinstance(root, ast.Module):
            for decorator in root.decorator_list:
                inside += tuple(self._entered(decorator, scope, is_decorator=True))
        yield from self._block(root.body, scope, inside)

    def _block(
        self, statements: Iterable[ast.stmt], scope: Scope, inside: tuple[Around, ...]
    ) -> Iterator[Site]:
        for statement in statements:
            yield from self._statement(statement, scope, inside)
            # What comes after `if a: return` runs in the other arm.
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                inside += (_arm(statement, statement.test, 1),)

    def _statement(
        self, statement: ast.stmt, scope: Scope, inside: tuple[Around, ...]
    ) -> Iterator[Site]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return  # what is in them runs when it is called
            case ast.If(test=test, body=body, orelse=orelse):
                yield from self._calls(test, statement, scope, inside)
                for which, block in enumerate((body, orelse)):
                    arm = _arm(statement, test, which)
                    yield from self._block(block, scope, (*inside, arm))
            case ast.For(iter=iterated) | ast.AsyncFor(iter=iterated):
                yield from self._calls(iterated, statement, scope, inside)
                yield from self._loop(statement, scope, inside)
            case ast.While(test=test):
                yield from self._calls(test, statement, scope, inside)
                yield from self._loop(statement, scope, inside)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    yield from self._calls(item.context_expr, statement, scope, inside)
                    inside += tuple(self._entered(item.context_expr, scope))
                yield from self._block(body, scope, inside)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                yield from self._block(body, scope, inside)
                for which, handler in enumerate(handlers, 1):
                    arm = Around("arm", handler, arm=(f"try {statement.lineno}", which))
                    yield from self._block(handler.body, scope, (*inside, arm))
                yield from self._block([*orelse, *final], scope, inside)
            case ast.Match(subject=subject, cases=cases):
                yield from self._calls(subject, statement, scope, inside)
                for which, each in enumerate(cases):
                    arm = Around("arm", each, arm=(f"match {statement.lineno}", which))
                    yield from self._block(each.body, scope, (*inside, arm))
            case _:
                yield from self._calls(statement, statement, scope, inside)

    def _loop(
        self,
        loop: ast.For | ast.AsyncFor | ast.While,
        scope: Scope,
        inside: tuple[Around, ...],
    ) -> Iterator[Site]:
        yield from self._block(loop.body, scope, (*inside, Around("loop", loop)))
        yield from self._block(loop.orelse, scope, inside)

    def _entered(
        self, context: ast.expr, scope: Scope, is_decorator: bool = False
    ) -> Iterator[Around]:
        autocast = self._meaning.autocast(context, scope)
        if autocast is not None:
            yield Around("autocast", context, autocast, is_decorator=is_decorator)
        grad = self._meaning.switches_grad(context, scope)
        if grad is not None:
            yield Around("grad", context, grad=grad, is_decorator=is_decorator)

    def _calls(
        self, node: ast.AST, statement: ast.stmt, scope: Scope, inside: tuple[Around, ...]
    ) -> Iterator[Site]:
        """Yield the calls in an expression, inner ones first, as they run."""
        if isinstance(node, ast.Lambda):
            return
        if isinstance(node, ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp):
            inside = (*inside, Around("loop", node))
        for child in ast.iter_child_nodes(node):
            yield from self._calls(child, statement, scope, inside)
        if isinstance(node, ast.Call):
            yield Site(node, scope, statement, inside)
            yield from self._followed(node, scope, inside)

    def _followed(self, call: ast.Call, scope: Scope, inside: tuple[Around, ...]) -> Iterator[Site]:
        function = self._values.local(call, scope)
        outer = [around.function for around in inside if around.kind == "call"]
        if function is not None and function not in outer and len(outer) < MOST_NESTED_CALLS:
            called = Around("call", call, function=function)
            yield from self._body(function, (*inside, called))


def _arm(statement: ast.If, test: ast.expr, which: int) -> Around:
    """Name an arm by its condition: two ``if`` with one condition are not independent."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, which = test.operand, 1 - which
    is_none = (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )
    if isinstance(test, ast.Compare) and is_none:
        # `x is not None` and `x` are one condition as far as objects go.
        which = which if isinstance(test.ops[0], ast.IsNot | ast.NotEq) else 1 - which
        return Around("arm", statement, arm=(ast.unparse(test.left), which))
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.NotEq):
        test = ast.Compare(test.left, [ast.Eq()], test.comparators)
        which = 1 - which
    return Around("arm", statement, arm=(ast.unparse(test), which))


def _leaves(block: list[ast.stmt]) -> bool:
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
