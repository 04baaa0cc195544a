"""Overflows that later ops absorb: harm is told, and what does none is not."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn

import halfstep


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
    assert (found.verdict, found.ends) == ("absorbed", ())
    assert (found.bad.op, found.bad.module) == ("mul", "norm")
    assert "x * torch.rsqrt((x * x)" in found.bad.line.text
    assert found.cure.policy == "standard; mul@norm:fp32"
    assert found.cure.is_finite
    assert str(found).startswith("absorbed: `mul` of `norm` in the forward pass overflowed float16")


def test_a_half_model() -> None:
    model, x = Net().half(), torch.randn(8, 16).half() * 3000
    found = halfstep.diagnose(lambda: model(x).float().square().mean().backward(), model=model)
    assert found.verdict == "absorbed"
    assert found.cure.kind == "code"


MASK = torch.full((16, 16), -math.inf).triu(1)
LOWEST = torch.zeros(8, 16).half()
LOWEST[:, 8:] = torch.finfo(torch.float16).min

HARMLESS: dict[str, Callable[[Tensor], Tensor]] = {
    "mask": lambda x: torch.softmax(x @ x.T + MASK[:8, :8].half(), -1) @ x,
    "finfo.min": lambda x: torch.softmax(x - 20 + LOWEST, -1),
    "finfo.min twice": lambda x: torch.softmax(x + LOWEST + LOWEST, -1),
    "clamp": lambda x: (x * 1e6).clamp(-10, 10),
    "hardtanh": lambda x: F.hardtanh(x * 1e6),
    "exp of -inf": lambda x: torch.exp(-((x * 300) ** 2)),
    "kernel": lambda x: torch.exp(-((x[:, None] * 300 - x[None] * 300) ** 2)),
    "tanh": lambda x: torch.tanh(x * 1e6),
    "sigmoid": lambda x: torch.sigmoid((x.abs() + 1) * 1e6),
    "atan": lambda x: torch.atan(x * 1e6),
    "softplus": lambda x: F.softplus(-(x.abs() + 1) * 1e6),
    "log of 0": lambda x: torch.where(x > 0, x.relu().log(), 0.0),
    "isinf": lambda x: (x.detach() * 1e7).isinf().half() * x,
    "selected": lambda x: torch.where((x.detach() * 1e7).isinf(), x, x * 2),
    "minimum": lambda x: torch.minimum(x.detach().abs() * 1e7, x),
    "running minimum": lambda x: torch.minimum(torch.full_like(x, math.inf), x),
    "nan_to_num": lambda x: (x.detach() * 1e7).nan_to_num() * 0 + x,
    "amax": lambda x: x - x.masked_fill(x > 9, -math.inf).amax(-1, keepdim=True),
    "logsumexp": lambda x: torch.logsumexp(x + MASK[:8].half(), -1),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_what_does_no_harm_is_not_told(name: str) -> None:
    layer, x = nn.Linear(16, 16), torch.randn(8, 16)

    def step() -> None:
        with halfstep.autocast(DEVICE, torch.float16):
            hidden = layer(x)
            assert hidden.dtype is torch.float16
            loss = HARMLESS[name](hidden).float().sum()
        loss.backward()

    found = halfstep.diagnose(step, model=layer)
    assert found.verdict == "none", str(found)


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
