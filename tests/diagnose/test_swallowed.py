"""Overflows of which later ops make finite numbers: the op is named; it may be the cause."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
from tests.device import DEVICE
from torch import Tensor, nn

import halfstep
from halfstep._tools.diagnose.diagnose import SWALLOWED


class HalfRMSNorm(nn.Module):
    """Computes the mean of the squares in the dtype that comes in."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.head = nn.Linear(16, 16), HalfRMSNorm(), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)))


def step_of(model: nn.Module, x: Tensor, autocast: type = halfstep.autocast) -> Callable[[], None]:
    def step() -> None:
        with autocast(DEVICE, torch.float16):
            loss = model(x).float().square().mean()
        loss.backward()

    return step


@pytest.mark.parametrize("autocast", [halfstep.autocast, torch.autocast])
@pytest.mark.parametrize("rows", [slice(None), slice(3, 4)], ids=["all rows", "one row"])
def test_a_norm_of_zeros(rows: slice, autocast: type) -> None:
    model, x = Net(), torch.randn(8, 16)
    assert halfstep.diagnose(step_of(model, x, autocast), model=model).verdict == "none"
    x[rows] *= 3000
    found = halfstep.diagnose(step_of(model, x, autocast), model=model)
    assert (found.verdict, found.ends, found.bad) == ("none", (), None)
    (note,) = found.notes
    assert re.match(r"`mul` of `norm` in the forward pass \(`.*\.py:\d+`\) overflowed", note)
    assert note.endswith(SWALLOWED)
    assert not halfstep.self_check(model, x).passed


class RootMeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def through_a_norm(x: Tensor) -> Tensor:
    y = RootMeanSquare()(x * 400).float()  # inf in the square makes a row of zeros
    return y.sum() / y.square().mean()


def ratio_to_a_sum(x: Tensor) -> Tensor:
    e = torch.exp(x.clamp(9.5, 10))
    return -torch.log(e[:, 0] / e.sum(1)).mean()  # 0 where the sum is inf


@pytest.mark.parametrize(("loss", "op"), [(through_a_norm, "pow"), (ratio_to_a_sum, "sum")])
def test_an_overflow_that_an_op_swallows_is_the_cause_of_what_goes_bad_later(loss, op):
    layer = nn.Linear(16, 16)

    def step() -> None:
        with halfstep.autocast(DEVICE, torch.float16, policy="standard; pow,exp,sum:leave"):
            loss(layer(torch.ones(4, 16))).backward()

    found = halfstep.diagnose(step)
    assert (found.verdict, found.bad.op) == ("range", op)
    assert found.cure.policy is not None
    assert found.cure.is_finite
    assert f"{op}:fp32" in found.cure.policy
    assert any(note.startswith("an op makes finite numbers of it") for note in found.notes)


def test_in_float32_a_formula_that_overflows_gets_its_stable_form() -> None:
    layer = nn.Linear(16, 16)

    def step() -> None:
        e = torch.exp(layer(torch.full((4, 16), 1.0)).abs() + 100)  # e^100 is inf in float32
        torch.log(1 / e.sum(1)).mean().backward()

    found = halfstep.diagnose(step)
    assert (found.verdict, found.bad.op) == ("maths", "exp")
    assert str(found).startswith("maths: `exp` in the forward pass is not finite\n")
    assert found.cure.is_finite
    assert "torch.logsumexp(exponent, 1)" in found.cure.text
