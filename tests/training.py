"""What tests of training share: a model, batches, an optimizer, steps, and equality bit for bit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests.device import seeded
from torch import Tensor, nn

import halfstep

fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


def mlp(*widths: int, between: type[nn.Module] = nn.Tanh, seed: int = 0) -> nn.Sequential:
    """Return linear layers of these widths, the same in each call, with an activation between."""
    torch.manual_seed(seed)
    layers = [each for sizes in pairwise(widths) for each in (nn.Linear(*sizes), between())]
    return nn.Sequential(*layers[:-1])


def batches(num: int, *shape: int) -> list[Tensor]:
    """Return random batches, the same in each call."""
    generator = seeded(1)
    return [torch.randn(shape, generator=generator) for _ in range(num)]


def labelled(num: int, size: int, width: int, classes: int) -> list[tuple[Tensor, Tensor]]:
    """Return random batches and the class of each sample, the same in each call."""
    generator = seeded(1)
    return [
        (
            torch.randn(size, width, generator=generator),
            torch.randint(classes, (size,), generator=generator),
        )
        for _ in range(num)
    ]


def one_parameter(values: Tensor, **options: Any) -> tuple[nn.Parameter, torch.optim.SGD]:
    """Return a parameter, and the optimizer that subtracts its gradient from it."""
    param = nn.Parameter(values)
    return param, torch.optim.SGD([param], lr=1.0, **options)


class Overflow(torch.autograd.Function):
    """Changes nothing in the forward pass; its gradient is inf."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return grad * math.inf


def loss_of(model: Any, x: Tensor) -> Tensor:
    """Return the mean square of what the model makes of a batch, in float32."""
    loss: Tensor = model(x).float().square().mean()
    return loss


def quiet(**options: Any) -> halfstep.GradScaler:
    """Return a scaler that says nothing of skipped steps."""
    return halfstep.GradScaler(on_skips=lambda report: None, **options)


def take_step(scaler: Any, optimizer: Any, loss: Tensor) -> None:
    """Do one iteration with a scaler."""
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()


def closure_of(scaler: Any, loss: Callable[[], Tensor]) -> Callable[[], Tensor]:
    """Return a closure that makes a loss and its scaled gradients; ``step`` drops earlier ones."""

    def closure() -> Tensor:
        made = loss()
        scaler.scale(made).backward()
        return made

    return closure


def step_on(optimizer: torch.optim.Optimizer, loss: Tensor) -> None:
    """Take a step on a loss, without a scaler; it adds to gradients that are there."""
    loss.backward()
    optimizer.step()


def train(model: Any, scaler: Any, optimizer: Any, data: Iterable[Tensor]) -> None:
    """Do an iteration for each batch."""
    for batch in data:
        take_step(scaler, optimizer, loss_of(model, batch))


def train_plainly(
    model: Any,
    optimizer: Any,
    data: Iterable[Tensor],
    *,
    max_norm: float | None = None,
    step: Callable[[], object] | None = None,
) -> None:
    """Do an iteration for each batch, without a scaler."""
    for batch in data:
        optimizer.zero_grad()
        loss_of(model, batch).backward()
        if max_norm is not None:
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        (step or optimizer.step)()


def assert_same(ours: Iterable[Tensor], theirs: Iterable[Tensor]) -> None:
    """Compare tensors one by one: their dtypes, and all values."""
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype is other.dtype
        assert torch.equal(one, other)
