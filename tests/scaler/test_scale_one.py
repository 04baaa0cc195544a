"""The scaler as a guard: scale 1, and steps that are not finite."""

import math
from typing import Any

import pytest
import torch
from tests.training import fused_or_not, one_parameter, take_step

from halfstep._scaler import GradScaler, Static


def is_taken(scaler: GradScaler, param: Any, optimizer: Any, norm: float) -> bool:
    take_step(scaler, optimizer, (param * torch.tensor([norm, 0.0, 0.0, 0.0])).sum())
    return scaler.outcome(optimizer).taken


@fused_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_one_changes_no_gradient_and_skips_what_is_not_finite(
    fused: bool, dtype: torch.dtype
) -> None:
    param, optimizer = one_parameter(torch.zeros(4, dtype=dtype), fused=fused)
    scaler = GradScaler(init_scale=1.0, schedule=Static(), on_skips=lambda report: None)
    loss = (param * torch.tensor([1.0, 1e-30, 3e38, -2.0], dtype=dtype)).sum()
    scaled = scaler.scale(loss)
    scaled.backward()
    expected = param.grad.clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, -expected)
    before = param.detach().clone()
    for bad in (math.nan, math.inf):
        assert not is_taken(scaler, param, optimizer, bad)
    assert torch.equal(param, before)
    assert scaler.get_scale() == 1.0
