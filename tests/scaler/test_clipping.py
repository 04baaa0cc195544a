"""Clipping inside the step, against torch.nn.utils on unscaled gradients."""

import math
from typing import Any

import pytest
import torch
from tests.training import batches, mlp, one_parameter

from halfstep._scaler import GradScaler
from halfstep.errors import CallOrderError

MAKERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "fused adam": lambda p: torch.optim.Adam(p, lr=0.1, fused=True),
    "fused adamw": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "fused adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
}
SCALE = 2.0**10


def clipped(maker: Any, max_norm: float) -> tuple[torch.nn.Module, list[float], float]:
    """Returns the model, the norms, and the scale at the end; step 3 overflows."""
    model = mlp(5, 7, 1)
    optimizer = maker(model.parameters())
    scaler = GradScaler(init_scale=SCALE)
    norms = []
    for number, batch in enumerate(batches(6, 6, 5)):
        optimizer.zero_grad()
        scaler.scale(model(batch).square().mean()).backward()
        if number == 3:
            model[0].weight.grad[0, 0] = math.inf
        scaler.step(optimizer, max_norm=max_norm)
        scaler.update()
        norms.append(scaler.outcome(optimizer).norm)
    return model, norms, scaler.get_scale()


def control(maker: Any, max_norm: float) -> tuple[torch.nn.Module, list[float]]:
    model = mlp(5, 7, 1)
    optimizer = maker(model.parameters())
    norms = []
    for number, batch in enumerate(batches(6, 6, 5)):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        if number == 3:
            norms.append(math.inf)
            continue
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm).item())
        optimizer.step()
    return model, norms


@pytest.mark.parametrize("max_norm", [0.01, 0.5, 1e4, math.inf])
@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS.keys())
def test_against_torch(maker: Any, max_norm: float) -> None:
    model, norms, scale = clipped(maker, max_norm)
    expected, expected_norms = control(maker, max_norm)
    assert scale == SCALE / 2
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for mine, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-6)


def test_a_norm_whose_square_overflows_is_no_overflow() -> None:
    """Entries of 1e25: the sum of their squares is inf in float32; the step is taken."""
    for fused in (False, True):
        param, optimizer = one_parameter(torch.zeros(4), fused=fused)
        scaler = GradScaler(init_scale=4.0)
        scaler.scale(param.sum()).backward()
        param.grad.fill_(1e25)
        scaler.step(optimizer, max_norm=1.0)
        assert scaler.outcome(optimizer).taken
        torch.testing.assert_close(param, torch.full((4,), -0.5))


def test_no_gradients() -> None:
    _, optimizer = one_parameter(torch.zeros(3))
    scaler = GradScaler()
    scaler.scale(torch.ones(()))
    with pytest.raises(CallOrderError, match="none of its 1 parameter has a gradient"):
        scaler.step(optimizer, max_norm=1.0)


@pytest.mark.parametrize(
    ("max_norm", "error", "words"),
    [
        (-1.0, ValueError, "max_norm is -1.0: it must be >= 0"),
        (math.nan, ValueError, "max_norm is nan"),
        ("1", TypeError, "max_norm is '1'"),
    ],
)
def test_wrong_arguments(max_norm: Any, error: type[Exception], words: str) -> None:
    for enabled in (True, False):
        param, optimizer = one_parameter(torch.zeros(3))
        scaler = GradScaler(enabled=enabled)
        scaler.scale(param.sum()).backward()
        before = param.grad.clone()
        with pytest.raises(error, match=words):
            scaler.step(optimizer, max_norm=max_norm)
        assert torch.equal(param.grad, before)
