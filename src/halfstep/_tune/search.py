"""Finding the fewest islands. Names and numbers only: what is measured is the caller's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Islands: TypeAlias = tuple[str, ...]
"""Names of modules, ops in modules, and ops everywhere.

``"blocks.0.mlp"``, ``"softmax@blocks.0.attn"``, ``"cross_entropy_loss@"``.
"""

MOST_OPS = 3
"""An island is replaced by so many ops in it at most."""


@dataclass(frozen=True)
class Found:
    """What a model is like with some islands.

    Attributes:
        num_failing: How many modules are out of bounds.
        origins: Where that begins; if it is not in a module, ops.
        suspects: All that can be islands, what adds most to the error first.
    """

    num_failing: int
    origins: tuple[str, ...]
    suspects: tuple[str, ...]


Look: TypeAlias = Callable[[Islands], Found]
"""Measures the model with some islands; asked for the same again, it knows the answer."""


def smallest(look: Look) -> Islands:
    """Return islands with which the fewest modules are out of bounds, none of which can be dropped.

    Where a failure begins an island is made, until there is none; that may be too many, for a
    failure can begin in one module and be cured in one before it. So then those are dropped that
    are not needed, many at once as long as that works. It measures about twice for each island that
    is needed, and once where none is.

    Args:
        look: Measures.

    Returns:
        The islands, the ones that were found first in front.
    """
    return pruned(look, grown(look))


def narrowed(look: Look, islands: Islands, ops: Mapping[str, Sequence[str]]) -> Islands:
    """Replace islands by a few of the ops that run in them, where that is enough.

    Args:
        look: Measures.
        islands: What :func:`smallest` has found.
        ops: What can be tried for an island instead, by its name.
    """
    most = look(islands).num_failing
    for name in islands:
        others = tuple(other for other in islands if other != name)
        instead = others + tuple(f"{op}@{name}" for op in ops.get(name, ()))
        if instead != others and look(instead).num_failing <= most:
            fewer = pruned(look, instead)
            if len(fewer) <= len(others) + MOST_OPS:
                islands = fewer
    return islands


def grown(look: Look) -> Islands:
    """Return islands with which none is out of bounds; all there can be, if that is never so."""
    islands: Islands = ()
    num_new = 1
    while (found := look(islands)).num_failing:
        left = [name for name in found.suspects if name not in islands]
        if not left:
            break
        new = [name for name in left if name in found.origins]
        if not new:  # an island does not help where the failure begins
            new, num_new = left[:num_new], 2 * num_new
        islands += tuple(new)
    return islands


def pruned(look: Look, islands: Islands) -> Islands:
    """Return islands of which none can be dropped without more modules out of bounds."""
    most = look(islands).num_failing
    size = max(len(islands) // 2, 1)
    while islands:
        before = islands
        for chunk in _chunks(islands[::-1], size):  # what was added last is needed least
            rest = tuple(name for name in islands if name not in chunk)
            if look(rest).num_failing <= most:
                islands = rest
        if size == 1 and islands == before:
            break
        size = max(size // 2, 1)
    return islands


def _chunks(names: Sequence[str], size: int) -> list[Sequence[str]]:
    return [names[start : start + size] for start in range(0, len(names), size)]
