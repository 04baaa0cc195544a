"""Paths through code, and the conditions that hold on each."""

from __future__ import annotations

import ast
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

MOST_PATHS = 16
"""At most this many paths are kept; leaving some out can only hide a finding."""

Names: TypeAlias = Mapping[str, "str | int"]
"""What names stand for on a path: another name, or a value that the follower computes."""


@dataclass(frozen=True)
class Path:
    """One way through the code.

    Attributes:
        state: The state of the follower.
        facts: The conditions that hold (0) or do not hold (1), by their text.
        names: What names stand for.
    """

    state: Hashable
    facts: Mapping[str, int] = field(default_factory=dict)
    names: Names = field(default_factory=dict)


class Conditions:
    """Decides conditions along paths.

    Args:
        name: Returns the name of a condition, and 1 if its text is the opposite.
    """

    def __init__(self, name: Callable[[str], tuple[str, int]]) -> None:
        self._name = name
        self._texts: dict[tuple[ast.expr, int], tuple[str, int]] = {}

    def forked(self, test: ast.expr, paths: list[Path]) -> tuple[list[Path], list[Path]]:
        """Return the paths on which a condition holds, and those on which it does not."""
        forked = [
            [
                replace(p, facts=f)
                for p in paths
                if (f := self._assume(test, arm, p.facts)) is not None
            ]
            for arm in (0, 1)
        ]
        return forked[0], forked[1]

    def _assume(
        self, test: ast.expr, arm: int, facts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """Return the facts with a condition decided; None if they say the opposite."""
        known_text = self._texts.get((test, arm))
        if known_text is None:
            known_text = self._texts[test, arm] = condition_of(test, arm)
        text, arm = known_text
        if text in ("True", "False"):
            return facts if (text == "False") == arm else None
        name, is_opposite = self._name(text)
        key, which = name, arm ^ is_opposite
        if facts.get(key, which) != which:
            return None
        known: Mapping[str, int] | None = {**facts, key: which}
        decides_all = isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And) == (arm == 0)
        for part in test.values if decides_all and isinstance(test, ast.BoolOp) else ():
            known = None if known is None else self._assume(part, arm, known)
        return known


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
    return ast.unparse(test), which
