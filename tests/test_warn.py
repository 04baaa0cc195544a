"""Warnings: each names the line of the user's code, whatever is called in between."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch import nn

import halfstep
from halfstep._scaler.clipping import NUM_STEPS
from halfstep._scaler.engine import NUM_LOSSES_WITHOUT_UPDATE
from halfstep.errors import HalfstepWarning


def load_nothing() -> None:
    halfstep.GradScaler("cpu").load_state_dict({})


def scale_and_never_update() -> None:
    scaler, loss = halfstep.GradScaler("cpu"), torch.ones((), requires_grad=True)
    for _ in range(NUM_LOSSES_WITHOUT_UPDATE + 1):
        scaler.scale(loss)


def clip_before_unscaling() -> None:
    model = nn.Linear(2, 2)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.0), halfstep.GradScaler("cpu")
    for _ in range(NUM_STEPS + 1):
        scaler.scale(model(torch.randn(4, 2)).sum()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def skip_at_the_floor() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    torch.optim.lr_scheduler.ConstantLR(optimizer)  # puts a function around optimizer.step
    scaler = halfstep.GradScaler("cpu", init_scale=1.0)
    scaler.scale(model(torch.full((4, 2), torch.inf)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize(
    "warned", [load_nothing, scale_and_never_update, clip_before_unscaling, skip_at_the_floor]
)
def test_the_line_is_the_users(warned: Callable[[], None]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", HalfstepWarning)
        warned()
    ours = [each for each in caught if issubclass(each.category, HalfstepWarning)]
    assert ours
    assert {each.filename for each in ours} == {__file__}
