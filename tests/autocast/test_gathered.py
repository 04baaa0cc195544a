"""Casts of gathered weights: none is saved for the backward pass, and nothing else changes.

A weight that shares its memory stands for one that fully_shard gathers; test_sharded has those.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.sharding import Alive
from tests.device import DEVICE, seeded
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from halfstep import autocast
from halfstep._autocast import casts, kernels
from halfstep._pytorch import distributed
from halfstep.errors import CallOrderError

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
X = torch.randn(4, 32, generator=seeded(1))


@pytest.fixture(autouse=True)
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be others."""
    monkeypatch.setattr(distributed, "has_process_group", lambda: True)


def weight_of(*shape: int, shared: bool = True, frozen: bool = False) -> tuple[nn.Parameter, Any]:
    """Return a weight, and what has its memory too."""
    generator = seeded(0)
    flat = torch.randn(torch.Size(shape).numel(), generator=generator)
    values = flat.view(shape)
    return nn.Parameter(values, requires_grad=not frozen), flat if shared else None


def free(flat: Tensor) -> None:
    flat.untyped_storage().resize_(0)


def gather(flat: Tensor) -> None:
    with torch.autograd._unsafe_preserve_version_counter(flat):
        values, _ = weight_of(flat.numel(), shared=False)
        flat.untyped_storage().resize_(flat.numel() * 4)
        flat.copy_(values.detach())


PRODUCTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor, Tensor], Tensor]]] = {
    "linear": ((16, 32), F.linear),
    "linear with bias": ((32, 32), lambda x, w: F.linear(x, w, w[0])),
    "matmul": ((32, 16), torch.matmul),
    "weight first": ((16, 32), lambda x, w: w @ x.T),
    "conv1d": ((8, 4, 3), lambda x, w: F.conv1d(x.view(4, 4, 8), w)),
    "einsum": ((16, 32), lambda x, w: torch.einsum("bi,oi->bo", x, w)),
    "baddbmm": ((4, 8, 8), lambda x, w: torch.bmm(x.view(4, 4, 8), w)),
    "used twice": ((32, 32), lambda x, w: F.linear(F.linear(x, w), w)),
}


def test_no_cast_of_a_factor_with_a_result_in_float32_outlives_its_op() -> None:
    def run(shared: bool) -> tuple[list[Tensor], int]:
        weight, flat = weight_of(64, 32, shared=shared)
        x, bias = X.clone().requires_grad_(), nn.Parameter(weight.detach()[:, 0].clone())
        keeping = bias.detach() if shared else None  # it is added unrounded
        with Alive() as alive, autocast(DEVICE, BF16, policy="standard; linear:fp32-out"):
            y = F.linear(x, weight, bias)
            kept = alive.bytes(BF16, 64 * 32)
        y.square().sum().backward()
        assert x.grad is not None
        assert weight.grad is not None
        assert bias.grad is not None
        del flat, keeping
        return [y.detach(), x.grad, weight.grad, bias.grad], kept

    (here, kept), (there, kept_there) = run(shared=True), run(shared=False)
    assert (kept, kept_there) == (0, 64 * 32 * 2)
    assert all(map(torch.equal, here, there))


def gradients(name: str, frozen: bool, shared: bool) -> list[Tensor | None]:
    shape, product = PRODUCTS[name]
    weight, flat = weight_of(*shape, shared=shared, frozen=frozen)
    x = X.clone().requires_grad_()
    with autocast(DEVICE, BF16):
        y = product(x, weight)
    y.float().square().sum().backward()
    assert y.dtype is BF16
    del flat
    return [y.detach(), x.grad, weight.grad]


@pytest.mark.parametrize("ours", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", PRODUCTS)
def test_results_and_gradients_are_those_of_any_weight(name: str, frozen: bool, ours: bool) -> None:
    def both() -> list[list[Tensor | None]]:
        return [gradients(name, frozen, shared) for shared in (True, False)]

    if ours:
        with kernels.only_our_kernels():
            here, there = both()
    else:
        here, there = both()
    for one, other in zip(here, there, strict=True):
        assert (one is None) == (other is None)
        assert one is None or other is None or torch.equal(one, other)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("shared", [True, False])
def test_no_cast_of_a_gathered_weight_outlives_its_op(shared: bool, frozen: bool) -> None:
    weight, flat = weight_of(64, 32, shared=shared, frozen=frozen)
    with Alive() as alive, autocast(DEVICE, BF16):
        y = F.linear(X.clone().requires_grad_(), weight)
        assert alive.bytes(BF16, 64 * 32) == (0 if shared else 64 * 32 * 2)
    y.sum().backward()
    del flat


def test_what_is_freed_and_gathered_again_is_cast_again() -> None:
    weight, flat = weight_of(16, 32)
    other, _ = weight_of(16, 32, shared=False)
    x, x_of_other = X.clone().requires_grad_(), X.clone().requires_grad_()
    with autocast(DEVICE, BF16):
        y, y_of_other = F.linear(x, weight), F.linear(x_of_other, other)
    free(flat)
    gather(flat)
    y.sum().backward()
    y_of_other.sum().backward()

    assert x.grad is not None
    assert x_of_other.grad is not None
    assert torch.equal(x.grad, x_of_other.grad)


def test_what_is_freed_and_not_gathered_again_is_told() -> None:
    weight, flat = weight_of(16, 32)
    with autocast(DEVICE, BF16):
        y = F.linear(X.clone().requires_grad_(), weight)
    free(flat)

    with pytest.raises(CallOrderError, match=r"weight \(16, 32\) that was freed after the forward"):
        y.sum().backward()


def test_a_weight_written_to_before_the_backward_pass_is_told() -> None:
    weight, flat = weight_of(16, 32)
    with autocast(DEVICE, BF16):
        y = F.linear(X.clone().requires_grad_(), weight)
    with torch.no_grad():
        weight.mul_(2)

    with pytest.raises(RuntimeError, match=r"weight \(16, 32\) was written to between the forward"):
        y.sum().backward()
    del flat


def test_an_input_written_to_before_the_backward_pass_is_told() -> None:
    weight, flat = weight_of(16, 32)
    x = X.to(BF16)
    with autocast(DEVICE, BF16):
        y = F.linear(x, weight)
    x.mul_(2)

    with pytest.raises(RuntimeError, match=r"a tensor \(4, 32\) of torch.bfloat16 that the"):
        y.sum().backward()
    del flat


def test_gradients_of_gradients() -> None:
    def penalty(shared: bool) -> Tensor | None:
        weight, flat = weight_of(16, 32, shared=shared)
        x = X.clone().requires_grad_()
        with autocast(DEVICE, BF16):
            y = torch.tanh(F.linear(x, weight)).sum()
        (grad,) = torch.autograd.grad(y, x, create_graph=True)
        grad.square().sum().backward()
        del flat
        return weight.grad

    one, other = penalty(shared=True), penalty(shared=False)
    assert one is not None
    assert other is not None
    assert torch.equal(one, other)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant: bool) -> None:
    weight, flat = weight_of(64, 32)
    x = X.clone().requires_grad_()
    with Alive() as alive:
        with autocast(DEVICE, BF16):
            y = checkpoint(F.linear, x, weight, use_reentrant=reentrant)
        assert alive.bytes(BF16, 64 * 32) == 0
        y.sum().backward()
    reference, _ = weight_of(64, 32, shared=False)
    with autocast(DEVICE, BF16):
        F.linear(X, reference).sum().backward()

    assert weight.grad is not None
    assert reference.grad is not None
    assert torch.equal(weight.grad, reference.grad)
    del flat


def test_hooks_of_the_user_for_what_is_saved_stay_alone() -> None:
    weight, flat = weight_of(16, 32)
    saved = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.shape)
        return tensor.detach()

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with hooks, autocast(DEVICE, BF16):
        y = F.linear(X.clone().requires_grad_(), weight)
    y.sum().backward()

    assert torch.Size((32, 16)) in saved or torch.Size((16, 32)) in saved
    del flat


@pytest.mark.parametrize("ours", [False, True])
def test_an_error_of_the_op_is_the_only_one(ours: bool) -> None:
    weight, flat = weight_of(16, 32)
    with kernels.only_our_kernels() if ours else nullcontext():
        context = autocast(DEVICE, BF16)
    with context, pytest.raises(RuntimeError) as raised:
        F.linear(X[:, :8], weight)
    assert raised.value.__context__ is None
    del flat


def weights_of_other_kinds() -> list[nn.Parameter]:
    with torch.inference_mode():
        inference = torch.eye(4)
    return [
        nn.Parameter(torch.eye(4).to_sparse()),
        nn.Parameter(inference.view(2, 2, 4)[0], requires_grad=False),
    ]


@pytest.mark.parametrize("number", range(2))
def test_weights_that_cannot_be_gathered_are_left_alone(number: int) -> None:
    weight = weights_of_other_kinds()[number]
    x = torch.ones(4, 4, requires_grad=True)

    assert not casts.is_gathered(weight)
    with autocast(DEVICE, BF16):
        # A product with a sparse matrix has no kernel in lower precision.
        assert torch.mm(weight, x).dtype is (torch.float32 if weight.is_sparse else BF16)


def test_without_ranks_casts_are_saved_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "has_process_group", lambda: False)
    weight, flat = weight_of(16, 32)
    with autocast(DEVICE, BF16):
        y = F.linear(X.clone().requires_grad_(), weight)
    free(flat)
    y.sum().backward()  # needs the weight no more
