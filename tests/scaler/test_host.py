"""The state of a scale as plain numbers on the CPU, and what existing code does to its tensors."""

import math
from collections.abc import Iterator

import pytest
import torch

from halfstep import GradScaler
from halfstep.errors import CallOrderError


@pytest.fixture(params=[torch.float16, torch.bfloat16, torch.float64])
def default_dtype(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield
    torch.set_default_dtype(before)


def one_step(scaler: GradScaler, param: torch.nn.Parameter, **kind: float | None) -> None:
    optimizer = torch.optim.SGD([param], lr=0.1)
    optimizer.zero_grad()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer, **kind)
    scaler.update()


@pytest.mark.usefixtures("default_dtype")
@pytest.mark.parametrize("max_norm", [None, math.inf])
def test_the_default_dtype_is_not_that_of_the_scale(max_norm: float | None) -> None:
    param = torch.nn.Parameter(torch.ones(2, dtype=torch.float32))
    scaler = GradScaler(init_scale=3000.1)
    one_step(scaler, param, max_norm=max_norm)
    assert scaler._scale.dtype is torch.float32
    assert scaler.get_scale() == torch.tensor(3000.1, dtype=torch.float32).item()
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.9, dtype=torch.float32))


def test_a_scale_that_is_written_to_in_place_is_divided_by() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    scaler = GradScaler()
    one_step(scaler, param)
    scaler._scale.fill_(128.0)
    one_step(scaler, param)
    torch.testing.assert_close(param.detach(), torch.full((2,), 0.8))
    scaler._scale.data.clamp_(max=100.0)
    assert scaler.state_dict()["scale"] == scaler.get_scale() == 100.0


def test_old_outcomes_hold_nothing_of_their_gradients() -> None:
    param = torch.nn.Parameter(torch.ones(2))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), GradScaler()
    outcomes = []
    for _ in range(6):
        scaler.scale(param.sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        outcomes.append(scaler.outcome(optimizer))
        optimizer.zero_grad()
    assert [outcome._kept is not None for outcome in outcomes] == [False] * 5 + [True]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_a_loss_from_before_an_unusable_scale_cannot_go_backward(value: float) -> None:
    param = torch.nn.Parameter(torch.ones(2))
    scaler = GradScaler()
    loss = scaler.scale((param * param).sum())
    scaler.update(torch.tensor(value))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_call_that_fails_does_not_coalesce() -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    grad = torch.sparse_coo_tensor(
        torch.tensor([[1, 1]]), torch.ones(2), (3,), check_invariants=True
    )
    param.grad = grad
    with pytest.raises(CallOrderError, match="before scale"):
        GradScaler().step(torch.optim.SGD([param], lr=0.1))
    assert param.grad is grad


def test_a_step_method_that_is_no_function() -> None:
    class Step:
        __slots__ = ("calls",)

        def __init__(self) -> None:
            self.calls = 0

        def __call__(self) -> None:
            self.calls += 1

    param = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([param], lr=0.1, fused=True)
    optimizer.step = step = Step()  # type: ignore[method-assign]
    scaler = GradScaler()
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert step.calls == 1
