"""Ops without a kernel in lower precision run in float32."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn
from torch.ao import quantization

from halfstep import trace
from halfstep._autocast import Policy, autocast
from halfstep._autocast.rule import HALVES

Call = Callable[[Tensor, Tensor], Tensor]
PRODUCTS: dict[str, Call] = {
    "torch.sparse.mm": torch.sparse.mm,
    "torch.sparse.addmm": lambda s, x: torch.sparse.addmm(torch.ones(8, 4), s, x),
    "@": lambda s, x: s @ x,
    "mm": torch.mm,
    "mv": lambda s, x: torch.mv(s, x[:, 0]),
    "addmm": lambda s, x: torch.addmm(torch.ones(8, 4), s, x),
    "linear": lambda s, x: F.linear(x.T, s),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("has", [torch.float32, *HALVES])
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_with_a_sparse_matrix(name: str, layout: torch.layout, has: torch.dtype) -> None:
    matrix = (torch.eye(8) * 2).to_sparse(layout=layout)
    x = torch.randn(8, 4).to(has)

    def gradients(run: Callable[[Tensor, Tensor], Any], *inputs: Tensor) -> tuple[Tensor, ...]:
        leaves = [each.detach().clone().requires_grad_() for each in inputs]
        result = run(*leaves)
        assert result.dtype is torch.float32
        result.square().sum().backward()
        return (result, *(leaf.grad.to_dense() for leaf in leaves if leaf.grad is not None))

    def lowered(s: Tensor, x: Tensor) -> Tensor:
        with autocast(DEVICE, torch.bfloat16 if has is torch.float32 else has):
            return PRODUCTS[name](s, x)

    found = gradients(lowered, matrix, x)
    expected = gradients(PRODUCTS[name], matrix, x.float())
    assert len(found) == len(expected) == 3
    assert found[2].dtype is has
    assert all(torch.equal(a, b.to(a.dtype)) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", ["@", "mm", "addmm", "linear"])
def test_a_sparse_product_of_the_policy_torch_is_pytorchs(name: str) -> None:
    x, matrix = torch.linspace(0, 1, 32).reshape(8, 4), (torch.eye(8) / 3).to_sparse()
    with torch.autocast(DEVICE, torch.float16):
        expected = PRODUCTS[name](matrix, x)
    with autocast(DEVICE, torch.float16, policy="torch"):
        assert torch.equal(PRODUCTS[name](matrix, x), expected)
        with trace(nn.Identity()):  # which runs halfstep's kernels
            assert torch.equal(PRODUCTS[name](matrix, x), expected)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("has", HALVES)
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_a_product_with_a_sparse_matrix_in_lower_precision(layout, has):
    """As that of edge weights that a linear layer computed; its gradient comes back to them."""
    indices, x = torch.arange(8).expand(2, 8), torch.randn(8, 4).to(has).float()

    def gradient(weights: Tensor) -> Tensor:
        matrix = torch.sparse_coo_tensor(indices, weights, (8, 8), check_invariants=True)
        matrix = matrix if layout is torch.sparse_coo else matrix.to_sparse_csr()
        (matrix @ x).sum().backward()
        assert weights.grad is not None
        return weights.grad

    with autocast(DEVICE, has):
        found = gradient(torch.ones(8, dtype=has, requires_grad=True))
    expected = gradient(torch.ones(8, requires_grad=True))
    assert torch.equal(found, expected.to(has))


@pytest.mark.parametrize("dtype", HALVES)
def test_distributions_are_drawn_as_in_float32(dtype: torch.dtype) -> None:
    def draw() -> list[Tensor]:
        torch.manual_seed(0)
        one = torch.ones(4, dtype=dtype)
        return [
            torch.distributions.Gamma(one, one).rsample(),
            torch.distributions.Beta(one, one).rsample(),
            torch.distributions.Dirichlet(one).rsample(),
            torch.binomial(one * 5, one / 2),
        ]

    with autocast(DEVICE, dtype):
        assert all(each.isfinite().all() for each in draw())


def test_rules_take_the_names_of_torch_sparse() -> None:
    policy = Policy.parse("standard; torch.sparse.mm:leave")
    assert policy.action("_sparse_mm.default", "cpu", torch.bfloat16) == "leave"


@pytest.mark.parametrize("make", [
    quantization.FusedMovingAvgObsFakeQuantize,
    quantization.default_fused_per_channel_wt_fake_quant,
    quantization.FakeQuantize,
])  # fmt: skip
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*reduce_range")
def test_quantization_aware_training(make: Callable[[], torch.nn.Module]) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 4).bfloat16()
    ours, plain = make(), make()
    given = x.clone().requires_grad_()
    with autocast(DEVICE, torch.bfloat16):
        result = ours(given)
    assert torch.allclose(result.float(), plain(x.float()), rtol=4e-3)
    for name, buffer in plain.named_buffers():
        assert torch.equal(ours.get_buffer(name), buffer), name
    result.sum().backward()
    assert given.grad is not None


def test_eigenvectors_by_iteration() -> None:
    """Python code inside PyTorch, whose products the dispatcher sees one by one: no rule names it.

    So it computes as under torch.autocast, and needs a block without autocast.
    """
    torch.manual_seed(0)
    factor, start = torch.randn(20, 20), torch.randn(20, 2)
    matrix = factor @ factor.T + 20 * torch.eye(20)

    def first() -> Tensor:
        return torch.lobpcg(matrix, k=2, X=start, niter=8)[0]

    exact = first()
    with torch.autocast(DEVICE, torch.bfloat16):
        as_pytorch = first()
    with autocast(DEVICE, torch.bfloat16, policy="torch"):
        assert torch.equal(first(), as_pytorch)
    with autocast(DEVICE, torch.bfloat16):
        assert not torch.allclose(first(), exact, rtol=1e-3)
        with autocast(DEVICE, enabled=False):
            assert torch.equal(first(), exact)


CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "rrelu": lambda x: F.rrelu(x, training=True),
    "special.i1": torch.special.i1,
    "special.i1e": torch.special.i1e,
    "_safe_softmax": lambda x: torch.ops.aten._safe_softmax(x, -1),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("name", CALLS)
def test_forward_and_backward(name: str, dtype: torch.dtype) -> None:
    # Kernels that a CPU has in some dtypes only, or in the forward pass only.
    given = torch.linspace(-2, 2, 12).view(3, 4).to(dtype)

    def result_and_gradient(x: Tensor) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        x = x.requires_grad_()
        result = CALLS[name](x)
        return result, torch.autograd.grad(result.square().sum(), x)[0]

    with autocast(DEVICE, dtype):
        found = result_and_gradient(given.clone())
    expected = result_and_gradient(given.float())
    is_random = name == "rrelu" and found[0].dtype is dtype  # bfloat16 draws other slopes
    for ours, exact in zip(found, expected, strict=True):
        assert torch.allclose(ours.float(), exact, rtol=8e-3, atol=1e-6) or is_random
