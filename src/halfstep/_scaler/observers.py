"""Who wants to know of the iterations of every scaler in this process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from halfstep._scaler.outcome import Outcome

if TYPE_CHECKING:
    from halfstep._scaler.engine import Engine


class Observer(Protocol):
    """What a recorder of runs implements; nothing of it may wait for the device."""

    def on_loss(self, engine: Engine, outputs: Any) -> None:
        """Take note of what the user hands to ``scale``, before it is scaled."""

    def on_iteration(self, engine: Engine, outcomes: Sequence[Outcome]) -> None:
        """Take note that ``update`` has ended an iteration with these steps."""


OBSERVERS: list[Observer] = []
"""The observers, in the order in which they came."""
