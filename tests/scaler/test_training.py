"""GradScaler in training loops, against the same loop in float32 without a scale."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from tests.device import DEVICE, seeded
from tests.training import assert_same, mlp, step_on, take_step
from torch import nn

from halfstep._autocast import autocast
from halfstep._scaler import GradScaler

SCALE = 2.0**10
ATOM = [
    pytest.param(cls, kwargs, impl, id=f"{cls.__name__}-{impl or 'default'}")
    for cls, kwargs in [
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
        (torch.optim.Adam, {"lr": 0.1}),
        (torch.optim.AdamW, {"lr": 0.1, "weight_decay": 0.1}),
        (torch.optim.Adagrad, {"lr": 0.1}),
    ]
    for impl in (None, "foreach", "fused")
]


def make_batches(count: int = 6) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = seeded(1)
    return [
        (torch.randn(5, 4, generator=generator), torch.randn(5, 2, generator=generator))
        for _ in range(count)
    ]


def mse(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def break_gradient(model: nn.Module, value: float = math.inf) -> None:
    grad = next(model.parameters()).grad
    grad[1, 2] = value


def assert_same_weights(model: nn.Module, other: nn.Module) -> None:
    assert_same(model.parameters(), other.parameters())
    assert all(param.isfinite().all() for param in model.parameters())


def train_plainly(make_optimizer: Callable[..., torch.optim.Optimizer], skip: int) -> nn.Module:
    """The control: float32, no scale, the broken iteration left out."""
    model = mlp(4, 8, 2)
    optimizer = make_optimizer(model.parameters())
    for i, batch in enumerate(make_batches()):
        if i != skip:
            optimizer.zero_grad()
            step_on(optimizer, mse(model, batch))
    return model


def train_scaled(
    make_optimizer: Callable[..., torch.optim.Optimizer],
    skip: int,
    value: float,
    unscale_first: bool,
) -> tuple[nn.Module, GradScaler]:
    model = mlp(4, 8, 2)
    optimizer = make_optimizer(model.parameters())
    scaler = GradScaler(init_scale=SCALE, growth_interval=2)
    for i, batch in enumerate(make_batches()):
        optimizer.zero_grad()
        scaler.scale(mse(model, batch)).backward()
        if i == skip:
            break_gradient(model, value)
        if unscale_first:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return model, scaler


def maker(cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], impl: str | None = None):
    if impl:
        kwargs = kwargs | {impl: True}
    return lambda params: cls(params, **kwargs)


@pytest.mark.parametrize(("cls", "kwargs", "impl"), ATOM)
@pytest.mark.parametrize(("unscale_first", "value"), [(False, -math.inf), (True, math.nan)])
def test_optimizers_against_float32(cls, kwargs, impl, unscale_first, value):
    make = maker(cls, kwargs, impl)
    model, scaler = train_scaled(make, 3, value, unscale_first)
    assert_same_weights(model, train_plainly(make, 3))
    # Six iterations with interval 2: grow, -, back off, -, grow.
    assert scaler.get_scale() == SCALE * 2 * 0.5 * 2


SGD = maker(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


def trained(scaler: Any, optimizer: Any, losses: Iterable[torch.Tensor]) -> None:
    for loss in losses:
        if scaler:
            take_step(scaler, optimizer, loss)
        else:
            optimizer.zero_grad()
            step_on(optimizer, loss)


def penalized(scaler: Any) -> nn.Module:
    model = mlp(4, 8, 2)

    def losses() -> Iterator[torch.Tensor]:
        for batch in make_batches():
            loss = mse(model, batch)
            scaled = scaler.scale(loss) if scaler else loss
            grads = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
            inverse = 1.0 / scaler.get_scale() if scaler else 1.0
            yield loss + sum((grad * inverse).square().sum() for grad in grads).sqrt()

    trained(scaler, SGD(model.parameters()), losses())
    return model


def sparse(scaler: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Embedding(6, 3, sparse=True)
    batches = (torch.tensor([i, 1, 1, 5]) for i in range(4))
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
    trained(scaler, optimizer, (model(batch).square().sum() for batch in batches))
    return model


def complex_parameters(scaler: Any) -> nn.Module:
    torch.manual_seed(0)
    model = nn.ParameterList([torch.randn(4, dtype=torch.complex64)])
    target = torch.randn(4, dtype=torch.complex64)
    losses = ((model[0].conj() * target - 1).abs().square().sum() for _ in range(3))
    trained(scaler, torch.optim.SGD(model.parameters(), lr=0.1), losses)
    return model


@pytest.mark.parametrize("train", [penalized, sparse, complex_parameters])
def test_trains_as_without_a_scale(train: Callable[[Any], nn.Module]) -> None:
    assert_same_weights(train(None), train(GradScaler(init_scale=SCALE)))


def test_step_returns_what_the_optimizer_returned() -> None:
    class Answering(torch.optim.SGD):
        def step(self, closure: None = None, *, answer: int = 0) -> int:  # type: ignore[override]
            super().step()
            return answer

    param = nn.Parameter(torch.ones(1))
    optimizer = Answering([param], lr=0.1)
    scaler = GradScaler()
    for value, expected in [(1.0, 42), (math.inf, None), (1.0, 42)]:
        optimizer.zero_grad()
        scaler.scale((param * value).sum()).backward()
        assert scaler.step(optimizer, answer=42) == expected
        scaler.update()


def test_autocast_float16_on_the_cpu() -> None:
    model = mlp(4, 8, 2)
    optimizer = SGD(model.parameters())
    scaler = GradScaler()
    losses = []
    batch = make_batches()[0]
    for _ in range(20):
        with torch.autocast(DEVICE, torch.float16):
            loss = mse(model, batch)
        take_step(scaler, optimizer, loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2


def test_a10_gradients_that_are_all_zero_without_a_scaler() -> None:
    """A loss that is a mean over many tokens: its gradients are below the smallest float16."""
    shares = []
    for scaler in (GradScaler(enabled=False), GradScaler()):
        model = mlp(4, 8, 2)
        with autocast(DEVICE, torch.float16):
            outputs = model(torch.ones(3, 4))
        scaler.scale(outputs.float().sum() * 2.0**-26).backward()
        grads = [param.grad for param in model.parameters() if param.grad is not None]
        shares.append(sum(int(grad.eq(0).sum()) for grad in grads) / sum(g.numel() for g in grads))
    assert shares == [1.0, 0.0]
