"""Diagnoses on CUDA, where autograd runs the backward pass in a thread of its own."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import halfstep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Module):
    def __init__(self, forward_by: float = 1.0, backward_by: float = 1.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(16, 32), nn.Linear(32, 4)
        self.drop = nn.Dropout(0.5)
        self.forward_by, self.backward_by = forward_by, backward_by

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.first(x)) * self.forward_by
        if self.backward_by != 1:
            hidden = hidden / self.backward_by * self.backward_by
        out: Tensor = self.last(hidden)
        return out


class Training:
    def __init__(self, model: nn.Module, scale: float = 256.0, fused: bool = False) -> None:
        self.model = model.cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=fused)
        self.scaler = halfstep.GradScaler(init_scale=scale)
        self.x, self.y = torch.randn(8, 16, device="cuda"), torch.arange(8, device="cuda") % 4

    def step(self) -> None:
        self.optimizer.zero_grad()
        with halfstep.autocast("cuda", torch.float16):
            loss = F.cross_entropy(self.model(self.x), self.y)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def test_an_overflow_in_the_forward_pass_and_nothing_changes() -> None:
    training = Training(Net(forward_by=1e6))
    tensors = [*training.model.parameters(), torch.cuda.get_rng_state(), torch.get_rng_state()]
    before = [tensor.detach().clone() for tensor in tensors]
    found = halfstep.diagnose(training.step, model=training.model)
    assert (found.verdict, found.bad.op, found.bad.phase) == ("range", "mul", "forward")
    assert "self.forward_by" in found.bad.line.text
    assert found.cure.is_finite
    after = [*training.model.parameters(), torch.cuda.get_rng_state(), torch.get_rng_state()]
    assert all(map(torch.equal, before, after))
    assert all(param.grad is None for param in training.model.parameters())


def test_a_gradient_that_overflows_has_the_module_and_the_line_of_its_op() -> None:
    found = halfstep.diagnose(Training(Net(), scale=2.0**30).step)
    assert (found.verdict, found.bad.phase) == ("scale", "backward")
    assert found.cure.is_finite
    assert found.cure.scale is not None
    assert found.cure.scale < 2.0**30


@pytest.mark.parametrize("fused", [False, True])
def test_a_loop_that_is_watched(fused: bool) -> None:
    training = Training(Net(), fused=fused)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with halfstep.diagnose(
            training.scaler, model=training.model, tell=lambda *_: None
        ) as watch:
            training.step()
            training.model.forward_by = 1e6
            training.step()
    assert [found.verdict for found in watch.found] == ["range"]
