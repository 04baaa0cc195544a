"""A source file that was read: its calls in the order in which they run, and their contexts."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Literal, TypeAlias

from halfstep._doctor.read_names import Function, NameScope, dotted, words_of
from halfstep._doctor.read_values import Meaning, SourceAutocast, SourceScaler, Values

_CLIPS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "clip_grad_norm")
_CLIP_OWNERS = ("accelerator", "fabric", "strategy", "engine", "trainer")


@dataclass(frozen=True)
class Root:
    """The top level of a file, or a function, with all calls that it leads to, in order."""

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
        walk = _Walk(self.meaning)
        scopes = self.values.names.scopes
        chosen = [self._function] if self._function else [s.node for s in scopes.values()]
        return [Root(node, tuple(islice(walk.body(node, ()), MOST_SITES))) for node in chosen]

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
    """One construct around a call."""

    kind: AroundKind  # an arm is that of an ``if``; a call is that of a function of the same file
    node: ast.AST
    autocast: SourceAutocast | None = None
    grad: bool = True  # whether gradients are recorded
    arm: tuple[str, int] = ("", 0)  # the condition, and the number of the arm
    is_decorator: bool = False  # it surrounds a whole function
    function: Function | None = None  # that is called

    @property
    def line(self) -> int:
        """Its line in the file."""
        return int(getattr(self.node, "lineno", 0))


_Inside: TypeAlias = tuple[Around, ...]
"""The constructs around a call, the outermost first."""


@dataclass(frozen=True)
class Site:
    """A call and its surroundings."""

    call: ast.Call
    scope: NameScope  # the names that are visible there
    statement: ast.stmt  # that contains it
    inside: _Inside

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

    def around(self, kind: AroundKind) -> list[ast.AST]:
        """Return the nodes of one kind around it: the loops, or the calls that lead to it."""
        return [around.node for around in self.inside if around.kind == kind]

    @property
    def arms(self) -> dict[str, int]:
        """The conditions around it."""
        return dict(around.arm for around in self.inside if around.kind == "arm")

    def excludes(self, other: Site) -> bool:
        """Return whether the two are in different arms of one condition."""
        theirs = other.arms
        return any(theirs.get(test, arm) != arm for test, arm in self.arms.items())


class _Walk:
    """Lists the calls of a file or a function, and of the functions that it calls, in order."""

    def __init__(self, meaning: Meaning) -> None:
        self._meaning = meaning
        self._names = meaning.values.names

    def body(self, root: ast.Module | Function, inside: _Inside) -> Iterator[Site]:
        scope = self._names.scopes[root]
        if not isinstance(root, ast.Module):
            for decorator in root.decorator_list:
                inside += tuple(self._entered(decorator, scope, is_decorator=True))
        yield from self._block(root.body, scope, inside)

    def _block(self, block: list[ast.stmt], scope: NameScope, inside: _Inside) -> Iterator[Site]:
        for statement in block:
            yield from self._statement(statement, scope, inside)
            # Statements after `if a: return` run in the other arm.
            if isinstance(statement, ast.If) and not statement.orelse and _leaves(statement.body):
                inside += (_arm(statement, 1),)

    def _statement(self, statement: ast.stmt, scope: NameScope, inside: _Inside) -> Iterator[Site]:
        match statement:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                return  # their bodies run when they are called
            case ast.If(test=test, body=body, orelse=orelse):
                yield from self._calls(test, statement, scope, inside)
                for which, block in enumerate((body, orelse)):
                    yield from self._block(block, scope, (*inside, _arm(statement, which)))
            case ast.For(iter=head) | ast.AsyncFor(iter=head) | ast.While(test=head):
                yield from self._calls(head, statement, scope, inside)
                loop = Around("loop", statement)
                yield from self._block(statement.body, scope, (*inside, loop))
                yield from self._block(statement.orelse, scope, inside)
            case ast.With(items=items, body=body) | ast.AsyncWith(items=items, body=body):
                for item in items:
                    yield from self._calls(item.context_expr, statement, scope, inside)
                    inside += tuple(self._entered(item.context_expr, scope))
                yield from self._block(body, scope, inside)
            case ast.Try(body=body, handlers=handlers, orelse=orelse, finalbody=final):
                yield from self._block(body, scope, inside)
                yield from self._cases("try", statement, handlers, scope, inside)
                yield from self._block([*orelse, *final], scope, inside)
            case ast.Match(subject=subject, cases=cases):
                yield from self._calls(subject, statement, scope, inside)
                yield from self._cases("match", statement, cases, scope, inside)
            case _:
                yield from self._calls(statement, statement, scope, inside)

    def _cases(
        self,
        word: str,
        statement: ast.stmt,
        cases: Sequence[ast.ExceptHandler | ast.match_case],
        scope: NameScope,
        inside: _Inside,
    ) -> Iterator[Site]:
        for which, case in enumerate(cases, 1):  # 0: no handler runs
            arm = Around("arm", case, arm=(f"{word} {statement.lineno}", which))
            yield from self._block(case.body, scope, (*inside, arm))

    def _entered(
        self, context: ast.expr, scope: NameScope, is_decorator: bool = False
    ) -> Iterator[Around]:
        autocast = self._meaning.autocast(context, scope)
        if autocast is not None:
            yield Around("autocast", context, autocast, is_decorator=is_decorator)
        grad = self._meaning.switches_grad(context, scope)
        if grad is not None:
            yield Around("grad", context, grad=grad)

    def _calls(
        self, node: ast.AST, statement: ast.stmt, scope: NameScope, inside: _Inside
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
            function = self._names.called(node, scope)
            outer = [around.function for around in inside if around.kind == "call"]
            if function is not None and function not in outer and len(outer) < MOST_NESTED_CALLS:
                yield from self.body(function, (*inside, Around("call", node, function=function)))


def _arm(statement: ast.If, which: int) -> Around:
    """Identify an arm by its condition: two ``if`` with the same condition depend on each other."""
    test = statement.test
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, which = test.operand, 1 - which
    match test:
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=None)]):
            # For objects, `x is not None` and `x` are the same condition.
            test, which = left, which if isinstance(op, ast.IsNot | ast.NotEq) else 1 - which
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=compared):
            test, which = ast.Compare(left, [ast.Eq()], compared), 1 - which
    return Around("arm", statement, arm=(ast.unparse(test), which))


def _leaves(block: list[ast.stmt]) -> bool:
    return isinstance(block[-1], ast.Return | ast.Raise | ast.Continue | ast.Break)
