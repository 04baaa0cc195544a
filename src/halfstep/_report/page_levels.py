"""What the colours of heat maps stand for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from halfstep._common.numbers import percent
from halfstep._report.palette import FIRST_LEVEL, Colour, css, palette
from halfstep._report.svg import Tick


@dataclass(frozen=True)
class Levels:
    """What the colours of a map stand for.

    Attributes:
        title: What is shown.
        colours: The palette.
        labels: What the tooltip says for each level of the ramp.
        ticks: Of the colour bar.
        level: From a value to its level.
    """

    title: str
    colours: list[Colour]
    labels: list[str]
    ticks: list[Tick]
    level: Callable[[float], int]

    @property
    def bar(self) -> str:
        """The colour bar, as steps of a CSS gradient."""
        levels = self.colours[FIRST_LEVEL:]
        stops = (
            f"{css(c)} {100 * i / len(levels):.4g}% {100 * (i + 1) / len(levels):.4g}%"
            for i, c in enumerate(levels)
        )
        return f"linear-gradient(90deg,{','.join(stops)})"


_MOST_BITS = 20


def _headroom_levels() -> Levels:
    """Half bits from 0 to 20; bright where there is little room."""
    num = 2 * _MOST_BITS + 1
    colours = palette(num)
    ends = {0: "0 bits or less", num - 1: f"{_MOST_BITS} bits or more"}
    return Levels(
        "Headroom",
        colours[:FIRST_LEVEL] + colours[:1:-1],
        [ends.get(level, f"about {level / 2:g} bits") for level in range(num)],
        [(100 * (2 * bits + 0.5) / num, f"{bits}") for bits in (0, 5, 10, 15, 20)],
        lambda headroom: min(num - 1, max(0, round(2 * headroom))),
    )


_LOWEST_DECADE, _LEVELS_PER_DECADE = -5, 6


def _lost_levels() -> Levels:
    """None at all, then six levels a decade from 0.001 % to all; bright where much is lost."""
    num = 2 - _LOWEST_DECADE * _LEVELS_PER_DECADE

    def level(share: float) -> int:
        if share == 0:
            return 0
        return max(1, num - 1 + round(math.log10(share) * _LEVELS_PER_DECADE))

    def share_of(level: int) -> float:
        return math.pow(10.0, (level - num + 1) / _LEVELS_PER_DECADE)

    shares = [10.0**decade for decade in range(_LOWEST_DECADE + 1, 1)]
    return Levels(
        "Lost to underflow",
        palette(num),
        ["none", *(f"about {percent(share_of(each))}" for each in range(1, num))],
        [
            (50 / num, "0"),
            *((100 * (level(share) + 0.5) / num, f"{100 * share:g}") for share in shares),
        ],
        level,
    )


HEADROOM, LOST = _headroom_levels(), _lost_levels()
