"""How the ops of a block compute: what the two ways to simulate a format have in common."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from halfstep._simulate.counts import Counts
from halfstep._trace.rows import Phase


@dataclass(frozen=True)
class Where:
    """Where an op runs.

    Attributes:
        module: The path of the module that it belongs to.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        is_lowered: Whether it is part of an op that the policy lowers, or of its gradient.
        counts: What counts the values that are rounded.
    """

    module: str
    phase: Phase
    is_lowered: bool
    counts: Counts

    def note(self, values: Tensor) -> None:
        """Count values just before they are rounded. Sync: none."""
        self.counts.add(self.module, self.phase, values)


class Arithmetic(Protocol):
    """Runs an op below autograd as it would run on hardware that has the format."""

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], where: Where) -> Any:
        """Run an op and return its result.

        Args:
            func: The op.
            args: Its arguments.
            kwargs: Its keyword arguments.
            where: Where it runs.
        """
        ...


def each_tensor(value: Any, function: Callable[[Tensor], Any]) -> Any:
    """Return a value with ``function`` of each tensor in it and in its lists, tuples and dicts."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        return type(value)([each_tensor(item, function) for item in value])
    if isinstance(value, dict):
        return {key: each_tensor(item, function) for key, item in value.items()}
    return value
