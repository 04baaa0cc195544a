"""What names stand for along a path: keys of objects, and values that a follower computes."""

from __future__ import annotations

import ast
import re
from collections.abc import Hashable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from halfstep._doctor.read_conditions import Names, Path
from halfstep._doctor.read_names import FileNames, NameScope, dotted
from halfstep._doctor.read_sites import Site

if TYPE_CHECKING:
    from halfstep._doctor.read_paths import Walk


class Follower(Protocol):
    """Computes states along paths."""

    def may_matter(self, call: ast.Call) -> bool:
        """Return whether a call may be relevant, by its name and arguments."""

    def is_relevant(self, site: Site, walk: Walk) -> bool:
        """Return whether a call may change the state."""

    def is_object(self, key: str) -> bool:
        """Return whether the object with a key is one to follow."""

    def is_loss(self, key: str) -> bool:
        """Return whether a name is typical for a value whose number matters."""

    def after_call(self, site: Site, path: Path, walk: Walk) -> Hashable:
        """Return the state after a relevant call."""

    def after_assignment(self, key: str, value: ast.expr | None, state: Hashable) -> Hashable:
        """Return the state after a variable got a new value."""

    def after_failure(self, state: Hashable) -> Hashable:
        """Return the state after an exception was caught."""

    def value(self, node: ast.expr, scope: NameScope, names: Names, keys: Bindings) -> int:
        """Return a number for a value; 0 for an ordinary one."""

    def condition(self, test: str) -> tuple[str, int]:
        """Return the name of a condition, and 1 if ``test`` is its opposite."""


class Bindings:
    """The keys and values of names.

    Args:
        names: The names of the file.
        follower: Computes the values; None where there are no paths.
    """

    def __init__(self, names: FileNames, follower: Follower | None) -> None:
        self._names = names
        self._follower = follower
        self._frames: dict[NameScope, str] = {}

    def key(self, node: ast.expr, scope: NameScope, names: Names) -> str:
        """Return what identifies the object that an expression stands for.

        Elements of a sequence that is indexed by a variable or looped over have one key, that
        ends in ``[*]``.
        """
        match node:
            case ast.Name(id="self"):
                return "self"
            case ast.Name(id=name):
                key = self._frame(name, scope) + name
            case ast.Attribute(value=value, attr=attribute):
                key = f"{self.key(value, scope, names)}.{attribute}"
            case ast.Subscript(value=value, slice=ast.Constant(value=index)):
                key = f"{self.key(value, scope, names)}[{index!r}]"
            case ast.Subscript(value=value):
                key = f"{self.key(value, scope, names)}[*]"
            case _:
                return ast.unparse(node)
        found = names.get(key)
        return found if isinstance(found, str) else key

    def _frame(self, name: str, scope: NameScope) -> str:
        found: NameScope | None = scope
        while found is not None and name not in found.bindings:
            found = found.parent
        return "" if found is None else self._frames.get(found, "")

    def _bind(
        self,
        target: ast.expr,
        value: ast.expr | None,
        scope: NameScope,
        path: Path,
        element: str | int,
    ) -> Path:
        """Bind a target to a value, or to an element of the sequence with a key."""
        assert self._follower is not None
        if isinstance(target, ast.Tuple | ast.List):
            parts: Sequence[ast.expr | None] = [None] * len(target.elts)
            if isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts):
                parts = value.elts
            elif value is not None:  # all parts of a scaled result are taken for scaled
                element = self._follower.value(value, scope, path.names, self)
            for at, (part, of) in enumerate(zip(target.elts, parts, strict=True)):
                inner = f"{element}.{at}" if element and isinstance(element, str) else element
                path = self._bind(part, of, scope, path, inner)
            return path
        names = dict(path.names)
        own = self._own_key(target, scope, names)
        stands_for = element
        if value is not None:
            stands_for = self._follower.value(value, scope, names, self)
            key = self.key(value, scope, names)
            if stands_for <= 0 and self._follower.is_object(key):
                stands_for = key
        names.pop(own, None)
        is_object = isinstance(stands_for, int) or self._follower.is_object(stands_for)
        if stands_for and stands_for != own and is_object:
            names[own] = stands_for
        elif isinstance(target, ast.Attribute) and self._follower.is_loss(target.attr):
            names[own] = 0
        facts = path.facts
        if facts and dotted(target):
            mentions = re.compile(rf"(?<![\w.]){re.escape(dotted(target))}(?!\w)")
            facts = {test: arm for test, arm in facts.items() if not mentions.search(test)}
        return Path(self._follower.after_assignment(own, value, path.state), facts, names)

    def _own_key(self, target: ast.expr, scope: NameScope, names: dict[str, str | int]) -> str:
        """Return the key of the variable itself, not of what it stands for now."""
        if isinstance(target, ast.Name):
            return self._frame(target.id, scope) + target.id
        if isinstance(target, ast.Attribute):
            return f"{self.key(target.value, scope, names)}.{target.attr}"
        return self.key(target, scope, {})

    def _bind_element(
        self, target: ast.expr, sequence: ast.expr, scope: NameScope, path: Path
    ) -> Path:
        match sequence, target:
            case ast.Call(func=ast.Name(id="zip"), args=args), ast.Tuple(elts=parts) if len(
                args
            ) == len(parts):
                for part, of in zip(parts, args, strict=True):
                    path = self._bind_element(part, of, scope, path)
                return path
            case ast.Call(func=ast.Name(id="enumerate"), args=[of, *_]), ast.Tuple(elts=[at, part]):
                path = self._bind(at, None, scope, path, "")
                return self._bind_element(part, of, scope, path)
        element = f"{self.key(sequence, scope, path.names)}[*]"
        return self._bind(target, None, scope, path, element)

    def _pass(self, key: str, value: ast.expr, scope: NameScope, path: Path) -> Path:
        assert self._follower is not None
        number = self._follower.value(value, scope, path.names, self)
        own = self.key(value, scope, path.names)
        is_object = number <= 0 and self._follower.is_object(own)
        return replace(path, names={**path.names, key: own if is_object else number})

    def _returned(self, frame: str, call: ast.Call, path: Path) -> Path:
        names = dict(without(frame, path.names))
        returned = names.pop("return", 0)
        return replace(path, names=names | {call_key(call): returned})


def call_key(call: ast.Call) -> str:
    """Return the name under which a path has the value that a call returned."""
    return f"call@{call.lineno}:{call.col_offset}"


def without(prefix: str, names: Names) -> Names:
    """Return the names that do not begin with a prefix."""
    return {key: value for key, value in names.items() if not key.startswith(prefix)}
