"""What the drawings of the page share: axes, ticks, and paths with few bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

UNITS = 1000
"""Length of the sides of a plot in its own units; it is stretched to the size that it gets."""

Tick = tuple[float, str]
"""Position in percent of the side, and label."""


@dataclass(frozen=True)
class Axis:
    """Maps values to places along a side of a plot.

    Attributes:
        low: Value at the left or lower end.
        high: Value at the other end.
        points_up: Whether it is a vertical one: pictures count from the top.
    """

    low: float
    high: float
    points_up: bool = False

    def share(self, value: float) -> float:
        """Return how far a value is along the side, 0 to 1; values outside are at the ends."""
        if self.high == self.low:
            return 0.5
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return 1 - share if self.points_up else share

    def units(self, value: float) -> int:
        """Return the place of a value in units."""
        return round(UNITS * self.share(value))

    def percent(self, value: float) -> float:
        """Return the place of a value in percent."""
        return round(100 * self.share(value), 2)

    def ticks(self, values: Iterable[float], label: str = "{:,g}") -> list[Tick]:
        """Return the values that are on the axis, with labels."""
        inside = (value for value in values if self.low <= value <= self.high)
        return [(self.percent(value), label.format(value)) for value in inside]


def round_numbers(low: float, high: float, about: int, smallest: float = 0.0) -> list[float]:
    """Return about so many round numbers (1, 2 or 5 times a power of ten apart) in a range."""
    if high <= low:
        return [low]
    roughly = max((high - low) / about, smallest)
    power = 10.0 ** math.floor(math.log10(roughly))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= roughly * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def line(points: Sequence[tuple[int, int] | None]) -> str:
    """Return the path through points in units, interrupted where there is None.

    Steps are relative, which takes fewer bytes. A point alone is drawn too, as a line without
    length (round caps make it a dot).
    """
    pieces: list[str] = []
    before: tuple[int, int] | None = None
    for point in points:
        if point is None:
            before = None
        elif before is None:
            pieces.append(f"M{point[0]} {point[1]}l0 0")
            before = point
        elif point != before:
            pieces.append(f" {point[0] - before[0]} {point[1] - before[1]}")
            before = point
    return "".join(pieces).replace(" -", "-")


def dots(points: Iterable[tuple[float, float]]) -> str:
    """Return a path of lines without length: with round caps, dots of the width of the stroke."""
    return "".join(f"M{x:g} {y:g}h0" for x, y in points)


def bars(heights: Sequence[int], height: int, start: int = 0) -> str:
    """Return the outline of bars that stand side by side, each one unit wide.

    Args:
        heights: Of each bar, in units.
        height: Of the drawing, at whose lower edge they stand.
        start: Where the first one begins.
    """
    pieces = [f"M{start} {height}"]
    at, run = 0, 0
    for wanted in heights:
        if wanted == at:
            run += 1
            continue
        pieces.append(f"h{run}" if run else "")
        pieces.append(f"v{at - wanted}")
        at, run = wanted, 1
    pieces.append(f"h{run}V{height}z")
    return "".join(pieces)
