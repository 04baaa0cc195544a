import pytest
import torch
from torch import Tensor, nn

from halfstep._tune.rounding import rounded, rounding
from halfstep._tune.task import Task


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_a_cast_where_that_has_the_range(dtype: torch.dtype) -> None:
    values = 10 ** torch.empty(10000).uniform_(-4, 4.7) * torch.randn(10000).sign()
    assert torch.equal(rounded(values, dtype), values.to(dtype).float())


def test_beyond_the_range_digits_stay_as_many() -> None:
    values = torch.tensor([1e-20, 3e9, -1e30, 3e38, float("inf"), float("nan"), 0.0])
    found = rounded(values, torch.float16)
    torch.testing.assert_close(found, values, rtol=2.0**-11, atol=0, equal_nan=True)
    assert found[1] != values[1]


class Nested(nn.Module):
    def forward(self, x: Tensor) -> object:
        return x, [x, {"x": x}], x.long()


def test_outputs_of_the_innermost_modules_are_rounded_and_gradients_are_not() -> None:
    model, x = nn.Sequential(nn.Identity(), Nested()), torch.rand(64, requires_grad=True)
    with rounding(Task(model), torch.bfloat16):
        first, (second, third), whole = model(x)
    for each in (first, second, third["x"]):
        assert torch.equal(each, x.bfloat16().float())
    assert whole.dtype is torch.int64
    (first * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert model(x)[0] is not first
    assert torch.equal(model(x)[0], x)
