"""The table of devices on a CUDA device: run by `make gpu`."""

from __future__ import annotations

import math

import pytest
import torch

from halfstep._pytorch import amp, devices

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda", 0)
BF16 = torch.bfloat16
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).mul(100).to(dtype) for shape in ((), (3,), (0,), (4, 5))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [None, math.inf, math.nan])
def test_both_ways_to_check_and_multiply_are_right(dtype, bad) -> None:
    wanted = gradients(dtype)
    if bad is not None:
        wanted[3][1, 2] = bad
    ours, kernels = ([each.to(CUDA) for each in wanted] for _ in range(2))
    factor, found = torch.tensor(1 / 3, device=CUDA), torch.zeros(3)
    amp.check_and_unscale_(wanted, found[0], torch.tensor(1 / 3))
    flag = torch.zeros((), device=CUDA)
    amp.check_each_(ours, flag)
    amp.multiply_each_(ours, factor)
    assert flag.item() == found[0].item()
    for one, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)
    if dtype in devices.facts("cuda").unscales:
        amp.check_and_unscale_(kernels, flag.zero_(), factor)
        assert flag.item() == found[0].item()
        for one, other in zip(kernels, wanted, strict=True):
            torch.testing.assert_close(one.cpu(), other, rtol=0, atol=0, equal_nan=True)


@pytest.mark.xfail(
    raises=NotImplementedError, strict=False, reason="pytorch#127176; if it passes, limit the entry"
)
def test_the_kernel_knows_bfloat16() -> None:
    grads = [torch.ones(2, dtype=torch.bfloat16, device=CUDA)]
    flag, factor = torch.zeros((), device=CUDA), torch.ones((), device=CUDA)
    amp.check_and_unscale_(grads, flag, factor)
    assert flag.item() == 0.0


def test_which_kernels_add_in_float32() -> None:
    ones, rows = (torch.ones(4096, 8, dtype=dtype, device=CUDA) for dtype in (BF16, torch.long))
    x = torch.zeros(3, 8, dtype=BF16, device=CUDA)
    table = torch.zeros(3, 8, dtype=BF16, device=CUDA, requires_grad=True)
    torch.nn.functional.embedding(rows[:, 0], table).backward(ones)
    assert table.grad.max() == 4096
    assert x.index_put((rows[:, 0],), ones, accumulate=True).max() == 4096
    for rounded in (x.index_add(0, rows[:, 0], ones), x.scatter_add(0, rows, ones)):
        assert rounded.max() == 256


def test_other_answers_hold() -> None:
    assert devices.has_float64(CUDA)
    assert devices.can_move_scale(CUDA)
    found = devices.to_host(torch.tensor([1.0, 2.0], device=CUDA))
    assert found.values.is_pinned()
    assert found.wait().tolist() == [1.0, 2.0]
    assert found.has_arrived()
    assert devices.to_device(torch.tensor(3.0), CUDA).item() == 3.0
