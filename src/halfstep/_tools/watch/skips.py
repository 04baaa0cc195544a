"""Overflows by which dynamic scaling finds the largest usable scale, and others.

The watch, the report and ``check`` count skipped steps by this one rule.
"""

from __future__ import annotations

import math
from typing import Literal

SETTLED = 10
"""The number of taken iterations in a row that shows that a scale is usable: it ends the start."""
LONGEST_START = 16  # the number of skips that brings PyTorch's initial scale down to 1
MOST_FALLS = 8  # the largest number of falls until a scale is usable again
ENDLESS = 5  # the number of skipped iterations at the end from which on skips count as unending
MANY = 0.1  # the share of skipped steps from which on they slow down learning
Search = Literal["start", "growth", "fall"]


class ScaleSearch:
    """Search for the largest usable scale, iteration by iteration.

    An overflow is part of it in three cases. ``"start"``: no iteration has overflowed at a smaller
    scale, it has not grown, and no ten iterations in a row were taken. ``"growth"``: it brings the
    scale back to a value from which it has grown, however long ago. ``"fall"``: it brings the scale
    below that, as larger gradients do, and not many times with fewer than ten taken iterations in a
    row between. A trial of the scale from before belongs to the skips before it.
    """

    def __init__(self) -> None:
        self.is_starting = True
        self.taken_in_a_row = 0
        self._num_falls = 0
        self._lowest = math.inf
        self._before: float | None = None
        self._grown_from: list[float] = []
        self._was_skipped = self._follows_skip = False

    def kind_of(
        self, scale: float | None, scale_after: float, *, is_taken: bool, is_overflow: bool
    ) -> Search | None:
        """Return the part of the search that the next iteration is; None if it is not part of it.

        ``scale`` is None if nothing was scaled. Of a taken iteration, only that is read.
        """
        before, self._before = self._before, self._before if scale is None else scale
        # In a trial, the scale comes back to a far larger one.
        rise = 1.0 if before is None or scale is None else scale / before
        is_trial = rise > 2.0 and self._follows_skip
        if before is not None and rise > 1.0 and not is_trial:
            self._grown_from.append(before)
        self._follows_skip, self._was_skipped = self._was_skipped, not is_taken
        if is_taken:
            self.taken_in_a_row += 1
            self.is_starting &= self.taken_in_a_row < SETTLED
            return None
        if self.taken_in_a_row >= SETTLED:
            self._num_falls = 0
        self.taken_in_a_row = 0
        is_back = bool(self._grown_from) and scale_after >= self._grown_from[-1]
        self._grown_from = [before for before in self._grown_from if before < scale_after]
        if scale is None or not is_overflow:
            self.is_starting = False
            return None
        if is_trial:
            return "start" if self.is_starting else "fall"
        self.is_starting &= scale <= self._lowest
        self._lowest = min(self._lowest, scale)
        if self.is_starting and not is_back:
            return "start"
        if is_back:
            return "growth"
        self._num_falls += 1
        return "fall" if scale_after < scale and self._num_falls <= MOST_FALLS else None


def are_a_start(num_skipped: int, num: int) -> bool:
    """Return whether skips at the start are as few as those of dynamic scaling."""
    return num_skipped <= max(LONGEST_START, num / 2)


def are_rare(num_skipped: int, num: int) -> bool:
    """Return whether skips after growth are as few as those of dynamic scaling."""
    return num_skipped <= max(ENDLESS, MANY * num)
