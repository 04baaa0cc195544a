"""How numbers are written."""

import math

import pytest

from halfstep._common.numbers import at_steps, bits, listed, number, percent, power, seconds, things


@pytest.mark.parametrize(
    ("share", "text"),
    [
        (0.0, "0 %"),
        (1.0, "100 %"),
        (1e-9, "1e-07 %"),
        (0.00004, "0.004 %"),
        (0.0123, "1.2 %"),
        (0.0999, "10 %"),
        (0.1234, "12 %"),
        (0.98, "98 %"),
        (0.995, "99.5 %"),
        (0.9997, "99.97 %"),
        (0.99999999, "99.999999 %"),
    ],
)
def test_percent(share, text):
    assert percent(share) == text


def test_percent_never_says_none_or_all_of_what_is_not():
    for exponent in range(1, 50):
        assert float(percent(2.0**-exponent).split()[0]) > 0
        assert float(percent(1 - 2.0**-exponent).split()[0]) < 100


@pytest.mark.parametrize(
    ("write", "value", "text"),
    [
        (power, 65536.0, "2^16"),
        (power, 2.0**29, "2^29"),
        (power, 1.0, "1"),
        (power, 1000.0, "1000"),
        (power, 0.25, "2^-2"),
        (power, 2.0**-8, "2^-8"),
        (power, 2.0**-20, "2^-20"),
        (power, 0.3, "0.3"),
        (power, 3e9, "3e+09"),
        (power, None, "-"),
        (number, math.nan, "NaN"),
        (number, -0.0, "0"),
        (number, -math.inf, "-inf"),
        (number, 2.54321, "2.543"),
        (bits, 3.21, "3.2 bits"),
        (bits, None, "-"),
        (seconds, 0.0123, "12.3 ms"),
        (seconds, 0.9999, "1 s"),
        (seconds, 61.23, "61.2 s"),
        (seconds, 185.0, "3 min 5 s"),
        (seconds, 7500.0, "2 h 5 min"),
        (listed, ["a", "b", "c"], "a, b and c"),
        (listed, [], ""),
        (at_steps, [3], "step 3"),
        (at_steps, [1, 2, 5, 6, 7, 9], "steps 1, 2, 5 to 7 and 9"),
        (at_steps, range(1, 21, 2), "steps 1, 3, 5, 7, 9, 11 and 4 more"),
    ],
)
def test_others(write, value, text):
    assert write(value) == text


def test_things():
    assert (things(1, "step"), things(1200, "step")) == ("1 step", "1,200 steps")
    assert [things(n, "entry", "entries") for n in (1, 2)] == ["1 entry", "2 entries"]
