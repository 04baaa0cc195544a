"""Corners that no other test of the scaler comes to; each was once broken on purpose, unnoticed."""

import gc
import weakref
from typing import Any

import pytest
import torch
from tests.training import closure_of
from torch.optim import SGD

from halfstep._scaler import GradScaler
from halfstep.errors import CallOrderError


def param(*values: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor(values or (1.0,)))


def test_a_closure_whose_loss_does_not_depend_on_the_parameters() -> None:
    p, other, scaler = param(), param(), GradScaler()
    with pytest.raises(CallOrderError, match="none of its 1 parameter has a gradient"):
        scaler.step(SGD([p], 1.0), closure_of(scaler, other.sum), max_norm=1.0)


def test_float16_gradients_that_a_scale_below_1_makes_inf() -> None:
    p = torch.nn.Parameter(torch.ones(1, dtype=torch.float16))
    scaler, optimizer = GradScaler(init_scale=0.5), SGD([p], 1.0, fused=True)
    scaler.scale(torch.ones(()))
    p.grad = torch.tensor([6e4], dtype=torch.float16)
    scaler.step(optimizer)
    assert scaler.outcome(optimizer).skipped


@pytest.mark.parametrize(
    "call",
    [
        lambda scaler: scaler.step(torch.nn.Linear(1, 1)),
        lambda scaler: scaler.unscale_(None),
        lambda scaler: scaler.retry([param()]),
    ],
)
def test_something_else_than_an_optimizer(call: Any) -> None:
    with pytest.raises(TypeError, match=r"\(\w+\): pass the optimizer, such as"):
        call(GradScaler())


def test_a_schedule_is_no_name() -> None:
    with pytest.raises(TypeError, match=r"schedule is 'dynamic' .str.: pass Static"):
        GradScaler(schedule="dynamic")  # type: ignore[arg-type]


def test_nothing_of_a_model_that_is_gone_is_kept() -> None:
    scaler = GradScaler()
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), 0.1)
    scaler.scale(model(torch.ones(1, 2)).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    outcome, weight = scaler.outcome(optimizer), weakref.ref(model.weight)
    del model, optimizer
    gc.collect()
    assert weight() is None
    assert outcome.taken
    assert len(scaler.history()) == 1


def test_messages_that_name_what_is_wrong() -> None:
    with pytest.raises(TypeError, match=r"write GradScaler\(init_scale=65536.0\)"):
        GradScaler(65536.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="min_scale") as error:
        GradScaler(min_scale=10.0, max_scale=5.0)
    assert "init_scale" not in str(error.value)
