"""Axes, ticks and paths of the drawings."""

import re

import pytest

from halfstep._report.drawing import Axis, bars, dots, line, round_numbers


def test_an_axis_that_points_up_counts_from_the_top():
    axis = Axis(0.0, 10.0, points_up=True)
    assert (axis.percent(10.0), axis.percent(2.5), axis.units(0.0)) == (0.0, 75.0, 1000)


def test_what_lies_outside_is_drawn_at_the_end():
    axis = Axis(1.0, 2.0)
    assert (axis.units(-7.0), axis.units(9.0)) == (0, 1000)


def test_an_axis_of_one_value_has_it_in_the_middle():
    assert Axis(3.0, 3.0).percent(3.0) == 50.0


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


def test_dots_are_lines_without_length():
    assert dots([(0.5, 2.5), (1.5, 3.0)]) == "M0.5 2.5h0M1.5 3h0"
