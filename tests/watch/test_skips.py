"""Which overflows are part of the search for a scale, iteration by iteration."""

from __future__ import annotations

import random

import pytest

from halfstep._tools.watch.skips import MOST_FALLS, SETTLED, ScaleSearch


def kinds(*iterations: tuple[float | None, bool], reason: str = "overflow") -> list[str | None]:
    """Return the kinds of the skipped ones of iterations, each a scale and whether it was taken."""
    search = ScaleSearch()
    found = []
    for scale, is_taken in iterations:
        after = (scale or 0.0) / 2
        kind = search.kind_of(scale, after, is_taken=is_taken, is_overflow=reason == "overflow")
        assert not (is_taken and kind)
        found += [] if is_taken else [kind]
    return found


def taken(scale: float, num: int = SETTLED) -> list[tuple[float, bool]]:
    return [(scale, True)] * num


def test_the_start_ends_when_a_scale_is_usable() -> None:
    assert kinds((64, False), (32, False), *taken(16, 3), (16, False)) == ["start"] * 3
    assert kinds((64, False), *taken(32), (32, False)) == ["start", "fall"]


def test_a_trial_that_overflows_belongs_to_the_skips_before_it() -> None:
    down_and_trial = [(64, False), (32, False), (16, True), (64, False)]
    assert kinds(*down_and_trial, (16, False), *taken(8)) == ["start"] * 4
    assert kinds(*taken(64), *down_and_trial, *taken(16)) == ["fall"] * 3


@pytest.mark.parametrize("late", [1, 5, 1000])
def test_an_overflow_after_growth_counts_however_late_it_is(late: int) -> None:
    assert kinds(*taken(16), *taken(32, late), (32, False), *taken(16), (16, False)) == [
        "growth",
        "fall",
    ]


def test_an_overflow_after_growth_is_none_at_the_start() -> None:
    """With a growth interval of five iterations, fewer than a start ends with."""
    assert kinds((64, False), *taken(32, 5), (64, False), *taken(32, 5), (64, False)) == [
        "start",
        "growth",
        "growth",
    ]


def test_several_growths_are_taken_back_one_by_one() -> None:
    up = [*taken(16), *taken(32), *taken(64)]
    assert kinds(*up, (64, False), (32, False), (16, False)) == ["growth", "growth", "fall"]


def test_falls_are_few_until_a_scale_is_usable_again() -> None:
    steps = [(2.0**-k, False) for k in range(MOST_FALLS + 1)]
    assert kinds(*taken(2.0), *steps) == ["fall"] * MOST_FALLS + [None]
    between = [each for step in steps for each in (step, *taken(step[0] / 2))]
    assert kinds(*taken(2.0), *between) == ["fall"] * (MOST_FALLS + 1)
    too_short = [each for step in steps for each in (step, *taken(step[0] / 2, SETTLED - 1))]
    assert kinds(*taken(2.0), *too_short)[-1] is None


def test_what_is_no_overflow_or_has_no_scale_is_no_search() -> None:
    assert kinds((64, False), reason="loss") == [None]
    assert kinds((None, False)) == [None]
    assert kinds((None, True), (64, False)) == ["start"]


def test_a_scale_that_stays_does_not_fall() -> None:
    search = ScaleSearch()
    for _ in range(SETTLED):
        search.kind_of(8.0, 8.0, is_taken=True, is_overflow=False)
    assert search.kind_of(8.0, 8.0, is_taken=False, is_overflow=True) is None


@pytest.mark.parametrize("interval", [20, 100, 2000])
def test_a_healthy_run_of_dynamic_scaling_has_nothing_else(interval: int) -> None:
    """Gradients that vary hundredfold from step to step, with outliers, at torch.amp's schedule."""
    rng = random.Random(interval)
    search, scale, tracker = ScaleSearch(), 2.0**16, 0
    for _ in range(20_000):
        largest = 2.0 ** rng.gauss(4.0, 1.5) * (10.0 if rng.random() < 0.01 else 1.0)
        is_taken = largest * scale < 65504
        tracker = tracker + 1 if is_taken else 0
        after = scale * 2 if tracker == interval else scale if is_taken else scale / 2
        tracker %= interval
        kind = search.kind_of(scale, after, is_taken=is_taken, is_overflow=True)
        assert is_taken or kind
        scale = after
