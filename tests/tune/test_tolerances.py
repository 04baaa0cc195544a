import pytest
import torch

from halfstep._tune.tolerances import MOST, tolerance_for


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
