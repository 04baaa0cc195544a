"""Inside torch.func ops compute as PyTorch computes them: every net beside torch.autocast."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn
from torch.func import functional_call, functionalize, grad, jacrev, jvp, stack_module_state, vmap
from torch.utils._pytree import tree_leaves, tree_map

from halfstep._autocast import autocast

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2e-2, FP16: 3e-3, FP32: 1e-5}
Function = Callable[[Tensor], Tensor]

torch.manual_seed(0)
SAMPLES = torch.randn(5, 2, 4)
LINEAR = nn.Linear(4, 3)


def assert_close(result: Tensor, expected: Tensor, lower: torch.dtype) -> None:
    assert result.dtype is expected.dtype
    largest = expected.abs().max().item()
    assert torch.allclose(
        result.float(), expected.float(), rtol=0, atol=ROUNDING[lower] * max(largest, 1e-3)
    )


# --- nets -----------------------------------------------------------------------------------------


def convolutional(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 8, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(32, 3))


IMAGES, ROWS = torch.randn(6, 2, 4, 4), torch.randn(6, 4)
NETS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "batch norm": (lambda: convolutional(nn.BatchNorm2d(8)), IMAGES),
    "batch norm, evaluated": (lambda: convolutional(nn.BatchNorm2d(8)).eval(), IMAGES),
    "batch norm without statistics": (
        lambda: nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8, track_running_stats=False), nn.Linear(8, 3)
        ),
        ROWS,
    ),
    "instance norm": (lambda: convolutional(nn.InstanceNorm2d(8, affine=True)), IMAGES),
    "group norm": (lambda: convolutional(nn.GroupNorm(2, 8)), IMAGES),
    "layer norm": (
        lambda: nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 3)),
        ROWS,
    ),
    "attention": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        torch.randn(3, 5, 8),
    ),
}


def uses(make: Callable[[], nn.Module], x: Tensor) -> Iterator[Callable[[], Any]]:
    """Yield an ensemble, its gradients, those of each sample, and those of one model."""
    torch.manual_seed(0)
    models = [make() for _ in range(3)]
    params, buffers = stack_module_state(models)  # type: ignore[arg-type]

    def call(params: Any, buffers: Any, x: Tensor) -> Tensor:
        result: Tensor = functional_call(models[0], (params, tree_map(torch.clone, buffers)), (x,))
        return result

    def loss(params: Any, buffers: Any, x: Tensor) -> Tensor:
        return call(params, buffers, x).float().square().mean()

    one = {name: param.detach() for name, param in models[0].named_parameters()}
    of_one = dict(models[0].named_buffers())
    yield lambda: vmap(call, (0, 0, None))(params, buffers, x)
    yield lambda: vmap(grad(loss), (0, 0, None))(params, buffers, x)
    if not (models[0].training and of_one):  # no sample has statistics of its own
        yield lambda: vmap(grad(loss), (None, None, 0))(one, of_one, x[:, None])
    yield lambda: grad(loss)(one, of_one, x)
    yield lambda: jacrev(loss)(one, of_one, x)


def result_of(use: Callable[[], Any]) -> list[Tensor] | str:
    try:
        return tree_leaves(use())
    except (RuntimeError, ValueError) as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:Mismatch dtype", "ignore:There is a performance drop")
@pytest.mark.parametrize("lower", [BF16, FP16])
@pytest.mark.parametrize("net", NETS)
def test_a_net_works_as_under_torch_autocast(net: str, lower: torch.dtype) -> None:
    """With the policy "torch" bit for bit; with "standard" wherever it works there."""
    for use in uses(*NETS[net]):
        with torch.autocast(DEVICE, lower):
            theirs = result_of(use)
        with autocast(DEVICE, lower, policy="torch"):
            same = result_of(use)
        with autocast(DEVICE, lower):
            ours = result_of(use)
        if isinstance(theirs, str):
            assert same == theirs
            continue
        assert not isinstance(same, str), same
        assert not isinstance(ours, str), ours
        for mine, as_torch, plain in zip(ours, same, theirs, strict=True):
            assert torch.equal(as_torch, plain)
            assert mine.isfinite().all()
            assert mine.dtype is plain.dtype


@pytest.mark.parametrize("net", [name for name in NETS if name.startswith("batch")])
def test_a_rule_cures_gradients_of_an_ensemble_with_batch_norm(net: str) -> None:
    """PyTorch's batched form of a batch norm takes no input in lower precision."""
    _, of_ensemble, *_ = uses(*NETS[net])
    with torch.autocast(DEVICE, BF16):
        assert "expected scalar type" in result_of(of_ensemble)
    exact = of_ensemble()
    with autocast(DEVICE, BF16, policy="standard; batch_norm:fp32"):
        found = of_ensemble()
    for name in ("0.weight", "0.bias") if "evaluated" in net else ("0.weight",):
        assert (found[name] - exact[name]).norm() < 0.05 * exact[name].norm()


# --- gradients ------------------------------------------------------------------------------------

MODEL = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3))
PARAMETERS = {name: p.detach() for name, p in MODEL.named_parameters()}
INPUTS, TARGETS = torch.randn(6, 4), torch.randint(3, (6,))


def loss(parameters: dict[str, Tensor], x: Tensor, target: Tensor) -> Tensor:
    with autocast(DEVICE, BF16):
        y = functional_call(MODEL, parameters, (x[None],))
        return F.cross_entropy(y, target[None])


def gradients_of(sample: int) -> dict[str, Tensor]:
    """Return the gradients of one sample, without torch.func."""
    with autocast(DEVICE, BF16):
        y = MODEL(INPUTS[sample, None])
        of_sample = F.cross_entropy(y, TARGETS[sample, None])
    return dict(
        zip(PARAMETERS, torch.autograd.grad(of_sample, list(MODEL.parameters())), strict=True)
    )


def assert_gradients(result: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    for name, parameter in PARAMETERS.items():
        assert result[name].dtype is parameter.dtype
        assert_close(result[name], expected[name], BF16)


@pytest.mark.parametrize("around", [False, True], ids=["inside", "around"])
def test_gradients_of_each_sample(around: bool) -> None:
    each = [gradients_of(sample) for sample in range(6)]
    expected = {name: torch.stack([g[name] for g in each]) for name in PARAMETERS}
    with autocast(DEVICE, BF16, enabled=around):
        result = vmap(grad(loss), (None, 0, 0))(PARAMETERS, INPUTS, TARGETS)
    assert_gradients(result, expected)


def test_the_gradient_of_a_vmap() -> None:
    def total(parameters: dict[str, Tensor]) -> Tensor:
        return vmap(loss, (None, 0, 0))(parameters, INPUTS, TARGETS).sum()

    each = [gradients_of(sample) for sample in range(6)]
    expected = {name: torch.stack([g[name] for g in each]).sum(0) for name in PARAMETERS}
    assert_gradients(grad(total)(PARAMETERS), expected)

    leaves = {name: p.clone().requires_grad_() for name, p in PARAMETERS.items()}
    total(leaves).backward()
    assert_gradients({name: leaf.grad for name, leaf in leaves.items()}, expected)


def test_the_gradient_alone() -> None:
    assert_gradients(grad(loss)(PARAMETERS, INPUTS[0], TARGETS[0]), gradients_of(0))


@pytest.mark.filterwarnings("ignore:`torch.jit.script`")  # torch.func.jvp imports it
def test_directional_derivatives() -> None:
    with autocast(DEVICE, BF16):
        y, tangent = jvp(LINEAR, (SAMPLES[0],), (SAMPLES[1],))
    assert y.dtype is BF16
    assert_close(tangent, (SAMPLES[1] @ LINEAR.weight.T).to(BF16), BF16)


# --- caches, numbers ------------------------------------------------------------------------------


def twice_differentiated(function: Function) -> Function:
    return grad(lambda x: grad(lambda y: function(y).square())(x).sum())


@pytest.mark.parametrize("before", [functionalize, twice_differentiated])
def test_no_cast_outlives_its_transform(before: Callable[[Function], Function]) -> None:
    def square(weight: Tensor) -> Tensor:
        return F.linear(SAMPLES[0], weight).float().square().sum()

    with autocast(DEVICE, BF16):
        expected = grad(square)(LINEAR.weight)
        before(lambda x: F.linear(x, LINEAR.weight).sum())(SAMPLES[0, 0])
        assert torch.equal(grad(square)(LINEAR.weight), expected)
        y = vmap(LINEAR)(SAMPLES)
        assert torch.autograd.grad(y.sum(), LINEAR.weight)[0].dtype is FP32
    assert torch.is_autocast_cache_enabled()


@pytest.mark.parametrize("inside", [True, False])
def test_numbers_where_ops_take_tensors(inside: bool) -> None:
    """PyTorch gives them to kernels in a form that none can pass on."""
    context = autocast(DEVICE, BF16, policy="standard; mul,add,div,sub:fp32")
    x = torch.rand(3)

    def f(a: Tensor) -> Tensor:
        return 1 / (a * 2 + 1 - 3)

    with context if inside else contextlib.nullcontext():
        assert torch.equal(torch.vmap(f)(x), f(x))
    gradient = torch.func.grad(lambda a: f(a).sum())(x)  # inside: see docs/coming_from.md
    torch.testing.assert_close(gradient, -2 * f(x) ** 2)


def test_a_rule_for_an_op_that_takes_numbers_holds_under_vmap() -> None:
    x = torch.rand(3, dtype=BF16)
    with autocast(DEVICE, BF16, policy="standard; mul:fp32"):
        assert torch.vmap(lambda a: a * a)(x).dtype == FP32
