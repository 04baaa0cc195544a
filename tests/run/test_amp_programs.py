"""What programs do in their models and loops, under ``--amp``: numbers, hooks, methods."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep._tools.run.amp import mixed_precision

FP16, BF16 = torch.float16, torch.bfloat16


class Net(nn.Module):
    """A model with a step in its ``forward`` after a product."""

    def __init__(self, step: Callable[[Tensor], Any] = lambda h: h) -> None:
        super().__init__()
        self.linear, self.step = nn.Linear(4, 4), step

    def forward(self, x: Tensor) -> Any:
        return self.step(self.linear(x))


MASK = torch.tensor([True, False, True, False])
INDEX = torch.tensor([[0, 2]])
# Steps with a number that float16 cannot hold, or bfloat16.
OUT_OF_PLACE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill": lambda h, v: h.masked_fill(MASK, -v),
    "masked_fill with a tensor": lambda h, v: h.masked_fill(MASK, torch.tensor(-v)),
    "fill": lambda h, v: torch.fill(h, v),
    "pad": lambda h, v: F.pad(h, (1, 1), value=v),
    "clamp": lambda h, v: h.clamp(min=-v, max=v),
    "clip": lambda h, v: h.clip(-v),
    "hardtanh": lambda h, v: F.hardtanh(h, -v, v),
    "index_fill": lambda h, v: h.index_fill(1, INDEX[0], v),
    "scatter": lambda h, v: h.scatter(1, INDEX, -v),
    "threshold": lambda h, v: F.threshold(h, 0.0, -v),
    "full_like": lambda h, v: torch.full_like(h, -v),
    "new_full": lambda h, v: h.new_full((2,), v),
}
IN_PLACE: dict[str, Callable[[Tensor, float], Tensor]] = {
    "masked_fill_": lambda h, v: h.masked_fill_(MASK, -v),
    "masked_fill_ with a tensor": lambda h, v: h.masked_fill_(MASK, torch.tensor(-v)),
    "fill_": lambda h, v: h.fill_(v),
    "clamp_": lambda h, v: h.clamp_(-v, v),
    "index_fill_": lambda h, v: h.index_fill_(1, INDEX[0], v),
    "scatter_": lambda h, v: h.scatter_(1, INDEX, -v),
    "threshold_": lambda h, v: F.threshold_(h, 0.0, -v),
    "a named dtype": lambda h, v: torch.full_like(h, -v, dtype=h.dtype),
}
BEYOND = {FP16: 1e10, BF16: torch.finfo(torch.float32).max}


@pytest.mark.parametrize("dtype", BEYOND)
@pytest.mark.parametrize("name", [*OUT_OF_PLACE, *IN_PLACE])
def test_numbers_that_16_bits_cannot_hold(name, dtype):
    step, number = {**OUT_OF_PLACE, **IN_PLACE}[name], BEYOND[dtype]
    seen: list[Tensor] = []
    net = Net(lambda h: seen.append(step(h.detach().clone(), number)))
    with mixed_precision(dtype, print):
        net(torch.ones(1, 4))
    with torch.autocast("cpu", dtype):
        h = net.linear(torch.ones(1, 4)).detach()
    end = torch.finfo(dtype).max
    expected = step(h.float(), number) if name in OUT_OF_PLACE else step(h.clone(), end)
    assert seen[0].dtype is expected.dtype
    torch.testing.assert_close(seen[0], expected)
    with pytest.raises(RuntimeError, match="without overflow"):  # outside, nothing is changed
        step(h.clone(), number)


def test_numbers_that_fit_change_no_dtype():
    seen: list[torch.dtype] = []
    net = Net(lambda h: seen.append(h.masked_fill(MASK, float("-inf")).clamp(-6e4).dtype))
    with mixed_precision(FP16, print):
        net(torch.ones(1, 4))
    assert seen == [FP16]
