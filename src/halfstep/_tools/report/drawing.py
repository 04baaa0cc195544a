"""Drawing for the page: axes, compact SVG paths, colours and small PNG images."""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

UNITS = 1000
"""Side length of a plot in its own units; the page scales it."""

Tick: TypeAlias = tuple[float, str]
"""Position in percent of the side, and label."""
Colour: TypeAlias = tuple[int, int, int]


class Axis(NamedTuple):
    """A map from values to positions along a side of a plot.

    Attributes:
        low: Value at the left or lower end.
        high: Value at the other end.
        points_up: Whether it is a vertical axis: SVG counts from the top.
    """

    low: float
    high: float
    points_up: bool = False

    def share(self, value: float) -> float:
        """Return the position of a value along the side, 0 to 1; values outside are clamped."""
        if self.high == self.low:
            return 0.5
        share = min(1.0, max(0.0, (value - self.low) / (self.high - self.low)))
        return 1 - share if self.points_up else share

    def units(self, value: float) -> int:
        """Return the position of a value in units."""
        return round(UNITS * self.share(value))

    def percent(self, value: float) -> float:
        """Return the position of a value in percent."""
        return round(100 * self.share(value), 2)

    def ticks(
        self, values: Iterable[float], label: Callable[[float], str] = "{:,g}".format
    ) -> list[Tick]:
        """Return ticks for the values that are on the axis."""
        inside = (value for value in values if self.low <= value <= self.high)
        return [(self.percent(value), label(value)) for value in inside]


def round_numbers(low: float, high: float, about: int, smallest: float = 0.0) -> list[float]:
    """Return about ``about`` round numbers in a range, 1, 2 or 5 times a power of ten apart."""
    if high <= low:
        return [low]
    roughly = max((high - low) / about, smallest)
    power = 10.0 ** math.floor(math.log10(roughly))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= roughly * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [i * step for i in range(first, last + 1)]


def stairs(points: Iterable[tuple[int, int] | None]) -> Iterator[tuple[int, int] | None]:
    """Yield the points of a step curve, which keeps its height up to the next point."""
    for before, point in pairwise([None, *points]):
        if before is not None and point is not None:
            yield point[0], before[1]
        yield point


def line(points: Iterable[tuple[int, int] | None]) -> str:
    """Return the path through points in units; None interrupts it.

    Coordinates are relative, to save bytes. A single point becomes a line of length zero, which
    round caps draw as a dot.
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
    """Return a path of zero-length lines: round caps draw them as dots as wide as the stroke."""
    return "".join(f"M{x:g} {y:g}h0" for x, y in points)


def bars(heights: Sequence[int], height: int, start: int = 0) -> str:
    """Return the outline of adjacent bars, each one unit wide, at the lower edge of a drawing."""
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


# --- colours and images ---------------------------------------------------------------------------


NO_VALUE = 0
"""Index of a pixel without a value; it is transparent."""
NOT_FINITE = 1
"""Index of a pixel with NaN or inf."""
FIRST_LEVEL = 2
"""Index of the lowest level of the ramp."""

_NOT_FINITE_COLOUR: Colour = (255, 38, 98)


def ramp(share: float) -> Colour:
    """Return the colour of a share, from dark blue at 0 through green to bright yellow at 1.

    The ramp runs through OKLab (Björn Ottosson, "A perceptual color space for image processing",
    2020): lightness grows evenly, and red-green colour-blind readers can tell blue from yellow.
    """
    lightness = 0.34 + 0.56 * share
    green_red = -0.075 * math.sin(math.pi * share) ** 2
    blue_yellow = -0.115 + 0.26 * share
    long = (lightness + 0.3963377774 * green_red + 0.2158037573 * blue_yellow) ** 3
    medium = (lightness - 0.1055613458 * green_red - 0.0638541728 * blue_yellow) ** 3
    short = (lightness - 0.0894841775 * green_red - 1.2914855480 * blue_yellow) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    clamped = (min(1.0, max(0.0, channel)) for channel in linear)
    srgb = (12.92 * c if c <= 0.0031308 else 1.055 * c ** (1 / 2.4) - 0.055 for c in clamped)
    red, green, blue = (round(255 * channel) for channel in srgb)
    return red, green, blue


def palette(num_levels: int) -> list[Colour]:
    """Return the colours by index: no value, NaN or inf, and the levels of the ramp."""
    last = max(1, num_levels - 1)
    levels = [ramp(level / last) for level in range(num_levels)]
    return [(0, 0, 0), _NOT_FINITE_COLOUR, *levels]


def css(colour: Colour) -> str:
    """Return a colour in CSS notation."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def png(rows: Sequence[bytes], colours: Sequence[Colour]) -> bytes:
    """Return a PNG file with one byte per pixel, an index into at most 256 colours.

    All rows have the same length, and the first colour is transparent.
    """
    width = len(rows[0])
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    lines = b"".join(b"\0" + row for row in rows)  # each line starts with its filter type: none
    return b"".join(
        (
            b"\x89PNG\r\n\x1a\n",
            _chunk(b"IHDR", header),
            _chunk(b"PLTE", b"".join(map(bytes, colours))),
            _chunk(b"tRNS", b"\0"),
            _chunk(b"IDAT", zlib.compress(lines, 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(name: bytes, data: bytes) -> bytes:
    check = zlib.crc32(name + data)
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", check)


def data_uri(image: bytes) -> str:
    """Return a PNG file as a data URI."""
    return "data:image/png;base64," + base64.b64encode(image).decode()
