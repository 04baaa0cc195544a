"""Recomputation in the backward pass runs under the policy of the forward pass."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep.casting import Policy, Rule, autocast, preset, scopes

BF16, FP16 = torch.bfloat16, torch.float16
LOW_SOFTMAX = Policy([*preset("standard").rules, Rule("softmax", "lower")])


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8)
    )


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def loss_of(run: Callable[[Tensor], Tensor], seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return run(torch.randn(4, 8, requires_grad=True)).float().square().sum()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", ["standard", "torch", LOW_SOFTMAX, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_equal_those_without_checkpointing(
    model: nn.Sequential, reentrant: bool, policy: Policy | str | None, dtype: torch.dtype
) -> None:
    with autocast("cpu", dtype, policy=policy):
        expected = gradients(model, loss_of(model))
        loss = loss_of(lambda x: checkpoint(model, x, use_reentrant=reentrant))
    for got, want in zip(gradients(model, loss), expected, strict=True):
        assert torch.equal(got, want)


def softmax_dtypes(seen: list[torch.dtype]) -> Callable[[Tensor], Tensor]:
    """Return a function that notes the dtype of its softmax: once forward, once recomputed."""

    def run(x: Tensor) -> Tensor:
        y = F.softmax(x.to(BF16), -1)
        seen.append(y.dtype)
        return y.exp().sum()  # needs y, or x again, in the backward pass

    return run


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["after", "inside", "inside another policy"])
def test_the_policy_is_that_of_the_forward_pass(reentrant: bool, where: str) -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    with autocast("cpu", BF16, policy=LOW_SOFTMAX):
        low = checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant)
        if where == "inside":
            low.backward()
    with autocast("cpu", BF16):
        if where == "inside another policy":
            low.backward()
    if where == "after":
        low.backward()
    assert seen == [BF16, BF16]


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_policies_in_one_graph(reentrant: bool) -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    with autocast("cpu", BF16, policy=LOW_SOFTMAX):
        first = checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant)
        with autocast("cpu", BF16, policy="standard"):
            second = checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant)
        third = checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant)
    forward = seen.copy()
    (first + second + third).backward()
    assert forward == [BF16, torch.float32, BF16]
    assert sorted(map(str, seen[3:])) == sorted(map(str, forward))


@pytest.mark.parametrize("reentrant", [True, False])
def test_plain_autocast_recomputes_as_it_always_did(reentrant: bool) -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    with autocast("cpu", BF16):
        F.softmax(x, -1).sum()
    with torch.autocast("cpu", BF16):
        loss = checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant)
    with autocast("cpu", BF16):
        loss.backward()
    assert seen == [BF16, BF16]  # PyTorch's list for the CPU leaves softmax alone


def test_a_backward_pass_in_another_thread_than_the_forward_pass() -> None:
    """The numbers of nodes are per thread; a thread that knows no policy invents none."""
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    with torch.autocast("cpu", BF16):
        loss = checkpoint(softmax_dtypes(seen), x, use_reentrant=False)

    def backward() -> None:
        with autocast("cpu", BF16):
            F.linear(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True))
        loss.backward()

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    assert seen[0] == BF16
    assert len(seen) == 2


def test_a_policy_entered_in_the_backward_pass_is_the_one_that_counts() -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    with autocast("cpu", BF16):
        y = F.softmax(x, -1)

    def hook(gradient: Tensor) -> None:
        with autocast("cpu", BF16, policy=LOW_SOFTMAX):
            seen.append(F.softmax(gradient, -1).dtype)

    y.register_hook(hook)
    y.sum().backward()
    assert seen == [BF16]


def test_the_history_of_policies_stays_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scopes, "_LONGEST_HISTORY", 20)
    seen: list[torch.dtype] = []
    weight = torch.ones(2, 2, requires_grad=True)
    for _ in range(200):
        with autocast("cpu", BF16, policy=LOW_SOFTMAX):
            F.linear(weight, weight)
            loss = checkpoint(
                softmax_dtypes(seen), torch.ones(2, requires_grad=True), use_reentrant=False
            )
    assert scopes._thread.history is not None
    assert len(scopes._thread.history._changes) <= 21
    loss.backward()
    assert seen[-1] == BF16  # what is recent is still known
