"""Values of any number of steps in a bounded number of columns, and their picture."""

import math

import pytest

from halfstep._watch.screen import ASCII_BLOCKS, sparkline
from halfstep._watch.state import Trail


def trail_of(values, capacity=8):
    trail = Trail(capacity)
    for value in values:
        trail.add(value)
    return trail


def test_few_steps_have_a_column_each():
    assert trail_of([3.0, None, 1.0]).columns(10) == [3.0, None, 1.0]


@pytest.mark.parametrize("num", [8, 9, 15, 16, 17, 33, 100, 1000])
def test_columns_are_the_largest_of_as_many_steps_each(num):
    values = [float(i * 37 % 101) for i in range(num)]
    columns = trail_of(values).columns(4)
    assert len(columns) <= 4
    size = next(2**k for k in range(12) if math.ceil(num / 2**k) <= len(columns))
    assert columns == [max(values[start : start + size]) for start in range(0, num, size)]


def test_a_column_stays_as_it_is_while_others_come():
    trail = trail_of(range(9), capacity=1024)
    before = trail.columns(6)
    trail.add(9.0)
    assert trail.columns(6) == [*before[:-1], 9.0]
    trail.add(10.0)
    assert trail.columns(6)[:5] == [1.0, 3.0, 5.0, 7.0, 9.0]


def test_what_is_not_finite_stays_visible_among_many():
    columns = trail_of([1.0] * 500 + [math.nan] + [1.0] * 499).columns(4)
    assert sum(math.isnan(column) for column in columns) == 1
    assert math.isnan(trail_of([math.inf]).columns(4)[0])


def test_extremes_are_of_the_values_and_not_of_the_columns():
    trail = trail_of([5.0, 1.0, math.nan, *[3.0] * 100, None])
    assert (trail.low, trail.high) == (1.0, 5.0)
    assert trail_of([None, math.inf]).low is None


def test_sparkline():
    assert sparkline([1.0, 2.0, 4.0, 128.0]) == "▁▂▃█"
    assert sparkline([0.0, 3.5, 7.0]) == "▁▅█"
    assert sparkline([1.0, 128.0], ASCII_BLOCKS) == "_#"
    assert sparkline([5.0, None, math.nan, 5.0]) == "▅ !▅"
    assert sparkline([None, math.nan]) == " !"
    assert sparkline([]) == ""
