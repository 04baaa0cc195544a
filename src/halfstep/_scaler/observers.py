"""The observers of all scalers, and the scaler that is stepping; see :mod:`halfstep.events`.

Scalers stand above this file, so their type has no name here.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, Protocol

from halfstep._scaler.outcome import Outcome


class Observer(Protocol):
    """An observer of the losses and iterations of all scalers. It must not wait for the device.

    Attributes:
        is_diagnosing: Whether it explains what goes bad.
    """

    is_diagnosing: bool

    def on_loss(self, scaler: Any, outputs: Any) -> None:
        """Handle the argument of ``scale`` before it is scaled."""

    def on_iteration(
        self, scaler: Any, outcomes: Sequence[Outcome], left_out: Sequence[Outcome]
    ) -> None:
        """Handle the end of an iteration, with the outcomes of its steps.

        ``left_out``: those of optimizers that were only unscaled.
        """


OBSERVERS: list[Observer] = []
"""The active observers, oldest first."""


class _Thread(threading.local):
    stepping: Any = None


THIS_THREAD = _Thread()
"""State of the current thread: the GradScaler (also of a guard) that is stepping an optimizer."""
