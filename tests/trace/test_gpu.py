"""Traces on CUDA: events take the times, and autograd has a thread of its own."""

import pytest
import torch
from tests.device import no_waits
from tests.training import assert_same
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep

pytestmark = pytest.mark.gpu


def with_dropout() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(16, 16), nn.Softmax(-1), nn.Linear(16, 16), nn.Dropout(0.5))
    return nn.Sequential(*layers).cuda()


def test_modules_and_rules() -> None:
    model = with_dropout()
    x = torch.ones(8, 16, device="cuda")
    with halfstep.trace(model) as t:
        with halfstep.autocast("cuda", torch.bfloat16):
            loss = model(x).sum()
        loss.backward()
    for phase in ("forward", "backward"):
        found = {(row.module, row.rule) for row in t.ops if row.phase == phase}
        assert {("0", "linear:lower"), ("1", "softmax:fp32-dtype"), ("2", "linear:lower")} <= found
    assert {row.device for row in t.ops} == {"cuda"}


def test_no_sync_in_the_block() -> None:
    model = with_dropout()
    x = torch.ones(8, 16, device="cuda")
    with halfstep.trace(model), no_waits():
        with halfstep.autocast("cuda", torch.bfloat16):
            loss = model(x).sum()
        loss.backward()


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_in_the_thread_of_the_backward_pass(reentrant: bool) -> None:
    model = with_dropout()
    outer = nn.Sequential(nn.Linear(16, 16), model, nn.Linear(16, 16)).cuda()
    x = torch.ones(8, 16, device="cuda", requires_grad=True)
    with halfstep.trace(outer) as t:
        with halfstep.autocast("cuda", torch.bfloat16):
            hidden = checkpoint(outer[1], outer[0](x), use_reentrant=reentrant)
            loss = outer[2](hidden).sum()
        loss.backward()
    again = [row.module for row in t.ops if row.phase == "recompute" and row.op == "addmm"]
    assert again == ["1.0", "1.2"]
    products = [row.module for row in t.ops if row.phase == "backward" and row.op == "mm"]
    assert products == ["2", "2", "1.2", "1.2", "1.0", "1.0", "0", "0"]


def test_results_are_the_same_bit_for_bit() -> None:
    model = with_dropout()
    x = torch.ones(8, 16, device="cuda")

    def outputs_and_gradients() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model.zero_grad()
        with halfstep.autocast("cuda", torch.float16):
            y = model(x)
        y.float().square().sum().backward()
        grads = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return [y, *grads, torch.cuda.get_rng_state()]

    plain = outputs_and_gradients()
    with halfstep.trace(model):
        seen = outputs_and_gradients()
    assert_same(plain, seen)
