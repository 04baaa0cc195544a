"""Recomputation in the backward pass runs under the policy of the forward pass."""

import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from tests.training import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep._autocast import Rule, autocast, preset

BF16, FP16 = torch.bfloat16, torch.float16
LOW_SOFTMAX = preset("standard") | Rule("softmax", "lower")


def small_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(8, 8), nn.Softmax(-1), nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8)
    )


def gradients(model: nn.Module, loss: Tensor) -> list[Tensor]:
    model.zero_grad()
    loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def squares(run: Callable[[Tensor], Tensor], seed: int = 1) -> Tensor:
    torch.manual_seed(seed)
    return run(torch.randn(4, 8, requires_grad=True)).float().square().sum()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("policy", ["standard", "torch", LOW_SOFTMAX, None])
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_gradients_equal_those_without_checkpointing(reentrant, policy, dtype):
    model = small_model()
    with autocast(DEVICE, dtype, policy=policy):
        without = squares(model)
        loss = squares(lambda x: checkpoint(model, x, use_reentrant=reentrant))
    expected = gradients(model, without)
    assert_same(gradients(model, loss), expected)


def softmax_dtypes(seen: list[torch.dtype]) -> Callable[[Tensor], Tensor]:
    """Return a function that notes the dtype of its softmax: once forward, once recomputed."""

    def noting(x: Tensor) -> Tensor:
        y = F.softmax(x.to(BF16), -1)
        seen.append(y.dtype)
        return y.exp().sum()  # needs y, or x again, in the backward pass

    return noting


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("where", ["after", "inside", "inside another policy"])
def test_the_policy_is_that_of_the_forward_pass(reentrant: bool, where: str) -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    with autocast(DEVICE, BF16, policy=LOW_SOFTMAX):
        low = checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant)
        if where == "inside":
            low.backward()
    with autocast(DEVICE, BF16):
        if where == "inside another policy":
            low.backward()
    if where == "after":
        low.backward()
    assert seen == [BF16, BF16]


@pytest.mark.parametrize("reentrant", [True, False])
def test_two_policies_in_one_graph(reentrant: bool) -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    with autocast(DEVICE, BF16, policy=LOW_SOFTMAX):
        first = checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant)
        with autocast(DEVICE, BF16, policy="standard"):
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
    with autocast(DEVICE, BF16):
        F.softmax(x, -1).sum()
    with torch.autocast(DEVICE, BF16):
        loss = checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant)
    with autocast(DEVICE, BF16):
        loss.backward()
    assert seen == [BF16, BF16]  # PyTorch's list for the CPU leaves softmax alone


def in_a_thread(work: Callable[[], None]) -> None:
    errors: list[BaseException] = []

    def noting() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=noting)
    thread.start()
    thread.join()
    assert not errors, errors


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("plain", [True, False])
def test_a_backward_pass_in_another_thread(reentrant: bool, plain: bool) -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    losses: list[Tensor] = []

    def forward() -> None:
        context = (
            torch.autocast(DEVICE, BF16) if plain else autocast(DEVICE, BF16, policy=LOW_SOFTMAX)
        )
        with context:
            losses.append(checkpoint(softmax_dtypes(seen), x, use_reentrant=reentrant))

    in_a_thread(forward)
    with autocast(DEVICE, BF16):  # a policy in the thread that goes backward is not theirs
        F.linear(torch.ones(2, 2), torch.ones(2, 2, requires_grad=True))
    losses[0].backward()
    assert seen == [BF16, BF16]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_checkpoints_in_checkpoints(outer: bool, inner: bool) -> None:
    model = small_model()

    def block(x: Tensor) -> Tensor:
        result: Tensor = checkpoint(model, F.softmax(x, -1), use_reentrant=inner)
        return F.softmax(result, -1)

    with autocast(DEVICE, BF16, policy=LOW_SOFTMAX):
        without = squares(lambda x: F.softmax(model(F.softmax(x, -1)), -1))
        loss = squares(lambda x: checkpoint(block, x, use_reentrant=outer))
    expected = gradients(model, without)
    assert_same(gradients(model, loss), expected)


@pytest.mark.slow
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_compiled_function_in_a_checkpoint(reentrant: bool) -> None:
    """What is compiled while it is recomputed must not be mistaken for plain autocast's."""
    torch._dynamo.reset()
    weight = torch.randn(8, 8, requires_grad=True)

    def layer(x: Tensor) -> Tensor:
        return F.softmax(F.linear(x, weight), -1)

    compiled = torch.compile(layer, backend="aot_eager")
    x = torch.randn(4, 8, requires_grad=True)
    with autocast(DEVICE, BF16):
        expected = torch.autograd.grad(layer(x).float().square().sum(), weight)[0]
        loss = checkpoint(compiled, x, use_reentrant=reentrant).float().square().sum()
    loss.backward()
    torch.testing.assert_close(weight.grad, expected, rtol=0.02, atol=0.01)
    with torch.autocast(DEVICE, BF16):
        assert compiled(x).dtype == layer(x).dtype == BF16
    with autocast(DEVICE, BF16):
        assert compiled(x).dtype == layer(x).dtype == torch.float32


def test_a_policy_entered_in_the_backward_pass_is_the_one_that_counts() -> None:
    seen: list[torch.dtype] = []
    x = torch.randn(4, requires_grad=True)
    with autocast(DEVICE, BF16):
        y = F.softmax(x, -1)

    def hook(gradient: Tensor) -> None:
        with autocast(DEVICE, BF16, policy=LOW_SOFTMAX):
            seen.append(F.softmax(gradient, -1).dtype)

    y.register_hook(hook)
    y.sum().backward()
    assert seen == [BF16]
