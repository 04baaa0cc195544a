"""Saving, loading, pickling; both ways with torch.amp."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep.errors import CallOrderError
from halfstep.scaling import GradScaler
from halfstep.scaling.state import LARGEST_COUNT, ScaleState

TORCH_KEYS = {"scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"}


def make(initialized: bool) -> GradScaler:
    scaler = GradScaler(None, 2.0**8, 3.0, 0.25, 7)
    if initialized:
        scaler.scale(torch.ones(()))
    return scaler


def iterate(scaler: GradScaler | torch.amp.GradScaler, value: float = 1.0) -> None:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler.scale((param * value).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("initialized", [False, True])
def test_state_dict(initialized: bool) -> None:
    assert make(initialized).state_dict() == {
        "scale": 256.0,
        "growth_factor": 3.0,
        "backoff_factor": 0.25,
        "growth_interval": 7,
        "_growth_tracker": 0,
        "halfstep": {"version": 1, "min_scale": 1.0},
    }


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize("source_initialized", [False, True])
def test_torch_loads_ours(initialized: bool, source_initialized: bool) -> None:
    source = make(source_initialized)
    iterate(source)
    target = torch.amp.GradScaler("cpu")
    if initialized:
        target.scale(torch.ones(()))
    target.load_state_dict(source.state_dict())
    ours = source.state_dict()
    del ours["halfstep"]
    assert target.state_dict() == ours
    iterate(target)
    iterate(source)
    assert target.state_dict()["_growth_tracker"] == source.state_dict()["_growth_tracker"] == 2


@pytest.mark.parametrize("initialized", [False, True])
@pytest.mark.parametrize("source_initialized", [False, True])
def test_we_load_torchs(initialized: bool, source_initialized: bool) -> None:
    source = torch.amp.GradScaler("cpu", 2.0**8, 3.0, 0.25, 7)
    if source_initialized:
        iterate(source)
    assert set(source.state_dict()) == TORCH_KEYS
    target = GradScaler()
    if initialized:
        target.scale(torch.ones(()))
    target.load_state_dict(source.state_dict())
    assert target.state_dict() == source.state_dict() | {
        "halfstep": {"version": 1, "min_scale": 1.0}
    }
    iterate(target, float("inf"))
    assert target.get_scale() == 64.0


@settings(deadline=None)
@given(
    st.builds(
        ScaleState,
        scale=st.floats(2.0**-126, 2.0**127, width=32),
        growth_tracker=st.integers(0, LARGEST_COUNT),
        growth_factor=st.floats(1.0, 1e6),
        backoff_factor=st.floats(1e-6, 1.0),
        growth_interval=st.integers(1, LARGEST_COUNT),
        min_scale=st.floats(2.0**-126, 1.0, width=32),
    ),
    st.booleans(),
    st.sampled_from(["load", "pickle", "deepcopy"]),
)
def test_every_state_survives(state: ScaleState, initialized: bool, way: str) -> None:
    source = GradScaler()
    source.load_state_dict(state.to_dict())
    if initialized:
        source.scale(torch.ones(()))
    if way == "load":
        target = make(initialized)
        target.load_state_dict(source.state_dict())
    else:
        target = copy.deepcopy(source) if way == "deepcopy" else pickle.loads(pickle.dumps(source))
    saved = target.state_dict()
    # A count that is past the interval means the same as one that is about to reach it.
    expected = state.to_dict()
    if saved["_growth_tracker"] != state.growth_tracker:
        expected["_growth_tracker"] = state.growth_interval - 1
        assert state.growth_tracker >= state.growth_interval
    assert saved == expected
    assert target._can_amplify == (state.scale < 1.0 or state.min_scale < 1.0)


@pytest.mark.parametrize("initialized", [False, True])
def test_an_empty_state_warns_and_changes_nothing(initialized: bool) -> None:
    scaler = make(initialized)
    before = scaler.state_dict()
    with pytest.warns(UserWarning, match="saved by a disabled GradScaler and holds no scale"):
        scaler.load_state_dict(GradScaler(enabled=False).state_dict())
    assert scaler.state_dict() == before


@pytest.mark.parametrize("initialized", [False, True])
def test_a_bad_state_changes_nothing(initialized: bool) -> None:
    scaler = make(initialized)
    before = scaler.state_dict()
    with pytest.raises(ValueError, match=r"cannot be used: scale is 0\.0"):
        scaler.load_state_dict(before | {"scale": 0.0})
    assert scaler.state_dict() == before
    iterate(scaler)


@pytest.mark.parametrize("way", ["pickle", "deepcopy"])
def test_a_copy_between_iterations_goes_on_alike(way: str) -> None:
    scaler = make(initialized=True)
    iterate(scaler)
    copied = copy.deepcopy(scaler) if way == "deepcopy" else pickle.loads(pickle.dumps(scaler))
    for value in (1.0, 1.0, float("inf"), 1.0):
        iterate(scaler, value)
        iterate(copied, value)
        assert scaler.state_dict() == copied.state_dict()


def test_a_subclass_keeps_its_attributes_in_a_copy() -> None:
    class Named(GradScaler):
        name = "none"

    scaler = Named()
    scaler.name = "mine"
    scaler.scale(torch.ones(()))
    copied = copy.deepcopy(scaler)
    assert type(copied) is Named
    assert copied.name == "mine"


@pytest.mark.parametrize("call", ["unscale_", "step"])
def test_no_copy_in_the_middle_of_an_iteration(call: str) -> None:
    scaler = make(initialized=True)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    scaler.scale(param.sum()).backward()
    getattr(scaler, call)(optimizer)
    with pytest.raises(
        CallOrderError, match=r"do it after update\(\). Seen since the last one: SGD"
    ):
        pickle.dumps(scaler)
    with pytest.raises(CallOrderError, match="cannot be pickled or copied"):
        copy.deepcopy(scaler)
    if call == "unscale_":
        scaler.step(optimizer)
    scaler.update()
    pickle.dumps(scaler)


def test_loading_replaces_the_floor() -> None:
    scaler = GradScaler(init_scale=0.25)
    scaler.load_state_dict(GradScaler().state_dict())
    assert scaler.state_dict()["halfstep"]["min_scale"] == 1.0
