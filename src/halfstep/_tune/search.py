"""A search for the fewest islands; the caller provides the measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

Islands: TypeAlias = tuple[str, ...]
"""Names of modules, ops in modules, and ops everywhere.

Examples: ``"blocks.0.mlp"``, ``"softmax@blocks.0.attn"``, ``"cross_entropy_loss@"``.
"""

MOST_OPS = 3
"""The largest number of ops that may replace an island."""


@dataclass(frozen=True)
class IslandTrial:
    """The result of a model with some islands."""

    num_failing: int  # modules out of bounds, and 1 more if the loss is not finite
    origins: tuple[str, ...]  # the modules where failures begin; ops if outside of modules
    suspects: tuple[str, ...]  # all possible islands, in the order in which to try them


Measure: TypeAlias = Callable[[Islands], IslandTrial]
"""A function that measures the model with some islands and caches the results."""


def smallest(measure: Measure) -> Islands:
    """Return islands with which the fewest modules are out of bounds; each of them is needed.

    Modules where a failure begins become islands until no failure is left. These may be too many,
    since an island at an earlier module can cure a failure. Islands that are not needed are
    therefore dropped, several at once while that works. The search takes about two measurements
    for each needed island, and one if none is needed. The islands are in the order of discovery.
    """
    return pruned(measure, grown(measure))


def narrowed(measure: Measure, islands: Islands, ops: Mapping[str, Sequence[str]]) -> Islands:
    """Replace islands by a few of their ops, if that is enough.

    ``ops`` are the ops to try, by the name of the island.
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
        if not new:  # all origins are islands: try more and more suspects
            new, num_new = left[:num_new], 2 * num_new
        islands += tuple(new)
    return islands


def pruned(measure: Measure, islands: Islands) -> Islands:
    """Return islands without those that can be dropped while no more modules fail."""
    most = measure(islands).num_failing
    size = max(len(islands) // 2, 1)
    while islands:
        before = islands
        tried = islands[::-1]  # the last ones are the least likely to be needed
        for chunk in (tried[start : start + size] for start in range(0, len(tried), size)):
            rest = tuple(name for name in islands if name not in chunk)
            if measure(rest).num_failing <= most:
                islands = rest
        if size == 1 and islands == before:
            break
        size = max(size // 2, 1)
    return islands
