"""Devices that lack a kernel, a dtype or a property: a scaler trains there, shown on the CPU."""

from __future__ import annotations

import math

import pytest
import torch
from tests.lacking import NoFloat64, lacking

from halfstep import GradScaler
from halfstep._gradients.gradients import collect
from halfstep._gradients.optimizers import handles_scale

CPU = torch.device("cpu")


def test_a_dtype_that_the_kernel_does_not_know_takes_other_ops(monkeypatch) -> None:
    def refuse(tensors: list[torch.Tensor], *_: torch.Tensor) -> None:
        assert tensors[0].dtype is torch.float32

    monkeypatch.setattr("halfstep._gradients.gradients.check_and_unscale_", refuse)
    lacking(monkeypatch, unscales=frozenset({torch.float32}))
    params = [torch.nn.Parameter(each) for each in (torch.ones(2), torch.ones(2).bfloat16())]
    for param in params:
        param.grad = param.detach().clone()
    params[1].grad[0] = math.inf
    version = params[1].grad._version
    found = collect(params).multiply_(torch.tensor(0.5))
    assert found == {CPU: torch.ones(())}
    assert params[1].grad.tolist() == [math.inf, 0.5]
    assert params[1].grad._version > version
    params[1].grad[0] = 1.0
    assert collect(params).check() == {CPU: torch.zeros(())}
    assert params[1].grad.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_scaler_trains_bfloat16_parameters_without_the_kernel(monkeypatch, max_norm) -> None:
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(0)
        params = [torch.nn.Parameter(torch.randn(8, 8).bfloat16()) for _ in range(3)]
        optimizer, scaler = torch.optim.AdamW(params, lr=0.1), GradScaler("cpu", init_scale=1000.0)
        for step in range(5):
            loss = sum((param * param).sum() for param in params)
            optimizer.zero_grad()
            scaler.scale(loss * (math.inf if step == 2 else 1.0)).backward()
            scaler.step(optimizer, **({} if max_norm is None else {"max_norm": max_norm}))
            scaler.update()
        return [*(param.detach() for param in params), torch.tensor(scaler.get_scale())]

    wanted = trained()
    lacking(monkeypatch, unscales=frozenset({torch.float32}))
    assert all(map(torch.equal, trained(), wanted))


def test_a_scaler_works_on_a_device_without_float64(monkeypatch, waiting_device) -> None:
    lacking(monkeypatch, has_float64=False, unscales=frozenset({torch.float32}), moves_scale=False)
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 4)
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), GradScaler("cpu")
    with NoFloat64():
        for _ in range(3):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
            scaler.step(optimizer, max_norm=1.0)
            scaler.update()
    assert scaler.get_scale() == 65536.0


def test_without_float64_gradients_that_cannot_be_clipped_are_an_overflow(monkeypatch) -> None:
    lacking(monkeypatch, has_float64=False)
    for fused in (False, True):
        param = torch.nn.Parameter(torch.zeros(4))
        optimizer, scaler = (
            torch.optim.SGD([param], lr=1.0, fused=fused),
            GradScaler(init_scale=4.0),
        )
        scaler.scale(param.sum()).backward()
        param.grad.fill_(1e25)  # its square is inf in float32
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
        assert param.tolist() == [0.0] * 4
        assert scaler.get_scale() == 2.0


def test_a_fused_optimizer_that_ignores_the_flag_is_not_left_to_skip(monkeypatch) -> None:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.ones(2))], fused=True)
    assert handles_scale(optimizer)
    lacking(monkeypatch, fused_skips=False)
    assert not handles_scale(optimizer)
    param, scaler = optimizer.param_groups[0]["params"][0], GradScaler("cpu")
    scaler.scale((param * math.inf).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert param.tolist() == [1.0, 1.0]
    assert not optimizer.state
