"""The pure state: its numbers, its transition, its dict."""

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfstep.scaling.device import DeviceState
from halfstep.scaling.state import (
    LARGEST_COUNT,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    ScaleState,
    checked_scale,
    next_state,
)

scales = st.floats(SMALLEST_SCALE, LARGEST_SCALE, width=32)
states = st.builds(
    ScaleState,
    scale=scales,
    growth_tracker=st.integers(0, 10) | st.integers(0, LARGEST_COUNT),
    growth_factor=st.just(1.0) | st.floats(1.0, 1e6),
    backoff_factor=st.just(1.0) | st.floats(1e-6, 1.0),
    growth_interval=st.integers(1, 10) | st.integers(1, LARGEST_COUNT),
    min_scale=st.floats(SMALLEST_SCALE, 1.0, width=32) | scales,
)

GOOD = {
    "scale": 4.0,
    "growth_tracker": 0,
    "growth_factor": 2.0,
    "backoff_factor": 0.25,
    "growth_interval": 2,
    "min_scale": 1.0,
}


def test_four_four_eight_two() -> None:
    state = ScaleState(**GOOD)
    history = []
    for found_inf in (False, False, True):
        state = next_state(state, found_inf)
        history.append((state.scale, state.growth_tracker))
    assert history == [(4.0, 1), (8.0, 0), (2.0, 0)]


@given(states, st.booleans())
def test_the_scale_stays_usable(state: ScaleState, found_inf: bool) -> None:
    after = next_state(state, found_inf)
    assert SMALLEST_SCALE <= after.scale <= LARGEST_SCALE
    if found_inf:
        assert min(state.scale, state.min_scale) <= after.scale <= state.scale
        assert after.growth_tracker == 0
    else:
        assert after.scale >= state.scale
        assert after.growth_tracker in (0, state.growth_tracker + 1)
        assert after.growth_tracker < state.growth_interval
    kept = ("growth_factor", "backoff_factor", "growth_interval", "min_scale")
    assert all(getattr(after, name) == getattr(state, name) for name in kept)


@given(states, st.lists(st.sampled_from([0.0, 1.0, 3.0]), max_size=8))
def test_the_device_does_the_same_bit_for_bit(state: ScaleState, found: list[float]) -> None:
    on_device = DeviceState(state, torch.device("cpu"))
    for found_inf in found:
        state = next_state(state, found_inf != 0)
        on_device.update_(torch.tensor(found_inf), state)
        assert on_device.read(state) == state


def test_the_device_agrees_also_before_the_first_transition_up_to_a_count_past_the_interval() -> (
    None
):
    state = ScaleState(**GOOD | {"growth_tracker": 7})
    on_device = DeviceState(state, torch.device("cpu"))
    assert on_device.read(state).growth_tracker == 1
    assert next_state(on_device.read(state), False) == next_state(state, False)


def test_growth_stops_at_the_largest_float32() -> None:
    state = ScaleState(**GOOD | {"scale": 2.0**127, "growth_interval": 1})
    assert next_state(state, False).scale == 2.0**127


def test_the_floor_holds_and_a_scale_below_it_stays() -> None:
    state = ScaleState(**GOOD | {"scale": 2.0})
    assert next_state(state, True).scale == 1.0
    below = ScaleState(**GOOD | {"scale": 0.5})
    assert next_state(below, True).scale == 0.5


def test_both_factors_at_one_give_a_static_scale() -> None:
    state = ScaleState(**GOOD | {"growth_factor": 1, "backoff_factor": 1, "growth_interval": 1})
    assert next_state(state, True).scale == next_state(state, False).scale == 4.0


def test_the_scale_is_held_as_float32() -> None:
    assert ScaleState(**GOOD | {"scale": 0.1}).scale == torch.tensor(0.1).item()


def test_ints_are_numbers() -> None:
    state = ScaleState(**GOOD | {"scale": 4, "growth_factor": 2, "min_scale": 1})
    assert state == ScaleState(**GOOD)
    assert isinstance(state.scale, float)


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("scale", 0, ValueError, "scale is 0: a scale must lie between"),
        ("scale", -3.0, ValueError, "scale is -3.0: a scale must lie between"),
        ("scale", math.nan, ValueError, "scale is nan: pass a finite number"),
        ("scale", math.inf, ValueError, "scale is inf: pass a finite number"),
        ("scale", 10**400, ValueError, "scale is inf: pass a finite number"),
        ("scale", 1e39, ValueError, "scale is 1e.39: a scale must lie between"),
        ("scale", 1e-46, ValueError, "scale is 1e-46: a scale must lie between"),
        ("scale", True, TypeError, r"scale is True \(bool\): pass a number"),
        ("scale", "4", TypeError, r"scale is '4' \(str\): pass a number"),
        ("scale", None, TypeError, r"scale is None \(NoneType\): pass a number"),
        ("growth_tracker", -1, ValueError, "growth_tracker is -1: it must lie between 0"),
        ("growth_tracker", 1.0, TypeError, "growth_tracker is 1.0 .float.: pass a whole number"),
        ("growth_factor", 0.99, ValueError, "growth_factor is 0.99: it must be >= 1"),
        ("growth_factor", math.nan, ValueError, "growth_factor is nan"),
        ("growth_factor", math.inf, ValueError, "growth_factor is inf"),
        ("growth_factor", True, TypeError, "growth_factor is True"),
        ("backoff_factor", 0.0, ValueError, "backoff_factor is 0.0: it must be > 0 and <= 1"),
        ("backoff_factor", -1, ValueError, "backoff_factor is -1.0: it must be > 0 and <= 1"),
        ("backoff_factor", 1.01, ValueError, "backoff_factor is 1.01: it must be > 0 and <= 1"),
        ("growth_interval", 0, ValueError, "growth_interval is 0: it must lie between 1"),
        ("growth_interval", 2**31, ValueError, "growth_interval is 2147483648: it must lie"),
        ("growth_interval", 2.5, TypeError, "growth_interval is 2.5 .float.: pass a whole number"),
        ("growth_interval", True, TypeError, "growth_interval is True .bool.: pass a whole"),
        ("min_scale", 0.0, ValueError, "min_scale is 0.0: a scale must lie between"),
        ("min_scale", math.nan, ValueError, "min_scale is nan"),
    ],
)
def test_bad_numbers(name: str, value: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ScaleState(**GOOD | {name: value})


def test_the_reciprocal_of_every_scale_is_finite_in_float32() -> None:
    for scale in (SMALLEST_SCALE, LARGEST_SCALE):
        assert checked_scale("scale", scale) == scale
        assert 0 < torch.tensor(scale).reciprocal().item() < math.inf


@given(states)
def test_every_field_survives_a_round_trip(state: ScaleState) -> None:
    assert ScaleState.from_dict(state.to_dict()) == state


def test_every_field_is_saved() -> None:
    """Fails when a field is added and not saved: change each one and look for it in the dict."""
    changed = {
        "scale": 8.0,
        "growth_tracker": 1,
        "growth_factor": 3.0,
        "backoff_factor": 0.5,
        "growth_interval": 3,
        "min_scale": 0.5,
    }
    assert set(changed) == {field.name for field in dataclasses.fields(ScaleState)}
    for name, value in changed.items():
        state = ScaleState(**GOOD | {name: value})
        assert state.to_dict() != ScaleState(**GOOD).to_dict(), name
        assert getattr(ScaleState.from_dict(state.to_dict()), name) == value


def test_the_dict_has_the_keys_of_torch_and_one_more() -> None:
    assert ScaleState(**GOOD).to_dict() == {
        "scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "_growth_tracker": 0,
        "halfstep": {"version": 1, "min_scale": 1.0},
    }


@pytest.mark.parametrize(("scale", "min_scale"), [(65536.0, 1.0), (0.25, 0.25)])
def test_a_state_of_torch_gets_a_floor(scale: float, min_scale: float) -> None:
    saved = ScaleState(**GOOD | {"scale": scale}).to_dict()
    del saved["halfstep"]
    assert ScaleState.from_dict(saved).min_scale == min_scale


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": 0.0}, "cannot be used: scale is 0.0.*Correct it in the dict"),
        ({"scale": math.nan}, "cannot be used: scale is nan"),
        ({"scale": "big"}, "cannot be used: scale is 'big'"),
        ({"growth_interval": 0}, "cannot be used: growth_interval is 0"),
        ({"_growth_tracker": -1}, "cannot be used: growth_tracker is -1"),
        ({"backoff_factor": -1.0}, "cannot be used: backoff_factor is -1.0"),
        ({"halfstep": {"version": 2}}, "'halfstep' version 2.*update halfstep"),
        ({"halfstep": {"version": 1, "min_scale": 0}}, "cannot be used: min_scale is 0"),
        ({"halfstep": {"version": 1, "colour": 0}}, "cannot be used: .*'colour'"),
    ],
)
def test_a_bad_dict_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScaleState.from_dict(ScaleState(**GOOD).to_dict() | change)


def test_a_missing_key_is_named() -> None:
    saved = ScaleState(**GOOD).to_dict()
    del saved["_growth_tracker"]
    with pytest.raises(ValueError, match=r"has no '_growth_tracker' .its keys are .*state_dict"):
        ScaleState.from_dict(saved)
