"""Each gradient is unscaled once, whoever holds it; and clipping too early is noticed."""

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.training import fused_or_not, take_step

from halfstep._scaler import GradScaler
from halfstep._scaler.guard import guard
from halfstep.errors import HalfstepWarning

SCALE = 2.0**10


def optimizers_that_share(fused: bool) -> tuple[Any, Any, Any, GradScaler]:
    shared = torch.nn.Parameter(torch.zeros(2))
    own = torch.nn.Parameter(torch.zeros(3))
    first = torch.optim.SGD([shared], lr=1.0, fused=fused)
    second = torch.optim.SGD([shared, own], lr=1.0, fused=fused)
    scaler = GradScaler(init_scale=SCALE)
    scaler.scale(shared.sum() + own.sum()).backward()
    return first, second, (shared, own), scaler


@fused_or_not
def test_an_overflow_in_a_gradient_that_came_after_unscale(fused: bool) -> None:
    first, second, (shared, _), scaler = optimizers_that_share(fused)
    scaler.unscale_(first)
    first.zero_grad()
    scaler.scale(shared.sum()).backward()
    shared.grad[0] = math.inf
    scaler.unscale_(second)
    scaler.step(first)
    scaler.update()
    assert not shared.any()
    assert scaler.get_scale() == SCALE / 2


@fused_or_not
def test_a_gradient_that_came_after_unscale_and_was_left_by_a_skipped_step(fused: bool) -> None:
    first, second, (shared, own), scaler = optimizers_that_share(fused)
    scaler.step(second)
    scaler.update()
    second.zero_grad()
    scaler.scale(shared.sum()).backward()
    scaler.unscale_(first)
    first.zero_grad()
    scaler.scale(shared.sum() + own.sum()).backward()
    own.grad[0] = math.inf
    scaler.step(second)
    assert scaler.outcome(second).skipped
    scaler.step(first)
    assert scaler.outcome(first).skipped
    assert torch.equal(shared.grad, torch.ones(2))
    assert torch.equal(shared, torch.full((2,), -1.0))
    assert torch.equal(own, torch.full((3,), -1.0))


def total_norm(params: list[torch.Tensor]) -> torch.Tensor:
    return torch.nn.utils.get_total_norm([param.grad for param in params if param.grad is not None])


CLIPS: dict[str, Callable[[list[torch.Tensor]], object]] = {
    "norm": lambda params: torch.nn.utils.clip_grad_norm_(params, 1.0),
    "norm, not foreach": lambda params: torch.nn.utils.clip_grad_norm_(params, 0.25, foreach=False),
    "largest entry": lambda params: torch.nn.utils.clip_grad_norm_(params, 5.0, math.inf),
    "with norm": lambda params: torch.nn.utils.clip_grads_with_norm_(
        params, 1.0, total_norm(params)
    ),
    "value": lambda params: torch.nn.utils.clip_grad_value_(params, 0.1),
    "clamp": lambda params: [param.grad.data.clamp_(-1, 1) for param in params],
    "norm by hand": lambda params: torch._foreach_mul_(
        [param.grad for param in params], 1.0 / total_norm(params)
    ),
}

ORDERS: dict[str, Callable[[GradScaler, torch.optim.Optimizer], object]] = {
    "step": lambda scaler, optimizer: None,
    "unscale_": lambda scaler, optimizer: scaler.unscale_(optimizer),
}


@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize("order", ORDERS)
@fused_or_not
def test_clipping_before_unscaling_is_noticed(fused: bool, order: str, clip: str) -> None:
    """A7."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=fused)
    scaler = GradScaler()
    caught = []
    for _ in range(8):
        optimizer.zero_grad()
        # Of entries of all sizes, some do not reach the limit.
        inputs = torch.randn(4, 8) * torch.logspace(0, -6, 8)
        scaler.scale(model(inputs).square().mean()).backward()
        CLIPS[clip](list(model.parameters()))
        ORDERS[order](scaler, optimizer)
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            scaler.step(optimizer)
        caught += now
        scaler.update()
    (warning,) = caught
    assert warning.filename == __file__
    assert "clipped before they are unscaled" in str(warning.message)
    assert "Call scaler.unscale_(optimizer) before you clip" in str(warning.message)


@pytest.mark.parametrize("size", [1e-4, 1e-5, 3e-6, 1e-7])
@pytest.mark.parametrize("num", [1, 2, 10_000])
def test_small_gradients_that_never_change_are_no_alarm(num: int, size: float) -> None:
    param = torch.nn.Parameter(torch.zeros(num))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), GradScaler()
    for _ in range(4):
        take_step(scaler, optimizer, (param * size).sum())


@pytest.mark.parametrize(
    "how",
    [
        "unscale_",
        "value",
        "exactly",
        "max_norm",
        "nothing",
        "same batch",
        "small",
    ],
)
@fused_or_not
def test_no_false_alarm(fused: bool, how: str) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    lr = 0.0 if how == "same batch" else 0.1
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, fused=fused)
    scaler = GradScaler()
    batch = torch.randn(4, 8)
    for _ in range(8):
        optimizer.zero_grad()
        loss = model(batch).square().mean()
        scaler.scale(loss * 1e-6 if how == "small" else loss).backward()
        if how in ("unscale_", "value", "exactly"):
            scaler.unscale_(optimizer)
        if how == "value":
            torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        if how == "exactly":  # as if the norm were the limit itself
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if how == "unscale_":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        scaler.step(optimizer, **({"max_norm": 0.01} if how == "max_norm" else {}))
        scaler.update()


def masked(losses: torch.Tensor) -> torch.Tensor:
    return (losses * (torch.rand_like(losses) < torch.rand(()))).mean()


def embedded(weight: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(torch.randint(0, 256, (64,)), weight.view(256, 16))


TARGET = torch.linspace(0.1, 1.0, 4096)
HEALTHY: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "L1": lambda weight: (weight - TARGET).abs().mean(),
    "L1 of many": lambda weight: (weight.repeat(4) - TARGET.repeat(4)).abs().mean(),
    "small L1": lambda weight: (weight - TARGET).abs().sum() * 2.0**-14,
    "L1, decimal": lambda weight: (weight[:1000] - 9.0).abs().mean() * 1e-3,
    "masked L1": lambda weight: masked((weight - TARGET).abs()),
    "hinge": lambda weight: (1 - weight * torch.randn(4096).sign() - TARGET).relu().mean(),
    "masked hinge": lambda weight: masked((1 - weight).relu()),
    "signs": lambda weight: (weight * torch.randn(4096).sign()).mean(),
    "bias": lambda weight: (weight[:8] - torch.randn(512, 8)).abs().mean(),
    "one number": lambda weight: weight[0] * 2.0**-14,
    "embedding": lambda weight: (embedded(weight) - 9.0).abs().mean() / 4,
    "embedding, signs": lambda weight: (embedded(weight) - torch.randn(64, 16)).abs().mean() / 16,
    "max": lambda weight: (weight - TARGET).abs().max() * 2.0**-15,
}


@pytest.mark.parametrize("loss", HEALTHY)
@pytest.mark.parametrize("how", ["scaler", "unscale_", "guard", "scale of 1"])
def test_round_gradients_are_no_alarm(how: str, loss: str) -> None:
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(4096))
    optimizer = torch.optim.Adam([weight], 1e-3)
    scaler = GradScaler(init_scale=1.0 if how == "scale of 1" else 2.0**16)
    if how == "guard":
        guard(optimizer)
    for _ in range(5):
        optimizer.zero_grad()
        if how == "guard":
            HEALTHY[loss](weight).backward()
            optimizer.step()
            continue
        scaler.scale(HEALTHY[loss](weight)).backward()
        if how == "unscale_":
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()


@fused_or_not
def test_clipping_too_early_is_noticed_after_skipped_steps(fused: bool) -> None:
    param = torch.nn.Parameter(torch.zeros(3))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1, fused=fused), GradScaler()
    for step in range(5):
        optimizer.zero_grad()
        scaler.scale((param * torch.randn(3)).sum() * (math.inf if step < 2 else 1.0)).backward()
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        if step == 4:
            with pytest.warns(HalfstepWarning, match="clipped before they are unscaled"):
                scaler.step(optimizer)
        else:
            scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("how", ["replaced method", "closure"])
def test_clipping_too_early_is_noticed_on_other_roads(how: str) -> None:
    class Own(GradScaler):
        def get_scale(self) -> float:
            return super().get_scale()

    param = torch.nn.Parameter(torch.zeros(3))
    optimizer, scaler = torch.optim.SGD([param], lr=0.1), GradScaler()
    if how == "replaced method":
        scaler = Own()

    def evaluate() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (param * torch.randn(3)).sum()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_([param], 1.0)
        return loss

    caught = []
    for _ in range(5):
        if how != "closure":
            evaluate()
        with warnings.catch_warnings(record=True) as now:
            warnings.simplefilter("always")
            scaler.step(optimizer, evaluate if how == "closure" else None)
        caught += now
        scaler.update()
    (warning,) = caught
    assert "clipped before they are unscaled" in str(warning.message)


def test_a_forgotten_update_is_noticed() -> None:
    scaler = GradScaler()
    loss = torch.ones(())
    for _ in range(999):
        scaler.scale(loss)
    with pytest.warns(UserWarning, match=r"1000 losses have been scaled since the last update"):
        scaler.scale(loss)
    scaler.scale(loss)
