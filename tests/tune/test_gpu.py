"""Self-checks and tuning on CUDA."""

import pytest
import torch
from tests.tune.models import Cancels, Flushes, Overflows, with_inner
from torch import nn

from halfstep import self_check, tune

pytestmark = pytest.mark.gpu


def test_on_cuda() -> None:
    torch.manual_seed(0)
    model = with_inner(Overflows, nn.Linear, Cancels, Flushes).cuda()
    batch = torch.randn(32, 8, device="cuda")
    before = [torch.cuda.get_rng_state(), *[each.clone() for each in model.parameters()]]
    assert self_check(model, batch).origins == ("1.inner",)
    tuned = tune(model, [batch], None)
    assert tuned.islands == ("1.inner", "3.inner", "4.inner")
    assert torch.cuda.get_device_name() in str(tuned.machine)
    assert all(map(torch.equal, before, [torch.cuda.get_rng_state(), *model.parameters()]))
