"""Search for the fewest islands. It knows names and numbers only; the caller measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Islands: TypeAlias = tuple[str, ...]
"""Names of modules, ops in modules, and ops everywhere.

``"blocks.0.mlp"``, ``"softmax@blocks.0.attn"``, ``"cross_entropy_loss@"``.
"""

MOST_OPS = 3
"""The most ops that replace an island."""


@dataclass(frozen=True)
class IslandTrial:
    """Result of a model with some islands."""

    num_failing: int  # modules that are out of bounds
    origins: tuple[str, ...]  # the modules where that begins; ops if it begins outside of modules
    suspects: tuple[str, ...]  # all possible islands, those that add most to the error first


Measure: TypeAlias = Callable[[Islands], IslandTrial]
"""Measures the model with some islands; it remembers the results."""


def smallest(measure: Measure) -> Islands:
    """Return islands with which the fewest modules are out of bounds; each of them is needed.

    An island is made where a failure begins, until no failure is left. That may be too many, since
    a failure can begin in one module and be cured in an earlier one. So islands that are not needed
    are dropped, many at once as long as that works. About two measurements are made for each island
    that is needed, and one if none is. The islands are in the order in which they were found.
    """
    return pruned(measure, grown(measure))


def narrowed(measure: Measure, islands: Islands, ops: Mapping[str, Sequence[str]]) -> Islands:
    """Replace islands by a few of their ops, if that is enough.

    ``ops`` are those to try instead of an island, by its name.
    """
    most = measure(islands).num_failing
    for name in islands:
        others = tuple(other for other in islands if other != name)
        instead = others + tuple(f"{op}@{name}" for op in ops.get(name, ()))
        if instead != others and measure(instead).num_failing <= most:
            fewer = pruned(measure, instead)
            if len(fewer) <= len(others) + MOST_OPS:
                islands = fewer
    return islands


def grown(measure: Measure) -> Islands:
    """Return islands with which no module is out of bounds, or all possible islands."""
    islands: Islands = ()
    num_new = 1
    while (found := measure(islands)).num_failing:
        left = [name for name in found.suspects if name not in islands]
        if not left:
            break
        new = [name for name in left if name in found.origins]
        if not new:  # an island where the failure begins does not help
            new, num_new = left[:num_new], 2 * num_new
        islands += tuple(new)
    return islands


def pruned(measure: Measure, islands: Islands) -> Islands:
    """Return islands without those that can be dropped with no more modules out of bounds."""
    most = measure(islands).num_failing
    size = max(len(islands) // 2, 1)
    while islands:
        before = islands
        tried = islands[::-1]  # the last ones are needed least
        for chunk in (tried[start : start + size] for start in range(0, len(tried), size)):
            rest = tuple(name for name in islands if name not in chunk)
            if measure(rest).num_failing <= most:
                islands = rest
        if size == 1 and islands == before:
            break
        size = max(size // 2, 1)
    return islands
