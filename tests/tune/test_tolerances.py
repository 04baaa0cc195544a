"""Tolerances of errors: depths, bounds, and the error of rounding alone."""

import pytest
import torch
from torch import Tensor, nn

from halfstep._tools.tune.module_check import (
    MOST,
    Depths,
    outputs_rounded,
    rounded_to_digits,
    tolerance_for,
)


def test_they_grow_with_the_root_of_the_depth() -> None:
    one, four = (tolerance_for(torch.float16, depth, 100).output for depth in (1, 4))
    assert one == pytest.approx(8 * 2.0**-11)
    assert four == 2 * one
    half, brain = (tolerance_for(dtype, 4, 8).output for dtype in (torch.float16, torch.bfloat16))
    assert brain == 8 * half  # three bits fewer


def test_gradients_have_gone_there_and_back() -> None:
    first, last = (tolerance_for(torch.float16, depth, 50).gradient for depth in (1, 50))
    assert first > last > tolerance_for(torch.float16, 50, 50).output


def test_they_end() -> None:
    assert tolerance_for(torch.bfloat16, 10**6, 10**6).gradient == MOST
    assert tolerance_for(torch.bfloat16, 0, 0).output > 0
    given = tolerance_for(torch.bfloat16, 10, 20, 0.003)
    assert (given.output, given.gradient) == (0.003, 0.003)


def test_the_longest_way_counts() -> None:
    x = torch.ones(2, requires_grad=True)
    short, long = x * 2, ((x * 2) * 3).exp()
    depths = Depths()
    assert [depths.of(t) for t in (x, short, long, short + long, short)] == [0, 1, 3, 4, 1]
    assert depths.of(torch.ones(2)) == 0


def test_thousands_of_ops_in_a_row() -> None:
    y = torch.ones(1, requires_grad=True)
    for _ in range(5000):
        y = y + 1
    assert Depths().of(y) == 5000


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_it_is_a_cast_where_that_has_the_range(dtype: torch.dtype) -> None:
    values = 10 ** torch.empty(10000).uniform_(-4, 4.7) * torch.randn(10000).sign()
    assert torch.equal(rounded_to_digits(values, dtype), values.to(dtype).float())


def test_beyond_the_range_digits_stay_as_many() -> None:
    values = torch.tensor([1e-20, 3e9, -1e30, 3e38, float("inf"), float("nan"), 0.0])
    found = rounded_to_digits(values, torch.float16)
    torch.testing.assert_close(found, values, rtol=2.0**-11, atol=0, equal_nan=True)
    assert found[1] != values[1]


class Nested(nn.Module):
    def forward(self, x: Tensor) -> object:
        return x, [x, {"x": x}], x.long()


def test_outputs_of_the_innermost_modules_are_rounded_and_gradients_are_not() -> None:
    model, x = nn.Sequential(nn.Identity(), Nested()), torch.rand(64, requires_grad=True)
    with outputs_rounded(model.modules(), torch.bfloat16):
        first, (second, third), whole = model(x)
    for each in (first, second, third["x"]):
        assert torch.equal(each, x.bfloat16().float())
    assert whole.dtype is torch.int64
    (first * 3).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    assert model(x)[0] is not first
    assert torch.equal(model(x)[0], x)
