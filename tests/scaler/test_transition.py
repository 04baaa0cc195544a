"""The transition in plain Python: named scenarios, and what holds whatever happens."""

import dataclasses
import math
from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device import seeded

from halfstep._gradients.scalars import LARGEST_SCALE
from halfstep._scaler.scale_state import (
    Dynamic,
    ScaleState,
    Schedule,
    Static,
    changed,
    next_state,
)


def iterate(state: ScaleState, found: Iterable[int | bool]) -> tuple[list[float], ScaleState]:
    """Return the scale in each iteration, and the state after the last."""
    scales = []
    for found_inf in found:
        scales.append(state.scale)
        state = next_state(state, found_inf=bool(found_inf))
    return scales, state


def run_until_taken(
    state: ScaleState, overflows: Callable[[float], bool], limit: int = 1000
) -> tuple[list[float], ScaleState]:
    """Train until a step is taken with no trial after it; return the scales that were tried."""
    scales = []
    for _ in range(limit):
        scales.append(state.scale)
        found_inf = overflows(state.scale)
        state = next_state(state, found_inf=found_inf)
        if not found_inf and not state.is_trial:
            return scales, state
    raise AssertionError(f"no step in {limit} iterations: {scales[-20:]}")


# --- as torch.amp ---------------------------------------------------------------------------------


# Runs of overflows, and steps after each.
overflow_runs = st.lists(st.tuples(st.integers(0, 20), st.integers(1, 9)), min_size=2, max_size=5)


@settings(max_examples=100)
@given(
    scale=st.floats(1.0, 2.0**40, width=32),
    growth=st.sampled_from([1.0, 2.0, 1.5, 1.9, 3.7]),
    backoff=st.sampled_from([1.0, 0.5, 0.75, 0.7]) | st.floats(0.5, 1.0),
    interval=st.integers(1, 5),
    runs=overflow_runs,
)
def test_overflows_in_a_row_are_as_in_torch(scale, growth, backoff, interval, runs):
    schedule = Dynamic(growth, backoff, interval, trials=False)
    state = ScaleState.first(scale, schedule, min_scale=2.0**-126)
    theirs = torch.tensor(state.scale), torch.tensor(0, dtype=torch.int32)
    for overflows, steps in runs:
        for found_inf in [True] * overflows + [False] * steps:
            state = next_state(state, found_inf=found_inf)
            found = torch.tensor(float(found_inf))
            torch._amp_update_scale_(*theirs, found, growth, backoff, interval)
            assert (state.scale, state.growth_tracker) == tuple(x.item() for x in theirs)


def test_a_count_past_a_lowered_interval_grows_at_once() -> None:
    state = ScaleState.first(4.0, Dynamic(growth_interval=100))
    _, state = iterate(state, [0] * 10)
    state = dataclasses.replace(state, schedule=Dynamic(growth_interval=3))
    state = next_state(state, found_inf=False)
    assert (state.scale, state.growth_tracker) == (8.0, 0)


# --- limits ---------------------------------------------------------------------------------------


def test_max_scale() -> None:
    state = ScaleState.first(6.0, Dynamic(growth_interval=1), max_scale=20.0)
    scales, state = iterate(state, [0] * 4)
    assert scales == [6.0, 12.0, 12.0, 12.0]
    assert state.growth_tracker == 0


def test_min_scale() -> None:
    state = ScaleState.first(1024.0, Dynamic(trials=False), min_scale=128.0)
    scales, state = iterate(state, [1] * 6)
    assert scales == [1024.0, 512.0, 256.0, 128.0, 128.0, 128.0]
    assert iterate(state, [0, 0])[0] == [128.0, 128.0]


@pytest.mark.parametrize("schedule", [Static(), Dynamic(1.0, 1.0, 1), Dynamic(backoff_factor=1.0)])
def test_a_schedule_that_does_not_back_off(schedule: Schedule) -> None:
    state = ScaleState.first(4.0, schedule)
    scales, state = iterate(state, [1] * 20 + [0, 0])
    assert set(scales) == {4.0}
    assert (state.run_scale, state.has_backed_off) == (0, False)
    assert (state.num_skipped, state.num_taken) == (20, 2)


# --- when no scale helps --------------------------------------------------------------------------


@pytest.mark.parametrize("num_bad", range(1, 60))
def test_after_any_number_of_bad_steps_the_scale_is_close(num_bad: int) -> None:
    _, state = iterate(ScaleState.first(65536.0, Dynamic()), [1] * num_bad)
    scales, state = run_until_taken(state, lambda scale: False)
    assert len(scales) <= 2
    # As far down as torch.amp, or where it began.
    assert state.scale == (65536.0 / 2**num_bad if num_bad <= 16 else 65536.0)


@pytest.mark.parametrize("trials", [False, True])
@pytest.mark.parametrize("num_bad", [0, 1, 7, 8, 9, 17, 18, 40])
def test_an_overflow_is_cured_whatever_was_before(trials: bool, num_bad: int) -> None:
    _, state = iterate(ScaleState.first(2.0**20, Dynamic(trials=trials)), [1] * num_bad)
    _, state = run_until_taken(state, lambda scale: scale > 2.0**5, limit=250)
    assert state.scale <= 2.0**5


def test_a_loss_that_needs_a_scale_below_1_is_trained_at_it() -> None:
    """Each overflow costs one skip more than in torch.amp, for the trial of the first scale."""
    state, skips = ScaleState.first(65536.0, Dynamic(growth_interval=100)), []
    for _ in range(1000):
        skips.append(state.scale > 2.0**-7)
        state = next_state(state, found_inf=skips[-1])
    assert skips[:26] == [True] * 23 + [False, True, False]
    assert (sum(skips), state.scale) == (24 + 2 * 9, 2.0**-7)
    # Once a trial does not overflow, the scale is back at once.
    assert iterate(state, [1, 0, 0])[1].scale == 65536.0


@pytest.mark.parametrize("share", [0.05, 0.2])
def test_nan_gradients_at_random_leave_the_scale_near_1(share: float) -> None:
    """In torch.amp it is 0 in the end."""
    found = (torch.rand(10_000, generator=seeded(0)) < share).tolist()
    logs = [math.log2(scale) for scale in iterate(ScaleState.first(65536.0, Dynamic()), found)[0]]
    assert min(logs) > -12
    assert sum(logs) > -len(logs)


# --- iterations that say nothing of the scale -----------------------------------------------------


def test_a_loss_that_is_not_finite_without_an_overflow_is_a_step() -> None:
    state = next_state(ScaleState.first(4.0, Dynamic()), found_inf=False, loss_is_finite=False)
    assert (state.num_taken, state.growth_tracker) == (1, 1)


# --- losses that are not finite -------------------------------------------------------------------


def run_losses(state: ScaleState, kinds: str) -> tuple[list[float], ScaleState]:
    """Return the scale in each iteration: taken (.), inf loss (L), or inf gradient only (G)."""
    scales = []
    for kind in kinds:
        scales.append(state.scale)
        state = next_state(state, found_inf=kind != ".", loss_is_finite=kind != "L")
    return scales, state


def steps_taken(state: ScaleState, is_finite: Callable[[int, float], bool], num: int = 300) -> int:
    """Train with a loss that is inf where ``is_finite(iteration, scale)`` is False."""
    for i in range(num):
        is_good = is_finite(i, state.scale)
        state = next_state(state, found_inf=not is_good, loss_is_finite=is_good)
    return state.num_taken


def torch_steps_taken(
    interval: int, is_finite: Callable[[int, float], bool], num: int = 300
) -> int:
    scale, tracker, taken = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32), 0
    for i in range(num):
        is_good = is_finite(i, scale.item())
        found_inf = torch.tensor(float(not is_good))
        torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, interval)
        taken += is_good
    return taken


@pytest.mark.parametrize("interval", [2, 10, 40, 2000])
@pytest.mark.parametrize("largest", [1.0, 3.0, 2.0**10, 2.0**15, 2.0**16])
def test_a_loss_that_depends_on_the_scale_trains_as_in_torch(interval: int, largest: float) -> None:
    def is_finite(i: int, scale: float) -> bool:
        return scale <= largest

    state = ScaleState.first(65536.0, Dynamic(growth_interval=interval))
    # One step for the trial.
    assert steps_taken(state, is_finite) >= torch_steps_taken(interval, is_finite) - 1


def test_the_earlier_scale_is_tried_again_after_the_next_loss_of_this_kind() -> None:
    """A NaN batch that happened to fall into the trial costs the scale only until the next."""
    scales, _ = run_losses(ScaleState.first(64.0, Dynamic()), ".L.L...LL...")
    assert scales == [64, 64, 32, 64, 32, 32, 32, 32, 16, 8, 64, 64]


def test_after_growth_there_is_no_trial() -> None:
    state = ScaleState.first(64.0, Dynamic(growth_interval=3))
    assert run_losses(state, "...L...L..")[0] == [64, 64, 64, 128, 64, 64, 64, 128, 64, 64]
    assert run_losses(state, "....L..")[0] == [64, 64, 64, 128, 128, 64, 128]


@pytest.mark.parametrize("kinds", ["LG.", "GL.", "G."])
def test_a_finite_loss_in_the_run_shows_that_the_scale_was_too_large(kinds: str) -> None:
    scales, state = run_losses(ScaleState.first(64.0, Dynamic()), "." + kinds + ".....")
    lowest = 64.0 / 2 ** (len(kinds) - 1)
    assert set(scales[len(kinds) :]) == {lowest}
    assert state.run_scale == 0.0


def test_an_overflow_in_the_trial_ends_it() -> None:
    scales, state = run_losses(ScaleState.first(64.0, Dynamic()), ".L.G...")
    assert (scales, state.run_scale) == ([64, 64, 32, 64, 32, 32, 32], 0.0)


@pytest.mark.parametrize("num_bad", [*range(1, 22), 100])
@pytest.mark.parametrize("init_scale", [65536.0, 2.0, 1.0])
def test_however_many_losses_were_nan_the_scale_is_back_at_once(num_bad, init_scale):
    state = ScaleState.first(init_scale, Dynamic())
    scales, _ = run_losses(state, ".." + "L" * num_bad + "...")
    assert scales[-2:] == [init_scale] * 2


@pytest.mark.parametrize("seed", range(20))
def test_without_trials_the_scale_is_that_of_pytorch(seed: int) -> None:
    """Whatever the losses were, in whatever order: down to the smallest scale."""
    generator = seeded(seed)
    kinds = torch.randint(0, 12, (600,), generator=generator).tolist()
    scale, tracker = torch.tensor(65536.0), torch.tensor(0, dtype=torch.int32)
    schedule = Dynamic(growth_interval=4, trials=False)
    state = ScaleState.first(65536.0, schedule, min_scale=2.0**-126)
    for kind in kinds:
        found_inf = kind < 2
        torch._amp_update_scale_(scale, tracker, torch.tensor(float(found_inf)), 2.0, 0.5, 4)
        state = next_state(state, found_inf=found_inf, loss_is_finite=kind != 0)
        assert (state.scale, state.growth_tracker) == (scale.item(), tracker.item())


@pytest.mark.parametrize("share", [0.01, 0.1, 0.3])
def test_nan_losses_at_random_leave_the_scale_close(share: float) -> None:
    generator = seeded(0)
    is_bad = (torch.rand(5000, generator=generator) < share).tolist()
    kinds = "".join("L" if bad else "." for bad in is_bad)
    scales, _ = run_losses(ScaleState.first(65536.0, Dynamic()), kinds)
    assert sum(map(math.log2, scales)) / len(scales) > 15.9 - 4 * share


# --- whatever happens -----------------------------------------------------------------------------

schedules = st.one_of(
    st.builds(Static),
    st.builds(
        Dynamic,
        growth_factor=st.sampled_from([1.0, 2.0, 1e30]) | st.floats(1.0, 1e6),
        backoff_factor=st.sampled_from([1.0, 0.5]) | st.floats(1e-6, 1.0),
        growth_interval=st.integers(1, 6),
        trials=st.booleans(),
    ),
)
scales = st.floats(2.0**-126, LARGEST_SCALE, width=32)


@settings(max_examples=60)
@given(
    schedules,
    scales,
    st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=30, max_size=60),
)
def test_the_scale_stays_usable(schedule, scale, events):
    state = ScaleState.first(scale, schedule)
    for found_inf, loss_is_finite, went_bad in events:
        before = state
        found = {"found_inf": found_inf, "loss_is_finite": loss_is_finite}
        state = next_state(before, **found, went_bad=went_bad)
        after = next_state(before, **found)
        counts = dict.fromkeys(("num_taken", "num_skipped", "skipped_in_a_row"), 0)
        assert changed(state, **counts) == changed(after, **counts)
        assert state.num_skipped - before.num_skipped == (found_inf or went_bad)
        assert before.min_scale <= state.scale <= before.max_scale
        assert math.isfinite(1 / state.scale)
        assert (state.schedule, state.min_scale) == (schedule, before.min_scale)
        assert state.growth_tracker < schedule.growth_interval
        assert state.num_taken + state.num_skipped == before.num_taken + before.num_skipped + 1
        if found_inf:
            assert state.growth_tracker == 0
            assert state.scale <= max(before.scale, before.run_scale)
        else:
            assert state.scale >= before.scale
        assert ScaleState.from_dict(state.to_dict(), state) == state
