"""Skips that are part of dynamic scaling: the search for the largest usable scale."""

from __future__ import annotations

from halfstep._scaler.outcome import Outcome
from halfstep._scaler.scale_state import Reason

START_STEPS = 50
"""The number of steps that count as the start of a run."""
START_SKIPS = 16
"""The most skips at the start that count as the search for a usable scale."""
MOST_SKIPPED = 0.75
"""The largest share of skipped steps that counts as the search for a usable scale."""


class ExpectedSkips:
    """Distinguishes skips that are part of dynamic scaling from others."""

    def __init__(self) -> None:
        self._num_steps = self._num_skips = 0
        self._last_taken: Outcome | None = None

    def is_bad(self, outcome: Outcome) -> bool:
        """Return whether a finished step went bad. Sync: one for a fused optimizer."""
        self._num_steps += 1
        if outcome.taken:
            self._last_taken = outcome  # its scale is read only if a skip follows
            return False
        if outcome.reason is not Reason.OVERFLOW:
            return outcome.reason is not Reason.NORM
        self._num_skips += 1
        if self._num_skips <= START_SKIPS and self._num_steps <= START_STEPS:
            return False
        taken = self._last_taken
        has_just_grown = taken is not None and outcome.scale > taken.scale
        is_rare = self._num_skips <= max(START_SKIPS, MOST_SKIPPED * self._num_steps)
        return not (has_just_grown and is_rare)
