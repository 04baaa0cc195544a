"""Where backing off stops, and that a scale below 1 is checked twice, however it was set."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.device import DEVICE
from tests.scaler.saved import opened
from tests.training import one_parameter

from halfstep._scaler import GradScaler

pytestmark = pytest.mark.filterwarnings("ignore::halfstep.errors.SkippedStepsWarning")


def by_constructor(scale: float) -> GradScaler:
    return GradScaler(init_scale=scale)


def by_number_before_the_first_loss(scale: float) -> GradScaler:
    scaler = GradScaler()
    scaler.update(scale)
    return scaler


def by_number(scale: float) -> GradScaler:
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    scaler.update(scale)
    return scaler


def by_tensor(scale: float) -> GradScaler:
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    scaler.update(torch.tensor(scale))
    return scaler


def by_loading(scale: float) -> GradScaler:
    scaler = GradScaler()
    scaler.load_state_dict(torch.amp.GradScaler(DEVICE, init_scale=scale).state_dict())
    return scaler


def by_loading_on_the_device(scale: float) -> GradScaler:
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    scaler.load_state_dict(by_tensor(scale).state_dict())
    return scaler


ways = pytest.mark.parametrize(
    "start",
    [
        by_constructor,
        by_number_before_the_first_loss,
        by_number,
        by_tensor,
        by_loading,
        by_loading_on_the_device,
    ],
)


def lowest_scale(scaler: GradScaler) -> float:
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.1)
    lowest = scaler.get_scale()
    for _ in range(30):
        scaler.scale(param.sum()).backward()
        param.grad.fill_(math.nan)
        scaler.step(optimizer)
        scaler.update()
        lowest = min(lowest, scaler.get_scale())
    return lowest


@ways
@pytest.mark.parametrize("scale", [2.0**16, 3.0, 1.0, 0.3, 2.0**-4])
def test_the_floor(start: Callable[[float], GradScaler], scale: float) -> None:
    expected = torch.tensor(min(1.0, scale)).item()
    scaler = start(scale)
    assert lowest_scale(scaler) == expected
    assert opened(scaler.state_dict())["halfstep"]["min_scale"] == expected


@ways
def test_the_floor_stays_when_the_scale_is_raised(start: Callable[[float], GradScaler]) -> None:
    scaler = start(0.25)
    scaler.update(64.0)
    assert lowest_scale(scaler) == 0.25


@ways
@pytest.mark.parametrize("fused", [False, True])
def test_no_inf_by_unscaling(start: Callable[[float], GradScaler], fused: bool) -> None:
    scaler = start(0.25)
    param, optimizer = one_parameter(torch.ones(2), fused=fused)
    scaler.scale(param.sum())
    param.grad = torch.full((2,), 3e38)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, torch.ones(2))
    assert scaler.get_scale() == 0.25
