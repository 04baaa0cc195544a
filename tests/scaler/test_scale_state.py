"""The state as a value: its numbers, its dict, and why a step is skipped."""

import dataclasses
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.device import DEVICE
from tests.scaler.saved import closed, opened

from halfstep._gradients.scalars import (
    LARGEST_COUNT,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    checked_scale,
    float32_bits,
    float32_from_bits,
)
from halfstep._scaler.scale_state import LOWEST, Dynamic, Reason, ScaleState, Static, reason

scales = st.floats(SMALLEST_SCALE, LARGEST_SCALE, width=32)
counts = st.integers(0, 10) | st.integers(0, LARGEST_COUNT)
dynamic = {
    "growth_factor": st.just(1.0) | st.floats(1.0, 1e6),
    "backoff_factor": st.just(1.0) | st.floats(1e-6, 1.0),
    "growth_interval": st.integers(1, 10) | st.integers(1, LARGEST_COUNT),
    "trials": st.booleans(),
}
schedules = st.one_of(st.builds(Static), st.builds(Dynamic, **dynamic))


@st.composite
def states(draw: st.DrawFn) -> ScaleState:
    """Any state that may be: in the order min_scale <= scale <= run_scale <= max_scale."""
    low, scale, resume, run, high = sorted(draw(st.lists(scales, min_size=5, max_size=5)))
    is_trial = draw(st.booleans())
    return ScaleState(
        scale=run if is_trial else scale,
        growth_tracker=draw(counts),
        min_scale=low,
        max_scale=high,
        schedule=draw(schedules),
        run_scale=run if is_trial else draw(st.sampled_from([0.0, run])),
        has_backed_off=draw(st.booleans()),
        resume_scale=resume if is_trial else 0.0,
        reached_floor=draw(st.booleans()),
        may_restore=draw(st.booleans()),
        skipped_in_a_row=draw(counts),
        num_taken=draw(counts),
        num_skipped=draw(counts),
    )


FIRST = ScaleState.first(4.0, Dynamic(2.0, 0.25, growth_interval=2))


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "error", "words"),
    [
        ("scale", 0, ValueError, "^scale is 0: a scale must lie between"),
        ("scale", -3.0, ValueError, "^scale is -3.0: a scale must lie between"),
        ("scale", math.nan, ValueError, "^scale is nan: pass a finite number"),
        ("scale", math.inf, ValueError, "^scale is inf: pass a finite number"),
        ("scale", 10**400, ValueError, "^scale is inf: pass a finite number"),
        ("scale", 1e39, ValueError, "^scale is 1e.39: a scale must lie between"),
        ("scale", 1e-46, ValueError, "^scale is 1e-46: a scale must lie between"),
        ("scale", True, TypeError, r"^scale is True \(bool\): pass a number"),
        ("scale", "4", TypeError, r"^scale is '4' \(str\): pass a number"),
        ("scale", None, TypeError, r"^scale is None \(NoneType\): pass a number"),
        ("scale", 1e-9, ValueError, "^min_scale is 5.96.*e-08, above scale, which is 9.9"),
        ("max_scale", 3.0, ValueError, "^scale is 4.0, above max_scale, which is 3.0$"),
        ("min_scale", 5.0, ValueError, "^min_scale is 5.0, above scale, which is 4.0"),
        ("max_scale", math.inf, ValueError, "^max_scale is inf"),
        ("min_scale", 0.0, ValueError, "^min_scale is 0.0: a scale must lie between"),
        ("min_scale", math.nan, ValueError, "^min_scale is nan"),
        ("growth_tracker", -1, ValueError, "^growth_tracker is -1: it must lie between 0"),
        ("growth_tracker", 1.0, TypeError, "^growth_tracker is 1.0 .float.: pass a whole number"),
        (
            "schedule",
            "dynamic",
            TypeError,
            r"^schedule is 'dynamic' .str.: pass Static\(\) or Dynamic\(\)",
        ),
        ("run_scale", 2.0, ValueError, "^scale is 4.0, above run_scale, which is 2.0"),
        ("run_scale", math.nan, ValueError, "^run_scale is nan"),
        ("has_backed_off", 2, TypeError, r"^has_backed_off is 2 \(int\): pass a bool"),
        ("resume_scale", 2.0, ValueError, "^resume_scale is 2.0, above run_scale, which is 0.0"),
        ("reached_floor", 1, TypeError, r"^reached_floor is 1 \(int\): pass a bool"),
        ("may_restore", 0, TypeError, r"^may_restore is 0 \(int\): pass a bool"),
        ("skipped_in_a_row", -1, ValueError, "^skipped_in_a_row is -1"),
        ("num_taken", True, TypeError, "^num_taken is True .bool.: pass a whole number"),
        ("num_skipped", None, TypeError, "^num_skipped is None"),
    ],
)
def test_bad_numbers(name: str, value: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        dataclasses.replace(FIRST, **{name: value})


def test_a_trial_is_where_the_run_began() -> None:
    trial = dataclasses.replace(FIRST, run_scale=8.0, resume_scale=2.0, scale=8.0)
    assert trial.is_trial
    with pytest.raises(ValueError, match=r"^run_scale is 8.0, above scale, which is 4.0"):
        dataclasses.replace(trial, scale=4.0)
    with pytest.raises(ValueError, match=r"^resume_scale is 16.0, above run_scale, which is 8.0"):
        dataclasses.replace(trial, resume_scale=16.0)


def test_the_scale_is_held_as_float32() -> None:
    assert ScaleState.first(0.1, Dynamic()).scale == torch.tensor(0.1).item()


def test_ints_are_numbers() -> None:
    state = ScaleState.first(4, Dynamic(2, 0.25, 2))
    assert state == FIRST
    assert isinstance(state.scale, float)
    assert isinstance(state.schedule.growth_factor, float)


def test_the_reciprocal_of_every_scale_is_finite_in_float32() -> None:
    for scale in (SMALLEST_SCALE, LARGEST_SCALE):
        assert checked_scale("scale", scale) == scale
        assert 0 < torch.tensor(scale).reciprocal().item() < math.inf


@given(st.integers(-(2**31), 2**31 - 1))
def test_bits_are_those_of_a_float32_tensor(bits: int) -> None:
    value = torch.tensor(bits, dtype=torch.int32).view(torch.float32).item()
    assert float32_from_bits(bits) == value or math.isnan(value)
    if not math.isnan(value):
        assert float32_bits(value) == bits


# --- the first one, and limits --------------------------------------------------------------------


@pytest.mark.parametrize(("scale", "floor"), [(65536.0, LOWEST), (2.0**-30, 2.0**-30)])
def test_the_floor_is_no_higher_than_the_first_scale(scale: float, floor: float) -> None:
    state = ScaleState.first(scale, Dynamic())
    assert (state.min_scale, state.max_scale) == (floor, LARGEST_SCALE)
    assert state.can_amplify == (scale < 1)


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"min_scale": 8.0}, "^min_scale is 8.0, above init_scale, which is 4.0"),
        ({"max_scale": 2.0}, "^init_scale is 4.0, above max_scale, which is 2.0"),
        ({"min_scale": 3.0, "max_scale": 2.0}, "^min_scale is 3.0, above max_scale, which is 2.0"),
        ({"min_scale": 0.0}, "^min_scale is 0.0: a scale must lie"),
        ({"max_scale": math.inf}, "^max_scale is inf"),
    ],
)
def test_a_first_scale_outside_its_limits(limits: dict[str, float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScaleState.first(4.0, Dynamic(), **limits)


def test_the_first_scale_is_named() -> None:
    with pytest.raises(ValueError, match=r"^init_scale is 0.0: a scale must lie between"):
        ScaleState.first(0.0, Dynamic())


@given(states(), scales)
def test_a_scale_set_by_hand_ends_a_run_and_widens_the_limits(state, scale):
    after = state.with_scale(scale)
    assert after.scale == scale
    assert after.min_scale == min(state.min_scale, scale)
    assert after.max_scale == max(state.max_scale, scale)
    assert (after.run_scale, after.resume_scale) == (0, 0)
    assert (after.has_backed_off, after.reached_floor) == (False, False)
    kept = ("growth_tracker", "schedule", "skipped_in_a_row", "num_taken")
    assert all(getattr(after, name) == getattr(state, name) for name in kept)


def test_torch_amp_gets_factors_and_an_interval_from_every_schedule() -> None:
    saved = ScaleState.first(4.0, Static()).to_dict()
    assert [saved[key] for key in ("growth_factor", "backoff_factor", "growth_interval")] == [
        *(1.0, 1.0, 2000)
    ]


# --- the dict -------------------------------------------------------------------------------------


@given(states())
def test_every_field_survives_a_round_trip(state: ScaleState) -> None:
    assert ScaleState.from_dict(json.loads(json.dumps(state.to_dict())), FIRST) == state


def test_every_field_is_saved() -> None:
    """Fails when a field is added and not saved: change each one and look for it in the dict."""
    changed: dict[str, Any] = {
        "scale": 8.0,
        "growth_tracker": 1,
        "min_scale": 0.5,
        "max_scale": 8.0,
        "schedule": Static(),
        "run_scale": 8.0,
        "has_backed_off": True,
        "resume_scale": 1.0,
        "reached_floor": True,
        "may_restore": False,
        "skipped_in_a_row": 1,
        "num_taken": 1,
        "num_skipped": 1,
    }
    assert set(changed) == {field.name for field in dataclasses.fields(ScaleState)}
    for name, value in changed.items():
        start = FIRST.with_scale(1.0) if name == "resume_scale" else FIRST
        start = dataclasses.replace(start, run_scale=start.scale)
        run = {"run_scale": 8.0} | ({"scale": 8.0} if name == "resume_scale" else {})
        state = dataclasses.replace(start, **(run | {name: value}))
        assert state.to_dict() != start.to_dict(), name
        assert getattr(ScaleState.from_dict(state.to_dict(), FIRST), name) == value


def test_the_dict_has_the_keys_of_torch_and_one_more() -> None:
    saved = opened(FIRST.to_dict())
    ours = saved.pop("halfstep")
    assert saved == {
        "scale": 4.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.25,
        "growth_interval": 2,
        "_growth_tracker": 0,
    }
    assert ours["version"] == 1
    assert ours["schedule"] == {"name": "dynamic", "trials": True}
    assert (ours["min_scale"], ours["max_scale"]) == (LOWEST, LARGEST_SCALE)


@pytest.mark.parametrize(("scale", "min_scale"), [(65536.0, LOWEST), (2.0**-30, 2.0**-30)])
def test_a_state_of_torch_loads(scale: float, min_scale: float) -> None:
    theirs = torch.amp.GradScaler(DEVICE, scale, 3.0, 0.25, 7)
    theirs.scale(torch.ones(()))
    theirs._growth_tracker.fill_(5)
    state = ScaleState.from_dict(theirs.state_dict(), FIRST)
    assert state == dataclasses.replace(
        ScaleState.first(scale, Dynamic(3.0, 0.25, 7)), growth_tracker=5
    )
    assert state.min_scale == min_scale


def test_torch_loads_a_state_of_ours() -> None:
    for schedule in (Static(), Dynamic(3.0, 0.25, 7)):
        theirs = torch.amp.GradScaler(DEVICE)
        theirs.load_state_dict(ScaleState.first(8.0, schedule).to_dict())
        assert theirs.get_scale() == 8.0
        assert theirs.get_growth_factor() == schedule.growth_factor


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"scale": 0.0}, "cannot be used: scale is 0.0.*Correct it in the dict"),
        ({"scale": math.nan}, "cannot be used: scale is nan"),
        ({"scale": "big"}, "cannot be used: scale is 'big'"),
        ({"scale": 1e-9}, "cannot be used: min_scale is 5.96.*e-08, above scale, which is 9.9"),
        ({"growth_interval": 0}, "cannot be used: growth_interval is 0"),
        ({"_growth_tracker": -1}, "cannot be used: growth_tracker is -1"),
        ({"backoff_factor": -1.0}, "cannot be used: backoff_factor is -1.0"),
        ({"halfstep": '{"version": 2}'}, "'halfstep' version 2.*update halfstep"),
        ({"halfstep": '{"version": 1, "min_scale": 1.0}'}, "cannot be used: .*'max_scale'"),
    ],
)
def test_a_bad_dict_is_refused(change: dict[str, object], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        ScaleState.from_dict(FIRST.to_dict() | change, FIRST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"min_scale": 0}, "cannot be used: min_scale is 0"),
        ({"colour": 0}, "cannot be used: .* unexpected keyword argument 'colour'"),
        ({"reached_floor": 1}, "cannot be used: reached_floor is 1"),
        ({"schedule": {"name": "best", "trials": True}}, "cannot be used: 'halfstep' is not what"),
        ({"schedule": {"name": "dynamic"}}, "cannot be used: 'halfstep' is not what"),
        ({"schedule": {"name": "static", "trials": True}}, "cannot be used: 'halfstep' is not"),
        ({"schedule": None}, "cannot be used: .*NoneType"),
    ],
)
def test_bad_values_of_ours_are_refused(change: dict[str, object], words: str) -> None:
    saved = opened(FIRST.to_dict())
    saved["halfstep"] |= change
    with pytest.raises(ValueError, match=words):
        ScaleState.from_dict(closed(saved), FIRST)


def test_a_missing_key_is_named() -> None:
    saved = FIRST.to_dict()
    del saved["_growth_tracker"]
    with pytest.raises(ValueError, match=r"has no '_growth_tracker' .its keys are .*state_dict"):
        ScaleState.from_dict(saved, FIRST)


# --- why a step is skipped ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "found_inf", "loss_is_finite", "why"),
    [
        ({}, False, True, None),
        ({}, False, False, None),
        ({}, True, True, Reason.OVERFLOW),
        ({}, True, False, Reason.LOSS),
        ({"reached_floor": True}, True, True, Reason.NON_FINITE),
        ({"reached_floor": True}, True, False, Reason.LOSS),
        ({"reached_floor": True}, False, True, None),
        ({"scale": LOWEST}, True, True, Reason.NON_FINITE),
        ({"schedule": Static()}, True, True, Reason.OVERFLOW),
    ],
)
def test_the_reason(change, found_inf, loss_is_finite, why):
    state = dataclasses.replace(FIRST, **change)
    assert reason(state, found_inf, loss_is_finite) is why
