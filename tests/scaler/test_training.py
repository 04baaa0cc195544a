"""GradScaler in training loops, against the same loop in float32 without a scale."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device import DEVICE, seeded
from tests.training import assert_same, mlp
from torch.nn.utils import clip_grad_norm_

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


def mse(model: torch.nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    return torch.nn.functional.mse_loss(model(batch[0]), batch[1])


def break_gradient(model: torch.nn.Module, value: float = math.inf) -> None:
    grad = next(model.parameters()).grad
    assert grad is not None
    grad[1, 2] = value


def assert_same_weights(model: torch.nn.Module, other: torch.nn.Module) -> None:
    assert_same(model.parameters(), other.parameters())
    assert all(param.isfinite().all() for param in model.parameters())


def train_plainly(
    make_optimizer: Callable[..., torch.optim.Optimizer],
    *,
    skip: int | None = None,
    max_norm: float | None = None,
    accumulate: int = 1,
) -> torch.nn.Module:
    """The control: float32, no scale, the broken iteration left out."""
    model = mlp(4, 8, 2)
    optimizer = make_optimizer(model.parameters())
    for i, batch in enumerate(make_batches()):
        mse(model, batch).backward()
        if (i + 1) % accumulate:
            continue
        if max_norm is not None:
            clip_grad_norm_(model.parameters(), max_norm)
        if i != skip:
            optimizer.step()
        optimizer.zero_grad()
    return model


def train_scaled(
    make_optimizer: Callable[..., torch.optim.Optimizer],
    *,
    skip: int | None = None,
    value: float = math.inf,
    unscale_first: bool = False,
    max_norm: float | None = None,
    accumulate: int = 1,
) -> tuple[torch.nn.Module, GradScaler]:
    model = mlp(4, 8, 2)
    optimizer = make_optimizer(model.parameters())
    scaler = GradScaler(init_scale=SCALE, growth_interval=2)
    for i, batch in enumerate(make_batches()):
        scaler.scale(mse(model, batch)).backward()
        if i == skip:
            break_gradient(model, value)
        if (i + 1) % accumulate:
            continue
        if unscale_first:
            scaler.unscale_(optimizer)
        if max_norm is not None:
            clip_grad_norm_(
                model.parameters(), max_norm if unscale_first else max_norm * scaler.get_scale()
            )
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, scaler


def maker(cls: type[torch.optim.Optimizer], kwargs: dict[str, Any], impl: str | None = None):
    if impl:
        kwargs = kwargs | {impl: True}
    return lambda params: cls(params, **kwargs)


@pytest.mark.parametrize(("cls", "kwargs", "impl"), ATOM)
@pytest.mark.parametrize(("unscale_first", "value"), [(False, -math.inf), (True, math.nan)])
def test_optimizers_against_float32(
    cls: type[torch.optim.Optimizer],
    kwargs: dict[str, Any],
    impl: str | None,
    unscale_first: bool,
    value: float,
) -> None:
    make = maker(cls, kwargs, impl)
    model, scaler = train_scaled(make, skip=3, value=value, unscale_first=unscale_first)
    assert_same_weights(model, train_plainly(make, skip=3))
    # Six iterations with interval 2: grow, -, back off, -, grow.
    assert scaler.get_scale() == SCALE * 2 * 0.5 * 2


SGD = maker(torch.optim.SGD, {"lr": 0.1, "momentum": 0.9})


@pytest.mark.parametrize("unscale_first", [False, True])
@pytest.mark.parametrize("skip", [None, 2])
def test_clipping_with_and_without_unscale(unscale_first: bool, skip: int | None) -> None:
    model, _ = train_scaled(SGD, unscale_first=unscale_first, max_norm=0.25, skip=skip)
    control = train_plainly(SGD, max_norm=0.25, skip=skip)
    for mine, theirs in zip(model.parameters(), control.parameters(), strict=True):
        # The coefficient is max_norm / (norm + 1e-6), and 1e-6 does not scale along.
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def test_accumulation() -> None:
    model, _ = train_scaled(SGD, accumulate=2, skip=3)
    assert_same_weights(model, train_plainly(SGD, accumulate=2, skip=3))


def test_gradient_penalty() -> None:
    results = []
    for scaler in (None, GradScaler(init_scale=SCALE)):
        model = mlp(4, 8, 2)
        optimizer = SGD(model.parameters())
        for batch in make_batches():
            loss = mse(model, batch)
            scaled = scaler.scale(loss) if scaler else loss
            grads = torch.autograd.grad(scaled, list(model.parameters()), create_graph=True)
            if scaler:
                inverse = 1.0 / scaler.get_scale()
                grads = tuple(grad * inverse for grad in grads)
            loss = loss + sum(grad.square().sum() for grad in grads).sqrt()
            if scaler:
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            else:
                loss.backward()
                optimizer.step()
            optimizer.zero_grad()
        results.append(model)
    assert_same_weights(*results)


def test_two_models_optimizers_and_losses() -> None:
    """One optimizer meets an inf and skips; the other steps; the shared scale backs off once."""
    results = []
    for scaler in (None, GradScaler(init_scale=SCALE)):
        models = mlp(4, 8, 2), mlp(4, 8, 2, seed=1)
        optimizers = [
            SGD(models[0].parameters()),
            torch.optim.Adam(models[1].parameters(), lr=0.1, fused=True),
        ]
        for i, batch in enumerate(make_batches()):
            losses = [
                2 * mse(models[0], batch) + 3 * mse(models[1], batch),
                0.6 * mse(models[0], batch) - 0.9 * mse(models[1], batch),
            ]
            scaled = scaler.scale(losses) if scaler else losses
            scaled[0].backward(retain_graph=True)
            scaled[1].backward()
            if scaler and i == 2:
                break_gradient(models[0])
            for k, optimizer in enumerate(optimizers):
                if scaler:
                    scaler.step(optimizer)
                elif not (i == 2 and k == 0):
                    optimizer.step()
                optimizer.zero_grad()
            if scaler:
                scaler.update()
        results.append(models)
        if scaler:
            assert scaler.get_scale() == SCALE / 2
    assert_same_weights(results[0][0], results[1][0])
    assert_same_weights(results[0][1], results[1][1])


def test_step_returns_what_the_optimizer_returned() -> None:
    class Answering(torch.optim.SGD):
        def step(self, closure: None = None, *, answer: int = 0) -> int:  # type: ignore[override]
            super().step()
            return answer

    param = torch.nn.Parameter(torch.ones(1))
    optimizer = Answering([param], lr=0.1)
    scaler = GradScaler()
    for value, expected in [(1.0, 42), (math.inf, None), (1.0, 42)]:
        optimizer.zero_grad()
        scaler.scale((param * value).sum()).backward()
        assert scaler.step(optimizer, answer=42) == expected
        scaler.update()


def test_sparse_embedding_trains_as_in_float32() -> None:
    results = []
    for scaler in (None, GradScaler()):
        torch.manual_seed(0)
        model = torch.nn.Embedding(6, 3, sparse=True)
        optimizer = torch.optim.SparseAdam(model.parameters(), lr=0.1)
        for i in range(4):
            loss = model(torch.tensor([i, 1, 1, 5])).square().sum()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        results.append(model)
    assert_same_weights(*results)


def test_complex_parameters_train_as_without_a_scale() -> None:
    results = []
    for scaler in (None, GradScaler()):
        torch.manual_seed(0)
        param = torch.nn.Parameter(torch.randn(4, dtype=torch.complex64))
        target = torch.randn(4, dtype=torch.complex64)
        optimizer = torch.optim.SGD([param], lr=0.1)
        for _ in range(3):
            loss = (param.conj() * target - 1).abs().square().sum()
            (scaler.scale(loss) if scaler else loss).backward()
            if scaler:
                scaler.step(optimizer)
                scaler.update()
            else:
                optimizer.step()
            optimizer.zero_grad()
        results.append(param)
    assert torch.equal(*results)


def test_autocast_float16_on_the_cpu() -> None:
    model = mlp(4, 8, 2)
    optimizer = SGD(model.parameters())
    scaler = GradScaler()
    losses = []
    batch = make_batches()[0]
    for _ in range(20):
        with torch.autocast(DEVICE, torch.float16):
            loss = mse(model, batch)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
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
