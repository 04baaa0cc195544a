"""Observers of the iterations of all scalers, and whether a scaler is making a step."""

from __future__ import annotations

import threading
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


class _Thread(threading.local):
    is_in_step = False


THIS_THREAD = _Thread()
"""What the present thread is in."""


def is_in_step() -> bool:
    """Return whether a scaler makes the step of an optimizer that runs in this thread.

    A stage of a pipeline scales no loss: nothing else tells its steps from plain ones.
    """
    return THIS_THREAD.is_in_step
