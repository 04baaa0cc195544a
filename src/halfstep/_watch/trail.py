"""A value of every step in a bounded number of columns, and columns as a line of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.,-~=+#"
MARK = "!"
"""Stands where a value was NaN or inf."""

Column = float | None
"""The largest value of some steps; NaN if one was not finite, None if there was none."""


class Trail:
    """The values of all steps so far, each column the largest of as many steps as needed.

    When the columns are used up, each two become one: adding a value costs the same however many
    there are.

    Args:
        capacity: How many columns are kept at most, an even number.

    Attributes:
        low: The smallest finite value; None if there is none.
        high: The largest.
    """

    low: float | None = None
    high: float | None = None

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._columns: list[Column] = []
        self._steps_per_column = 1
        self._steps_in_last = 0

    def add(self, value: float | None) -> None:
        """Add the value of the next step; None if it has none."""
        column = value
        if value is not None and math.isfinite(value):
            self.low = value if self.low is None else min(self.low, value)
            self.high = value if self.high is None else max(self.high, value)
        elif value is not None:
            column = math.nan
        if self._columns and self._steps_in_last < self._steps_per_column:
            self._columns[-1] = _larger(self._columns[-1], column)
            self._steps_in_last += 1
            return
        if len(self._columns) == self._capacity:
            self._columns = _in_groups(self._columns, 2)
            self._steps_per_column *= 2
        self._columns.append(column)
        self._steps_in_last = 1

    def columns(self, width: int) -> list[Column]:
        """Return all steps in at most so many columns."""
        # Groups of a whole number: columns stay as they are while others are added.
        return _in_groups(self._columns, max(1, math.ceil(len(self._columns) / max(1, width))))


def _in_groups(columns: list[Column], size: int) -> list[Column]:
    groups = zip_longest(*(columns[first::size] for first in range(size)))
    return [_largest(group) for group in groups]


def _largest(columns: Sequence[Column]) -> Column:
    largest = columns[0]
    for column in columns[1:]:
        largest = _larger(largest, column)
    return largest


def _larger(first: Column, second: Column) -> Column:
    if first is None or second is None:
        return second if first is None else first
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)


def sparkline(columns: Sequence[Column], blocks: str = BLOCKS) -> str:
    """Draw columns as one line: blocks, :data:`MARK` for NaN, a space where there is no value.

    The heights are logarithmic if all values are above zero.
    """
    values = [column for column in columns if column is not None and not math.isnan(column)]
    if not values:
        return "".join(" " if column is None else MARK for column in columns)
    height = math.log if min(values) > 0 else float
    low, high = height(min(values)), height(max(values))

    def block(column: Column) -> str:
        if column is None:
            return " "
        if math.isnan(column):
            return MARK
        if low == high:
            return blocks[len(blocks) // 2]
        return blocks[round((height(column) - low) / (high - low) * (len(blocks) - 1))]

    return "".join(block(column) for column in columns)
