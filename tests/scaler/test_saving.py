"""Saving, loading, pickling; both ways with torch.amp."""

import copy
import json
import math
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.device import DEVICE
from tests.scaler.saved import closed, opened

from halfstep._scaler import GradScaler
from halfstep._scaler.engine import scale_on
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.scale_state import Dynamic, ScaleState, Static, next_state
from halfstep.errors import CallOrderError


def tripling_scaler(initialized: bool) -> GradScaler:
    scaler = GradScaler(None, 2.0**8, 3.0, 0.25, 7)
    if initialized:
        scaler.scale(torch.ones(()))
    return scaler


SCHEDULES = st.sampled_from([Dynamic(), Dynamic(3.0, 0.25, 7), Dynamic(trials=False), Static()])


@st.composite
def states(draw: st.DrawFn) -> ScaleState:
    """Every state that a sequence of iterations leads to."""
    low, start, high = sorted(draw(st.tuples(*[st.floats(2.0**-20, 2.0**30, width=32)] * 3)))
    state = ScaleState.first(start, draw(SCHEDULES), min_scale=low, max_scale=high)
    for found_inf, is_finite in draw(
        st.lists(st.tuples(st.booleans(), st.booleans()), max_size=20)
    ):
        state = next_state(state, found_inf=found_inf, loss_is_finite=is_finite)
    return state


@given(states(), st.booleans(), st.sampled_from(["load", "pickle", "deepcopy"]))
def test_every_state_survives(state: ScaleState, initialized: bool, way: str) -> None:
    source = GradScaler()
    saved = state.to_dict()
    source.load_state_dict(json.loads(json.dumps(saved)))
    if initialized:
        source.scale(torch.ones(()))
    if way == "load":
        target = tripling_scaler(initialized)
        target.load_state_dict(source.state_dict())
    else:
        target = copy.deepcopy(source) if way == "deepcopy" else pickle.loads(pickle.dumps(source))
    assert target.state_dict() == saved
    target.scale(torch.ones(()))
    assert target._engine.loss_scale.read() == state
    assert target._engine.loss_scale.can_amplify == state.can_amplify


def test_a_damaged_part_of_ours_changes_nothing() -> None:
    scaler = tripling_scaler(initialized=True)
    before = scaler.state_dict()
    for damage in ({"schedule": {"name": "static", "scale": 1.0}}, {"norm_limits": None}):
        damaged = opened(before)
        damaged["halfstep"] |= damage
        with pytest.raises(ValueError, match="saved scaler state"):
            scaler.load_state_dict(closed(damaged))
        assert scaler.state_dict() == before
    for text in ("no JSON", {"version": 1}, "3"):
        with pytest.raises(ValueError, match="the JSON text that state_dict"):
            scaler.load_state_dict(before | {"halfstep": text})
        assert scaler.state_dict() == before


@pytest.mark.parametrize("kinds", [".L.", ".L.L.", "." + "G" * 8])
@pytest.mark.parametrize("written", [2.0**20, 3.0])
def test_a_scale_written_in_place_in_a_run_can_be_saved(kinds: str, written: float) -> None:
    """In a trial, in a remembered run, after backing off: it ends the run."""
    scale = scale_on(torch.device(DEVICE), LossScale(ScaleState.first(65536.0, Dynamic())))
    for kind in kinds:
        scale.see_loss(torch.tensor(math.inf if kind == "L" else 1.0))
        scale.update(kind != ".")
    scale.tensor.fill_(written)
    saved = scale.read()
    assert (saved.scale, saved.resume_scale) == (written, 0.0)
    assert ScaleState.from_dict(saved.to_dict(), saved) == saved


def test_loading_is_in_place_on_the_device() -> None:
    """CUDA graphs hold the addresses."""
    scaler = tripling_scaler(initialized=True)
    address = scaler._get_scale_async().data_ptr()
    scaler.load_state_dict(GradScaler(init_scale=4.0).state_dict())
    assert scaler._get_scale_async().data_ptr() == address
    assert scaler.scale(torch.ones(())).item() == 4.0


@pytest.mark.parametrize("initialized", [False, True])
def test_an_empty_state_warns_and_changes_nothing(initialized: bool) -> None:
    scaler = tripling_scaler(initialized)
    before = scaler.state_dict()
    with pytest.warns(UserWarning, match="saved by a disabled GradScaler and holds no scale"):
        scaler.load_state_dict(GradScaler(enabled=False).state_dict())
    assert scaler.state_dict() == before


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
    scaler = tripling_scaler(initialized=True)
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
