"""What existing code reads and writes on a scaler, without asking whose it is."""

import math
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from torch.amp.grad_scaler import OptState

import halfstep
from halfstep._scaler import GradScaler, Static
from halfstep.errors import CallOrderError

ATTRIBUTES = {name for name in vars(torch.amp.GradScaler(DEVICE)) if name.startswith("_")}


def backward(scaler: Any, value: float = 1.0) -> tuple[torch.nn.Parameter, torch.optim.SGD]:
    param = torch.nn.Parameter(torch.zeros(2))
    scaler.scale(param.sum() * value).backward()
    return param, torch.optim.SGD([param], lr=1.0)


def torch_scaler(**kwargs: Any) -> torch.amp.GradScaler:
    return torch.amp.GradScaler(DEVICE, **kwargs)


both = pytest.mark.parametrize("make", [GradScaler, torch_scaler])


def plain(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


# --- reading --------------------------------------------------------------------------------------


def test_all_attributes_are_there_and_say_the_same() -> None:
    kwargs: dict[str, Any] = {"init_scale": 8.0, "growth_interval": 3, "backoff_factor": 0.25}
    ours, theirs = GradScaler(DEVICE, **kwargs), torch_scaler(**kwargs)
    for scaler in (ours, theirs):
        for _ in range(2):
            _, optimizer = backward(scaler)
            scaler.step(optimizer)
            scaler.update()
    for name in ATTRIBUTES:
        assert plain(getattr(ours, name)) == plain(getattr(theirs, name)), name
    assert ours._get_growth_tracker() == theirs._get_growth_tracker() == 2


def test_they_are_live() -> None:
    scaler: Any = GradScaler(DEVICE)
    assert scaler._scale is scaler._growth_tracker is None
    assert scaler._enabled
    scaler.set_growth_factor(3.0)
    scaler.set_backoff_factor(0.25)
    scaler.set_growth_interval(7)
    numbers = (scaler._growth_factor, scaler._backoff_factor, scaler._growth_interval)
    assert numbers == (3.0, 0.25, 7)


def test_those_of_a_disabled_one() -> None:
    scaler: Any = GradScaler(enabled=False, init_scale=8.0)
    assert not scaler._enabled
    assert scaler._scale is None
    assert (scaler._init_scale, scaler._growth_interval) == (8.0, 2000)
    assert scaler._get_growth_tracker() == 0
    assert dict(scaler._per_optimizer_states) == {}


@both
def test_the_state_of_an_optimizer(make: Any) -> None:
    scaler = make()
    _, optimizer = backward(scaler, math.inf)
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    assert dict(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]) == {}
    scaler.unscale_(optimizer)
    state = scaler._per_optimizer_states[id(optimizer)]
    assert state["stage"] is OptState.UNSCALED
    found = state["found_inf_per_device"]
    assert {device: flag.item() for device, flag in found.items()} == {torch.empty(0).device: 1.0}
    assert list(scaler._per_optimizer_states) == [id(optimizer)]
    assert scaler._per_optimizer_states.get(0) is None
    scaler.step(optimizer)
    assert state["stage"] is OptState.STEPPED
    assert state.get("stage") is OptState.STEPPED
    scaler.update()
    assert scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    scaler._per_optimizer_states.clear()


def test_a_flag_that_others_write_to_counts() -> None:
    """As those do who share it between ranks."""
    scaler: Any = GradScaler()
    param, optimizer = backward(scaler)
    scaler.unscale_(optimizer)
    for state in scaler._per_optimizer_states.values():
        for flag in state["found_inf_per_device"].values():
            flag.fill_(1.0)
    scaler.step(optimizer)
    assert torch.equal(param, torch.zeros(2))


def test_what_cannot_be_written_to_a_state() -> None:
    scaler: Any = GradScaler()
    _, optimizer = backward(scaler)
    scaler.unscale_(optimizer)
    states = scaler._per_optimizer_states
    writes = [
        lambda: states.__setitem__(id(optimizer), {}),
        lambda: states.update({}),
        lambda: states[id(optimizer)].__setitem__("stage", "ready"),
        lambda: states[0].__setitem__("stage", OptState.STEPPED),
        lambda: states[id(optimizer)].__setitem__("found_inf_per_device", 1.0),
        lambda: states[id(optimizer)].__setitem__("found_inf", {torch.empty(0).device: 1.0}),
        lambda: setattr(scaler, "_per_optimizer_states", {1: {}}),
    ]
    for write in writes:
        with pytest.raises(TypeError, match=r"GradScaler\._per_optimizer_states"):
            write()
    assert states[id(optimizer)]["stage"] is OptState.UNSCALED


# --- writing --------------------------------------------------------------------------------------


@both
def test_the_floor_idiom(make: Any) -> None:
    scaler = make(init_scale=128.0)
    param, optimizer = backward(scaler)
    param.grad[0] = math.inf
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 64.0
    if scaler._scale < 128:
        scaler._scale = torch.tensor(128).to(scaler._scale)
    assert scaler.get_scale() == 128.0


@pytest.mark.parametrize("value", [64.0, torch.tensor(64.0), torch.tensor([64]), torch.tensor(64)])
@pytest.mark.parametrize("is_early", [False, True])
def test_the_scale(value: Any, is_early: bool) -> None:
    scaler: Any = GradScaler()
    if not is_early:
        backward(scaler)
    scaler._scale = value
    assert scaler.get_scale() == 64.0
    param, optimizer = backward(scaler)
    scaler.step(optimizer)
    assert torch.equal(param, -torch.ones(2))


def test_a_scale_that_is_none() -> None:
    scaler: Any = GradScaler()
    with pytest.raises(TypeError, match="make a new GradScaler"):
        scaler._scale = None


@pytest.mark.parametrize("name", ["_growth_tracker", "_init_growth_tracker"])
@pytest.mark.parametrize("value", [1, torch.tensor(1)])
@pytest.mark.parametrize("is_early", [False, True])
def test_the_count(name: str, value: Any, is_early: bool) -> None:
    scaler: Any = GradScaler(init_scale=8.0, growth_interval=2)
    if not is_early:
        backward(scaler)
    setattr(scaler, name, value)
    _, optimizer = backward(scaler)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 16.0


def test_a_count_beyond_the_interval_is_as_in_torch() -> None:
    saved = torch_scaler(growth_interval=2).state_dict()
    scaler: Any = GradScaler(init_scale=6.0, growth_interval=1)
    scaler._init_growth_tracker = 7
    scaler.load_state_dict(saved)
    assert scaler._init_growth_tracker == 0


@pytest.mark.parametrize(
    ("name", "value"), [("_growth_factor", 4.0), ("_backoff_factor", 0.25), ("_growth_interval", 1)]
)
def test_the_schedule(name: str, value: float) -> None:
    scaler: Any = GradScaler()
    setattr(scaler, name, value)
    assert getattr(scaler, f"get{name}")() == value
    with pytest.raises(ValueError, match=name[1:]):
        setattr(scaler, name, -1)
    static: Any = GradScaler(schedule=Static())
    with pytest.raises(ValueError, match=f"has no {name[1:]}"):
        setattr(static, name, value)


def test_the_first_scale() -> None:
    scaler: Any = GradScaler()
    scaler._init_scale = 32
    assert scaler._init_scale == scaler.get_scale() == 32.0
    loss = torch.ones(())
    assert scaler.scale(loss) == 32.0
    with pytest.raises(CallOrderError, match=r"update\(new_scale=...\)"):
        scaler._init_scale = 64


def test_switching_off() -> None:
    scaler: Any = GradScaler()
    scaler._enabled = True
    param, optimizer = backward(scaler)
    scaler.step(optimizer)
    scaler._enabled = False
    assert not scaler.is_enabled()
    assert scaler.scale(3.0) == 3.0
    scaler.step(optimizer)
    assert torch.equal(param, torch.full((2,), -2.0))
    scaler._enabled = False
    with pytest.raises(TypeError, match="Make a new"):
        scaler._enabled = True

    class Own(GradScaler):
        pass

    own: Any = Own()
    own._enabled = False
    assert not own.is_enabled()


# --- subclasses, errors, and optimizers that take the scaler --------------------------------------


@both
def test_the_check_of_subclasses_with_a_step_of_their_own(make: Any) -> None:
    scaler = make()
    with pytest.raises(AssertionError, match="Attempted step but _scale is None"):
        scaler._check_scale_growth_tracker("step")
    scaler.scale(torch.ones(()))
    scale, tracker = scaler._check_scale_growth_tracker("step")
    assert (scale.item(), tracker.item()) == (scaler.get_scale(), 0)


@both
def test_no_checks_are_an_assertion_error(make: Any) -> None:
    scaler = make()
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded for this optimizer\."):
        scaler.step(torch.optim.SGD([torch.zeros(1)]))
    with pytest.raises(AssertionError, match=r"No inf checks were recorded prior to update\."):
        scaler.update()


def test_what_autocast_is_available_for() -> None:
    assert halfstep.is_autocast_available(DEVICE)
