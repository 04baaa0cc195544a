"""A source file that was read: its calls in the order in which they run, and their contexts."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, TypeAlias

from halfstep._doctor.read_meaning import Meaning, SourceAutocast, SourceScaler
from halfstep._doctor.read_names import Function, NameScope, Values, dotted, words_of

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_grad_norm")
_CLIP_OWNERS = ("accelerator", "fabric", "strategy", "engine", "trainer")


@dataclass(frozen=True)
class Root:
    """The top level of a file, or a function, with all calls that it leads to.

    Attributes:
        node: The file or the function.
        sites: The calls, in order.
    """

    node: ast.Module | Function
    sites: tuple[Site, ...]


class Program:
    """A source file that was read.

    Args:
        tree: The file.
        known: Objects that names stand for.
        function: Check only this function and what it calls; None for the whole file.
    """

    def __init__(
        self,
        tree: ast.Module,
        known: Mapping[str, object],
        function: Function | None = None,
    ) -> None:
        self.tree = tree
        self.values = Values(tree, known)
        self.meaning = Meaning(self.values)
        self.known = known
        self._function = function

    @cached_property
    def roots(self) -> list[Root]:
        """The parts of the file to check."""
        walk = Walk(self.meaning)
        scopes = self.values.names.scopes
        nodes = [scope.node for scope in scopes.values()]
        chosen = nodes if self._function is None else [self._function]
        return [Root(node, tuple(walk.of(node))) for node in chosen]

    @property
    def sites(self) -> Iterator[Site]:
        """The calls of all roots; a call reached from several roots appears several times."""
        for root in self.roots:
            yield from root.sites

    @cached_property
    def words(self) -> set[str]:
        """All names, attributes and keywords in the parts to check."""
        if self._function is None:
            return set(words_of(self.tree))
        functions = {self._function, *(site.scope.node for site in self.sites)}
        return {word for function in functions for word in words_of(function)}

    @property
    def imported(self) -> set[str]:
        """The full names of what the file imports."""
        return set(self.values.names.imports.values())

    # --- kinds of calls ---------------------------------------------------------------------------

    def is_backward(self, site: Site) -> bool:
        """Return whether a call runs a backward pass."""
        if site.method != "backward":
            return False
        first = dotted(site.call.args[0]) if site.call.args else ""
        is_inherited = isinstance(site.owner, ast.Call) and dotted(site.owner.func) == "super"
        return first not in ("ctx", "context") and not is_inherited

    def scaled_by(self, site: Site) -> str:
        """Return the scaler that scales the loss of a backward pass; empty if none does."""
        if not self.is_backward(site):
            return ""
        for written in self.values.candidates(site.owner, site.scope):
            if written is None or not isinstance(written[0], ast.Call):
                continue
            function, scope = written[0].func, written[1]
            if not isinstance(function, ast.Attribute) or function.attr != "scale":
                continue
            if self.meaning.is_scaler(function.value, scope):
                scaler = self.meaning.scaler(function.value, scope)
                is_on = scaler is None or scaler.enabled is not False
                return dotted(function.value) if is_on else ""
        return ""

    def is_scaler_step(self, site: Site) -> bool:
        """Return whether a call steps an optimizer through a scaler that may be on."""
        is_step = site.method == "step" and bool(site.call.args or site.call.keywords)
        if not is_step or not self.meaning.is_scaler(site.owner, site.scope):
            return False
        scaler = self.meaning.scaler(site.owner, site.scope)
        return scaler is None or scaler.enabled is not False

    def is_optimizer_step(self, site: Site) -> bool:
        """Return whether a call steps an optimizer without a scaler."""
        return site.method == "step" and self.meaning.is_optimizer(site.owner, site.scope)

    def is_clip(self, site: Site) -> bool:
        """Return whether a call clips gradients as they are."""
        name = self.values.qualified(site.call.func, site.scope).rpartition(".")[2]
        if (name or site.method or dotted(site.call.func)) not in _CLIPS:
            return False
        owner = dotted(site.owner).rpartition(".")[2].lower()
        return not owner.endswith(_CLIP_OWNERS) and not self.meaning.is_scaler(
            site.owner, site.scope
        )

    # --- scalers ---------------------------------------------------------------------------------

    @cached_property
    def scalers(self) -> dict[str, SourceScaler]:
        """The scalers that are made in the file, or known, by name."""
        found: dict[str, SourceScaler] = {}
        for site in self.sites:
            scaler = self.meaning.scaler(site.owner, site.scope) if site.method else None
            if scaler is not None:
                found.setdefault(dotted(site.owner), scaler)
        return found


# --- calls and their contexts ---------------------------------------------------------------------


AroundKind: TypeAlias = Literal["autocast", "grad", "loop", "arm", "call"]

MOST_NESTED_CALLS = 5
"""Calls of functions are followed to this depth."""
MOST_SITES = 5000
"""At most this many calls are listed for a root: nested functions may multiply them."""


@dataclass(frozen=True)
class Around:
    """One construct around a call.

    Attributes:
        kind: An autocast; a switch of gradient recording; a loop; an arm of an ``if``; a call of a
            function of the same file.
        node: Its node: a condition, a loop, a call.
        autocast: For an autocast, its properties.
        grad: For a gradient switch, whether gradients are recorded.
        arm: For an arm, the condition and the number of the arm.
        is_decorator: Whether it surrounds a whole function.
        function: For a call, the function.
    """

    kind: AroundKind
    node: ast.AST
    autocast: SourceAutocast | None = None
    grad: bool = True
    arm: tuple[str, int] = ("", 0)
    is_decorator: bool = False
    function: Function | None = None


@dataclass(frozen=True)
class Site:
    """A call and its surroundings.

    Attributes:
        call: The call.
        scope: The names that are visible there.
        statement: The statement that contains it.
        inside: The constructs around it, the outermost first.
    """

    call: ast.Call
    scope: NameScope
    statement: ast.stmt
    inside: tuple[Around, ...]

    @property
    def line(self) -> int:
        """Its line in the file."""
        return self.call.lineno

    @property
    def method(self) -> str:
        """The name after the last dot: ``step``; empty for a plain function."""
        return self.call.func.attr if isinstance(self.call.func, ast.Attribute) else ""

    @property
    def owner(self) -> ast.expr:
        """The expression before the last dot; the function itself if there is none."""
        return self.call.func.value if isinstance(self.call.func, ast.Attribute) else self.call.func

    @property
    def autocast_at(self) -> int:
        """The position in ``inside`` of the autocast that decides; -1 if there is none."""
        at = [n for n, around in enumerate(self.inside) if around.kind == "autocast"]
        return at[-1] if at else -1

    @property
    def autocast(self) -> SourceAutocast | None:
        """The autocast that is, or may be, enabled there."""
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
        """The calls of the file's functions that lead to it: one call of one function."""
        return tuple(around.node for around in self.inside if around.kind == "call")

    @property
    def arms(self) -> dict[str, int]:
        """The conditions around it."""
        return dict(around.arm for around in self.inside if around.kind == "arm")

    def excludes(self, other: Site) -> bool:
        """Return whether the two are in different arms of one condition."""
        theirs = other.arms
        return any(theirs.get(test, arm) != arm for test, arm in self.arms.items())


class Walk:
    """Lists the calls of a file or a function.

    Args:
        meaning: Recognizes autocasts.
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
        self, statements: Iterable[ast.stmt], scope: NameScope, inside: tuple[Around, ...]
    ) -> Iterator[Site]:
        for statement in statements:
            yield from self._statement(statement, scope, inside)
            # Statements after `if a: return` run in the other arm.
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                inside += (_arm(statement, statement.test, 1),)

    def _statement(
        self, statement: ast.stmt, scope: NameScope, inside: tuple[Around, ...]
    ) -> Iterator[Site]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return  # their bodies run when they are called
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
        scope: NameScope,
        inside: tuple[Around, ...],
    ) -> Iterator[Site]:
        yield from self._block(loop.body, scope, (*inside, Around("loop", loop)))
        yield from self._block(loop.orelse, scope, inside)

    def _entered(
        self, context: ast.expr, scope: NameScope, is_decorator: bool = False
    ) -> Iterator[Around]:
        autocast = self._meaning.autocast(context, scope)
        if autocast is not None:
            yield Around("autocast", context, autocast, is_decorator=is_decorator)
        grad = self._meaning.switches_grad(context, scope)
        if grad is not None:
            yield Around("grad", context, grad=grad, is_decorator=is_decorator)

    def _calls(
        self, node: ast.AST, statement: ast.stmt, scope: NameScope, inside: tuple[Around, ...]
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

    def _followed(
        self, call: ast.Call, scope: NameScope, inside: tuple[Around, ...]
    ) -> Iterator[Site]:
        function = self._values.local(call, scope)
        outer = [around.function for around in inside if around.kind == "call"]
        if function is not None and function not in outer and len(outer) < MOST_NESTED_CALLS:
            called = Around("call", call, function=function)
            yield from self._body(function, (*inside, called))


def _arm(statement: ast.If, test: ast.expr, which: int) -> Around:
    """Identify an arm by its condition: two ``if`` with the same condition depend on each other."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, which = test.operand, 1 - which
    is_none = (
        isinstance(test, ast.Compare)
        and len(test.ops) == 1
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    )
    if isinstance(test, ast.Compare) and is_none:
        # For objects, `x is not None` and `x` are the same condition.
        which = which if isinstance(test.ops[0], ast.IsNot | ast.NotEq) else 1 - which
        return Around("arm", statement, arm=(ast.unparse(test.left), which))
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.NotEq):
        test = ast.Compare(test.left, [ast.Eq()], test.comparators)
        which = 1 - which
    return Around("arm", statement, arm=(ast.unparse(test), which))


def _leaves(block: list[ast.stmt]) -> bool:
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
