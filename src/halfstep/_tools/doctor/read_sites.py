"""Calls of a source file, the constructs around them, and the conditions that hold there."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from halfstep._tools.doctor.read_names import Function, NameScope, dotted
from halfstep._tools.doctor.read_values import SourceAutocast

AroundKind: TypeAlias = Literal["autocast", "grad", "loop", "arm", "call"]


@dataclass(frozen=True)
class Around:
    """A construct around a call."""

    kind: AroundKind  # "arm": of a condition; "call": of a function of the same file
    node: ast.AST
    autocast: SourceAutocast | None = None
    grad: bool = True  # whether gradients are recorded
    arm: tuple[str, int] = ("", 0)  # condition, and the index of the arm
    is_decorator: bool = False  # it surrounds a whole function
    function: Function | None = None  # called function

    @property
    def line(self) -> int:
        return int(getattr(self.node, "lineno", 0))


Inside: TypeAlias = tuple[Around, ...]  # the constructs around a call, outermost first


@dataclass(frozen=True)
class Site:
    call: ast.Call
    scope: NameScope  # names that are visible there
    statement: ast.AST  # statement that contains the call
    inside: Inside

    @property
    def line(self) -> int:
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
    def target(self) -> ast.expr | None:
        """The target that its statement assigns to, None unless there is exactly one."""
        match self.statement:
            case ast.Assign(targets=[target]) | ast.AnnAssign(target=target):
                return target
        return None

    @property
    def target_name(self) -> str:
        """The target as text, empty unless it is a name with attributes."""
        return "" if self.target is None else dotted(self.target)

    @property
    def autocast_at(self) -> int:
        """The position in ``inside`` of the innermost autocast, -1 if there is none."""
        at = [n for n, around in enumerate(self.inside) if around.kind == "autocast"]
        return at[-1] if at else -1

    @property
    def autocast(self) -> SourceAutocast | None:
        """The innermost autocast, None if there is none or it is known to be disabled."""
        at = self.autocast_at
        found = self.inside[at].autocast if at >= 0 else None
        return found if found is not None and found.enabled is not False else None

    @property
    def region(self) -> Around | None:
        """The innermost autocast, if it is in the same function."""
        at = self.autocast_at
        is_own = at >= 0 and not any(each.kind == "call" for each in self.inside[at:])
        return self.inside[at] if is_own else None

    @property
    def has_grad(self) -> bool:
        return all([around.grad for around in self.inside if around.kind == "grad"][-1:])

    def around(self, kind: AroundKind) -> list[ast.AST]:
        """Return the surrounding nodes of one kind, such as loops, or the calls that lead to it."""
        return [around.node for around in self.inside if around.kind == kind]

    @property
    def arms(self) -> dict[str, int]:
        """The arms around it, by condition."""
        return dict(around.arm for around in self.inside if around.kind == "arm")

    def excludes(self, other: Site) -> bool:
        """Return whether two calls are in different arms of one condition."""
        theirs = other.arms
        return any(theirs.get(test, arm) != arm for test, arm in self.arms.items())


# --- paths and conditions -------------------------------------------------------------------------


MOST_PATHS = 16  # the largest number of paths that are kept; dropping paths can only hide findings

Names: TypeAlias = Mapping[str, "str | int"]
"""The meanings of names on a path: another name, or how often a loss was scaled."""

MIXED = "<mixed precision>"  # the name of all conditions that decide whether the loss is scaled


@dataclass(frozen=True)
class Path:
    state: Any  # hashable state of a walk
    # The conditions that hold (0) or do not hold (1), by their text.
    facts: Mapping[str, int] = field(default_factory=dict)
    names: Names = field(default_factory=dict)  # meanings of names


def forked(
    test: ast.expr, paths: list[Path], switches: Mapping[str, int]
) -> tuple[list[Path], list[Path]]:
    """Return the paths on which a condition holds, and those on which it does not.

    ``switches``: the conditions that decide whether the loss is scaled, each with the arm that
    scales it.
    """

    def on(arm: int) -> list[Path]:
        decided = set(_decided(test, arm, switches))
        known = dict(decided)
        is_contradiction = len(known) < len(decided)
        if is_contradiction or known.pop("True", 0) != 0 or known.pop("False", 1) != 1:
            return []
        fitting = (path for path in paths if all(path.facts.get(e, n) == n for e, n in decided))
        return [replace(path, facts={**path.facts, **known}) for path in fitting]

    return on(0), on(1)


def _decided(test: ast.expr, arm: int, switches: Mapping[str, int]) -> Iterator[tuple[str, int]]:
    """Yield the conditions that an arm of a condition decides, each with its own arm."""
    text, arm = condition_of(test, arm)
    scaling = switches.get(text)
    yield (text, arm) if scaling is None else (MIXED, arm ^ scaling)
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == (arm == 0):
        for part in test.values:
            yield from _decided(part, arm, switches)


def merged(paths: Iterable[Path]) -> list[Path]:
    """Return one path for each state, with the facts that hold on all paths with that state."""
    found: dict[Any, Path] = {}
    for path in paths:
        key = path.state, frozenset(path.names.items())
        other = found.get(key)
        if other is not None:
            path = replace(path, facts=dict(path.facts.items() & other.facts.items()))
        found[key] = path
    return list(found.values())[:MOST_PATHS]


def condition_of(test: ast.expr, which: int) -> tuple[str, int]:
    """Return the text of a condition without its negation, and the arm in which it holds."""
    while isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, which = test.operand, 1 - which
    match test:
        case ast.Compare(left=left, ops=[op], comparators=[ast.Constant(value=None)]):
            # For objects, `x is not None` and `x` are the same condition.
            test, which = left, which if isinstance(op, ast.IsNot | ast.NotEq) else 1 - which
        case ast.Compare(left=left, ops=[ast.NotEq()], comparators=compared):
            test, which = ast.Compare(left, [ast.Eq()], compared), 1 - which
    return ast.unparse(test).replace(" is not None", ""), which
