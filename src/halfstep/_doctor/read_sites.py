"""Calls of a source file and the constructs around them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Literal, TypeAlias

from halfstep._doctor.read_names import Function, NameScope
from halfstep._doctor.read_values import SourceAutocast

AroundKind: TypeAlias = Literal["autocast", "grad", "loop", "arm", "call"]


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


Inside: TypeAlias = tuple[Around, ...]
"""The constructs around a call, the outermost first."""


@dataclass(frozen=True)
class Site:
    """A call and its surroundings."""

    call: ast.Call
    scope: NameScope  # the names that are visible there
    statement: ast.stmt  # that contains it
    inside: Inside

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
    def region(self) -> Around | None:
        """The autocast around it in the same function."""
        at = self.autocast_at
        is_own = at >= 0 and not any(each.kind == "call" for each in self.inside[at:])
        return self.inside[at] if is_own else None

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
