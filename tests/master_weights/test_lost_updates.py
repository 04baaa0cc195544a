"""The count of lost updates against a loop over the entries; weights to export."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.device import DEVICE
from tests.scaler.containers import KINDS, Bare
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_pre_hooks

import halfstep
from halfstep import float32_weights, lost_updates, master_weights

BF16, FP16 = torch.bfloat16, torch.float16


def mixed() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8, dtype=BF16), nn.LayerNorm(8), nn.Linear(8, 8, dtype=FP16))


def give_gradients(model: nn.Module, seed: int) -> None:
    torch.manual_seed(seed)
    for param in model.parameters():
        grad = torch.randn(param.shape) * (torch.rand(param.shape) < 0.7)
        param.grad = grad.to(param.grad_dtype)


def counted(before: Tensor, after: Tensor, grad: Tensor) -> tuple[int, int]:
    """Return updates lost and updates: the slow reference."""
    lost = updates = 0
    for was, now, slope in zip(*(t.flatten().tolist() for t in (before, after, grad)), strict=True):
        updates += slope != 0 and math.isfinite(now)
        lost += slope != 0 and was == now
    return lost, updates


@pytest.mark.parametrize("rate", [1e-5, 1e-3, 1e-1])
def test_against_a_loop(rate: float) -> None:
    model = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    sums: dict[str, list[int]] = {name: [0, 0] for name, _ in model.named_parameters()}
    model[0].weight.data[0] = math.nan  # counts neither as moved nor as lost
    with lost_updates(optimizer, model) as lost:
        for seed in range(3):
            give_gradients(model, seed)
            before = {name: param.detach().clone() for name, param in model.named_parameters()}
            optimizer.step()
            for name, param in model.named_parameters():
                assert param.grad is not None
                for index, count in enumerate(counted(before[name], param.detach(), param.grad)):
                    sums[name][index] += count
    assert lost.shares == {name: few / all for name, (few, all) in sums.items()}
    lost_in_all, updates = (sum(counts) for counts in zip(*sums.values(), strict=True))
    assert lost.share == lost_in_all / updates
    dtypes = "bfloat16, float16, float32"
    assert f"{lost.share:.1%} of the updates were lost to rounding in {dtypes}" in str(lost)


@pytest.mark.parametrize("store", ["split", "float32"])
def test_master_weights_lose_next_to_none(store: Any) -> None:
    model = nn.Linear(64, 64, dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    give_gradients(model, 0)
    with lost_updates(optimizer, model) as plain:
        optimizer.step()
    master_weights(optimizer, store)
    optimizer.step()
    with lost_updates(optimizer, model) as kept:
        optimizer.step()
    assert plain.share > 0.9
    assert kept.share < 1e-3
    assert model.weight.dtype is BF16


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_loses_nothing(fused: bool) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    scaler = halfstep.GradScaler(DEVICE)
    with lost_updates(optimizer) as lost:
        scaler.scale(model(torch.full((1, 4), math.inf)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert math.isnan(lost.share)
    assert str(lost).startswith("no updates were seen: optimizer.step() belongs in the block. ")
    assert not _global_optimizer_pre_hooks


@pytest.mark.parametrize("rate", [np.float64(0.1), np.float32(0.1)])
def test_a_rate_of_numpy_counts(rate: Any) -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["lr"] = rate  # as schedules write it that are computed with NumPy
    model(torch.ones(1, 4)).sum().backward()
    with lost_updates(optimizer) as lost:
        optimizer.step()
    assert lost.share == 0.0


def test_a_closure_counts_by_its_own_gradients() -> None:
    model = nn.Embedding(20, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure(row: int) -> Tensor:
        optimizer.zero_grad()
        loss = model(torch.tensor([row])).square().sum()
        loss.backward()
        return loss

    with lost_updates(optimizer) as lost:
        for row in range(3):
            optimizer.step(partial(closure, row))
    assert lost.share == 0.0


def test_the_outermost_step_of_an_optimizer_counts() -> None:
    class Decaying(torch.optim.SGD):
        raises = False

        def step(self, closure: Any = None) -> None:
            self.param_groups[0]["params"][0].data.mul_(0.5)
            super().step(closure)
            if self.raises:
                raise ArithmeticError

    model = nn.Linear(2, 2, bias=False)
    torch.optim.SGD(model.parameters())  # from now on its step has hooks
    optimizer = Decaying(model.parameters(), lr=1e-30)
    with lost_updates(optimizer, model) as lost:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.raises = True
        with pytest.raises(ArithmeticError):
            optimizer.step()
        assert lost.shares == {}
        optimizer.raises = False
        optimizer.step()
    assert lost.shares == {"weight": 0.0}


class Around(torch.optim.Optimizer):
    """Wraps an optimizer, as accelerate does; some call the constructor, and have hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer, has_hooks: bool) -> None:
        if has_hooks:
            super().__init__(optimizer.param_groups, {})
        self.optimizer, self.param_groups = optimizer, optimizer.param_groups
        self.state = {"number": torch.zeros(())}  # type: ignore[dict-item]

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step()


@pytest.mark.parametrize("has_hooks", [False, True])
def test_an_optimizer_around_another_one(has_hooks: bool) -> None:
    model = nn.Linear(64, 64, dtype=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    around = Around(optimizer, has_hooks)
    give_gradients(model, 0)
    with lost_updates(around, model) as lost:
        around.step()
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # somebody else's
    assert lost._counts["weight"].tolist()[0] == model.weight.grad.count_nonzero()
    assert lost.share > 0.9
    master_weights(optimizer)
    with lost_updates(around, model) as kept:
        around.step()
    assert kept.share < 1e-3
    weights = float32_weights(model, around)
    assert torch.equal(weights["weight"], float32_weights(model, optimizer)["weight"])


@dataclass
class Unhashable(Bare):
    optimizers: list[Any]


@pytest.mark.parametrize("kind", [*KINDS, Unhashable])
def test_several_optimizers(kind: Any) -> None:
    model = nn.Sequential(*(nn.Linear(64, 64, dtype=BF16) for _ in range(2)))
    parts = [torch.optim.AdamW(each.parameters(), lr=1e-5) for each in model]
    container = kind(parts)
    give_gradients(model, 0)
    with lost_updates(container) as plain:
        container.step()
    assert len(plain.shares) == 4
    assert plain.share > 0.9
    for each in parts:
        master_weights(each)
    container.step()
    with lost_updates(container, model) as kept:
        container.step()
    assert sorted(kept.shares) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert kept.share < 1e-3
    weights = float32_weights(model, *parts)
    for name, value in float32_weights(model, container).items():
        assert torch.equal(value, weights[name])
        assert not torch.equal(value, value.bfloat16().float())


def test_only_steps_in_the_block_count() -> None:
    model = mixed()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    with lost_updates(optimizer, model) as lost:
        pass
    give_gradients(model, 0)
    optimizer.step()
    assert lost.shares == {}


@pytest.mark.parametrize("store", ["split", "float32"])
def test_weights_to_export(store: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(8, 8, dtype=BF16), nn.BatchNorm1d(8), nn.Linear(8, 8, dtype=BF16)
    )
    model[2].weight = model[0].weight
    model[2].bias.requires_grad_(False)
    by_hand = nn.Parameter(model[0].weight.detach().float())
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = master_weights(torch.optim.SGD(trained, lr=1e-4), store)
    reference = torch.optim.SGD([by_hand], lr=1e-4)
    for seed in range(4):
        give_gradients(model, seed)
        by_hand.grad = model[0].weight.grad.float()
        optimizer.step()
        reference.step()
    weights = float32_weights(model, optimizer)
    assert weights.keys() == model.state_dict().keys()
    assert {value.dtype for key, value in weights.items() if key != "1.num_batches_tracked"} == {
        torch.float32
    }
    assert weights["0.weight"] is weights["2.weight"]  # as they are saved: once
    assert torch.equal(weights["0.weight"], by_hand.detach())
    assert torch.equal(weights["2.bias"], model[2].bias.float())
    weights["0.weight"].zero_()  # a copy
    assert float32_weights(model, optimizer)["0.weight"].any()


def test_weights_of_a_dtype_that_the_store_does_not_serve() -> None:
    model = nn.Sequential(nn.Linear(2, 2, dtype=BF16), nn.Linear(2, 2, dtype=FP16))
    optimizer = master_weights(torch.optim.SGD(model[0].parameters()))
    assert {each.dtype for each in float32_weights(model, optimizer).values()} == {torch.float32}


def test_weights_of_another_model() -> None:
    """They would be rounded: a copy's, and those that load_state_dict(assign=True) put there."""
    model = nn.Linear(2, 2, dtype=BF16)
    optimizer = master_weights(torch.optim.SGD(model.parameters()))
    model.load_state_dict(model.state_dict(), assign=True)
    with pytest.raises(ValueError, match="no optimizer has a parameter of its state_dict"):
        float32_weights(model, optimizer)
    whole = float32_weights(nn.LayerNorm(2), optimizer)  # nothing of it was ever rounded
    assert whole.keys() == {"weight", "bias"}


@pytest.mark.parametrize("function", [lost_updates, float32_weights])
def test_what_is_no_optimizer_is_refused(function: Any) -> None:
    model = nn.Linear(2, 2, dtype=BF16)
    args = (model,) if function is not lost_updates else ()
    for wrong in (None, model, [torch.optim.SGD(model.parameters())]):
        with pytest.raises(
            TypeError, match=rf"{function.__name__}\({type(wrong).__name__}\): pass"
        ):
            function(*args, wrong)


def test_weights_without_masters() -> None:
    model = nn.Linear(2, 2, dtype=BF16)
    with pytest.raises(ValueError, match="no master weights"):
        float32_weights(model, torch.optim.SGD(model.parameters()))
