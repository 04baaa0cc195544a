"""Master weights around optimizers whose state is 8 bits wide: the memory of both, and exact."""

import io
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from tests.device import seeded
from torch import Tensor, nn

from halfstep import float32_weights, master_weights

BF16 = torch.bfloat16
BLOCK = 128
EXACT = "split", "float32"

Make = Callable[[Any], torch.optim.Optimizer]


class EightBits(torch.optim.Optimizer):
    """Momentum in int8, with a float32 scale for each block of 128 entries."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 1e-3})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state["codes"] = torch.zeros_like(param, dtype=torch.int8)
                    state["scale"] = param.new_zeros(param.numel() // BLOCK, 1)
                codes = state["codes"].view(-1, BLOCK)
                momentum = codes * state["scale"] * 0.9 + param.grad.view(-1, BLOCK)
                state["scale"].copy_(momentum.abs().amax(1, keepdim=True) / 127)
                codes.copy_((momentum / state["scale"]).round())
                param.sub_(momentum.view_as(param), alpha=group["lr"])


def of(library: str, name: str) -> Make:
    """Return a function that makes an optimizer of a library, or skips the test."""

    def make(params: Any) -> torch.optim.Optimizer:
        optim = pytest.importorskip(f"{library}.optim")
        return cast(torch.optim.Optimizer, getattr(optim, name)(params, lr=1e-3))

    return make


OF_LIBRARIES = {
    "torchao": ("AdamW8bit", "AdamW4bit", "AdamWFp8"),
    "bitsandbytes": ("AdamW8bit", "Lion8bit"),
}
MAKE: dict[str, Make] = {
    "own": EightBits,
    **{f"{name} of {lib}": of(lib, name) for lib, names in OF_LIBRARIES.items() for name in names},
}

pytestmark = [
    pytest.mark.parametrize("make", MAKE.values(), ids=MAKE),
    pytest.mark.filterwarnings("ignore"),  # of theirs
]


def net(dtype: torch.dtype) -> nn.Sequential:
    """Both libraries quantize the state of parameters with 4,096 entries and more."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 128, bias=False), nn.Linear(128, 64, bias=False)
    return nn.Sequential(*layers).to(BF16).to(dtype)


def take_steps(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> None:
    """Step with given gradients, which are the same in bfloat16 and in float32."""
    for step in range(first, last):
        for param in model.parameters():
            grad = torch.randn(param.shape, generator=seeded(step)).to(BF16)
            param.grad = grad.to(param.dtype)
        optimizer.step()


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize("store", EXACT)
def test_steps_are_those_of_float32_weights(make: Make, store: Any) -> None:
    model, wide = net(BF16), net(torch.float32)
    optimizer = master_weights(make(model.parameters()), store)
    take_steps(model, optimizer, 0, 4)
    take_steps(wide, make(wide.parameters()), 0, 4)
    assert_same(float32_weights(model, optimizer), wide.state_dict())


@pytest.mark.parametrize("store", EXACT)
def test_training_goes_on_bit_for_bit(make: Make, store: Any) -> None:
    def fresh() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(BF16)
        return model, master_weights(make(model.parameters()), store)

    file = io.BytesIO()
    model, optimizer = fresh()
    take_steps(model, optimizer, 0, 3)
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    take_steps(model, optimizer, 3, 6)
    again, resumed = fresh()
    file.seek(0)
    weights, state = torch.load(file)
    again.load_state_dict(weights)
    resumed.load_state_dict(state)
    take_steps(again, resumed, 3, 6)
    assert_same(float32_weights(model, optimizer), float32_weights(again, resumed))
