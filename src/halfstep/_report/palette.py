"""A ramp of colours that everybody can read, and small images made of it.

The ramp runs through OKLab (Björn Ottosson, "A perceptual color space for image processing", 2020):
its lightness grows evenly, and from blue to yellow, which those see who do not tell red from green.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from collections.abc import Sequence

Colour = tuple[int, int, int]

NO_VALUE = 0
"""Index of a pixel without a value; it is transparent."""
NOT_FINITE = 1
"""Index of a pixel where NaN or inf was seen."""
FIRST_LEVEL = 2
"""Index of the lowest level of the ramp."""

_NOT_FINITE_COLOUR: Colour = (255, 38, 98)


def ramp(share: float) -> Colour:
    """Return the colour of a share, from dark blue at 0 over green to bright yellow at 1."""
    lightness = 0.34 + 0.56 * share
    green_red = -0.075 * math.sin(math.pi * share) ** 2
    blue_yellow = -0.115 + 0.26 * share
    return _srgb(lightness, green_red, blue_yellow)


def _srgb(lightness: float, green_red: float, blue_yellow: float) -> Colour:
    """Return 8-bit sRGB of a colour in OKLab; what does not fit is cut."""
    long = (lightness + 0.3963377774 * green_red + 0.2158037573 * blue_yellow) ** 3
    medium = (lightness - 0.1055613458 * green_red - 0.0638541728 * blue_yellow) ** 3
    short = (lightness - 0.0894841775 * green_red - 1.2914855480 * blue_yellow) ** 3
    linear = (
        4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
        -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
        -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
    )
    red, green, blue = map(_gamma, linear)
    return red, green, blue


def _gamma(linear: float) -> int:
    linear = min(1.0, max(0.0, linear))
    encoded = 12.92 * linear if linear <= 0.0031308 else 1.055 * linear ** (1 / 2.4) - 0.055
    return round(255 * encoded)


def palette(num_levels: int) -> list[Colour]:
    """Return the colours by index: no value, NaN or inf, and the levels of the ramp."""
    last = max(1, num_levels - 1)
    levels = [ramp(level / last) for level in range(num_levels)]
    return [(0, 0, 0), _NOT_FINITE_COLOUR, *levels]


def css(colour: Colour) -> str:
    """Return a colour as CSS has it."""
    return "#{:02x}{:02x}{:02x}".format(*colour)


def png(rows: Sequence[bytes], colours: Sequence[Colour]) -> bytes:
    """Return a PNG file with one byte a pixel, an index into at most 256 colours.

    Args:
        rows: Indices, all rows equally long.
        colours: The palette; its first colour is transparent.
    """
    width = len(rows[0])
    assert all(len(row) == width for row in rows)
    header = struct.pack(">IIBBBBB", width, len(rows), 8, 3, 0, 0, 0)
    lines = b"".join(b"\0" + row for row in rows)  # each begins with its filter: none
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
    """Return a PNG file as an address that holds it."""
    return "data:image/png;base64," + base64.b64encode(image).decode()
