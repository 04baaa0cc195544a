"""Master weights on a CUDA device."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from tests.device import no_waits
from torch import nn

import halfstep
from halfstep import master_weights
from halfstep._master_weights.exchange import STORES, Split, Store, new_memory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BF16 = torch.bfloat16


def gpt_like() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 300), nn.GELU(), nn.Linear(300, 50))


@pytest.mark.parametrize("fused", [False, True])
def test_a_step_is_that_of_float32_weights(fused: bool) -> None:
    model = gpt_like().to("cuda", BF16)
    weights = [nn.Parameter(param.detach().float()) for param in model.parameters()]
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused))
    by_hand = torch.optim.AdamW(weights, lr=1e-4, fused=fused)
    for _ in range(20):
        for param, weight in zip(model.parameters(), weights, strict=True):
            param.grad = torch.randn_like(param)
            weight.grad = param.grad.float()
        optimizer.step()
        by_hand.step()
    exported = halfstep.float32_weights(model, optimizer)
    for (name, _), weight in zip(model.named_parameters(), weights, strict=True):
        assert torch.equal(exported[name], weight.detach())


@pytest.mark.parametrize("store", STORES)
def test_no_step_waits_for_the_device(store: Any) -> None:
    model = gpt_like().to("cuda", BF16)
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), fused=True), store)
    for number in range(3):
        for param in model.parameters():
            param.grad = torch.randn_like(param)
        with no_waits() if number else nullcontext():
            optimizer.step()


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_nans_of_the_device_stay(store: Store) -> None:
    """Its arithmetic makes 0x7FFFFFFF, which half a unit more would make -0."""
    weight = torch.zeros(3, device="cuda")
    weight /= weight
    param = torch.zeros(3, dtype=BF16, device="cuda")
    kept = store.empty(param)
    store.narrow_(weight, param, kept)
    assert param.isnan().all()
    assert store.widen(param, kept, new_memory).isnan().all()


def test_a_model_that_moves_takes_its_remainders_along() -> None:
    model = gpt_like().to(BF16)
    optimizer = master_weights(torch.optim.SGD(model.parameters(), lr=1e-3))
    for device in ("cpu", "cuda", "cpu"):
        model.to(device)
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        before = halfstep.float32_weights(model, optimizer)["1.weight"].cpu()
        optimizer.step()
        after = halfstep.float32_weights(model, optimizer)["1.weight"].cpu()
        assert torch.equal(after, before - 1e-3)
        assert optimizer.state[model[1].weight][Split.key].device.type == device


def test_float16_parameters_with_a_scaler() -> None:
    model = gpt_like().to("cuda", torch.float16)
    optimizer = master_weights(torch.optim.AdamW(model.parameters(), fused=True), "float32")
    scaler = halfstep.GradScaler()
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.randint(50, (8, 4), device="cuda")).float().square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer, max_norm=1.0)
        scaler.update()
    assert scaler.counts().taken > 0
    assert all(param.isfinite().all() for param in model.parameters())
