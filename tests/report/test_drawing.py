"""Axes, ticks, paths, the colour ramp, and the PNG files."""

import re
import struct
import zlib
from itertools import pairwise

import pytest

from halfstep._tools.report.page_curves import Axis, line, round_numbers
from halfstep._tools.report.page_layers import (
    FIRST_LEVEL,
    NO_VALUE,
    NOT_FINITE,
    bars,
    palette,
    png,
    ramp,
)


def test_an_axis_that_points_up_counts_from_the_top():
    axis = Axis(0.0, 10.0, points_up=True)
    assert (axis.percent(10.0), axis.percent(2.5), axis.units(0.0)) == (0.0, 75.0, 1000)


def test_what_lies_outside_is_drawn_at_the_end():
    axis = Axis(1.0, 2.0)
    assert (axis.units(-7.0), axis.units(9.0)) == (0, 1000)


@pytest.mark.parametrize(
    ("low", "high", "numbers"),
    [(1, 500, [100, 200, 300, 400, 500]), (0.0, 1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (2, 2, [2])],
)
def test_ticks_are_round(low, high, numbers):
    assert round_numbers(low, high, 5) == pytest.approx(numbers)


def test_ticks_of_steps_are_whole():
    assert round_numbers(1, 3, 5, smallest=1) == [1, 2, 3]


def followed(path):
    """The places that a path of ``line`` goes through."""
    found = []
    for x, y, rest in re.findall(r"M(-?\d+) (-?\d+)l([^M]*)", path):
        place = (int(x), int(y))
        moves = [int(number) for number in re.findall(r"-?\d+", rest)]
        for across, down in zip(moves[::2], moves[1::2], strict=True):
            place = (place[0] + across, place[1] + down)
            found.append(place)
        found.append(None)
    return found[:-1]


def test_a_line_goes_through_its_points_and_stops_at_gaps():
    points = [(0, 5), (3, 1), (10, 7), None, (20, 0), None, None, (30, 4), (31, 2)]
    expected = [(0, 5), (3, 1), (10, 7), None, (20, 0), None, (30, 4), (31, 2)]
    assert followed(line(points)) == expected


def test_a_line_of_nothing_is_empty():
    assert line([None, None]) == ""


def test_bars_have_their_heights():
    assert bars([2, 2, 0, 5], 10, start=3) == "M3 10v-2h2v2h1v-5h1V10z"


# --- colours and images ---------------------------------------------------------------------------


def lightness(colour):
    """Of a colour in sRGB, as CIE L* has it."""
    linear = [(c / 255 + 0.055) ** 2.4 / 1.055**2.4 if c > 10 else c / 255 / 12.92 for c in colour]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return 116 * luminance ** (1 / 3) - 16


def as_seen_without_green(colour):
    """What is left of a colour for those who do not tell red from green: Viénot et al., 1999."""
    red, green, blue = (c / 255 for c in colour)
    yellow = 0.29275 * red + 0.70725 * green
    return yellow, 0.02234 * (green - red) + blue


def test_the_ramp_gets_lighter_evenly():
    steps = [lightness(ramp(share / 20)) for share in range(21)]
    differences = [after - before for before, after in pairwise(steps)]
    assert min(differences) > 0.6 * max(differences) > 0


def test_the_ramp_goes_from_blue_to_yellow_for_those_who_do_not_tell_red_from_green():
    seen = [as_seen_without_green(ramp(share / 10)) for share in range(11)]
    warmth = [yellow - blue for yellow, blue in seen]
    assert warmth == sorted(warmth)
    assert warmth[0] < -0.2
    assert warmth[-1] > 0.4


def test_no_two_colours_of_a_palette_are_alike():
    colours = palette(60)
    assert len(set(colours)) == len(colours) == 62


def decoded(image):
    """Size, palette, transparency and rows of a PNG file of ours, all checksums looked at."""
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    chunks, at = {}, 8
    while at < len(image):
        length, name = struct.unpack(">I4s", image[at : at + 8])
        data = image[at + 8 : at + 8 + length]
        (check,) = struct.unpack(">I", image[at + 8 + length : at + 12 + length])
        assert check == zlib.crc32(name + data)
        chunks[name] = data
        at += 12 + length
    assert next(iter(chunks)) == b"IHDR"
    assert list(chunks)[-1] == b"IEND"
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 3, 0, 0, 0]
    lines = zlib.decompress(chunks[b"IDAT"])
    rows = [lines[i : i + width + 1] for i in range(0, len(lines), width + 1)]
    assert len(rows) == height
    assert all(row[0] == 0 for row in rows)
    return chunks[b"PLTE"], chunks[b"tRNS"], [row[1:] for row in rows]


def test_a_picture_can_be_read_again():
    colours = palette(3)
    rows = [bytes([NO_VALUE, NOT_FINITE, FIRST_LEVEL]), bytes([2, 3, 4])]
    plte, transparency, read = decoded(png(rows, colours))
    assert read == rows
    assert plte == b"".join(map(bytes, colours))
    assert transparency == b"\0"  # only "no value" can be seen through
