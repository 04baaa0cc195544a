"""A policy inside torch.func: every result beside that of a loop over the samples."""

import contextlib
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import forked
from tests.device import DEVICE
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vmap,
)
from torch.utils._pytree import tree_map

from halfstep._autocast import autocast
from halfstep._autocast.kernels import only_our_kernels

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2e-2, FP16: 3e-3, FP32: 1e-5}
Function = Callable[[Tensor], Tensor]

torch.manual_seed(0)
SAMPLES = torch.randn(5, 2, 4)
LINEAR = nn.Linear(4, 3)
CONV = nn.Conv1d(2, 3, 1)
CLASSES = torch.tensor([0, 2])


def loop(function: Callable[..., Any], samples: Tensor) -> Any:
    """Do what vmap does, slowly."""
    return tree_map(lambda *results: torch.stack(results), *map(function, samples))


def assert_close(result: Tensor, expected: Tensor, lower: torch.dtype) -> None:
    assert result.dtype is expected.dtype
    largest = expected.abs().max().item()
    assert torch.allclose(
        result.float(), expected.float(), rtol=0, atol=ROUNDING[lower] * max(largest, 1e-3)
    )


def island(x: Tensor) -> Tensor:
    with autocast(DEVICE, enabled=False):
        return LINEAR(x)


def write_by_index(x: Tensor) -> Tensor:
    written = torch.zeros_like(x)
    return written.index_put_((torch.tensor([1, 0]),), x.bfloat16())


# (the policy, the function, the dtype of its result; None is the lower precision)
CASES: dict[str, tuple[str, Function, torch.dtype | None]] = {
    "linear": ("standard", LINEAR, None),
    "conv1d": ("standard", CONV, None),
    "linear, as PyTorch has it": ("torch", LINEAR, None),
    "linear in fp32": ("standard; linear:fp32", lambda x: LINEAR(x.half()), FP32),
    "linear left alone, its mm not": ("standard; linear:leave", LINEAR, None),
    "mm": ("standard", lambda x: x.mm(x.mT), None),
    "mm left alone": ("standard; mm:leave", lambda x: x.mm(x.mT), FP32),
    "attention": ("standard", lambda x: F.scaled_dot_product_attention(x, x, x), None),
    "exp": ("standard", lambda x: x.half().exp(), FP32),
    "layer_norm": ("standard", lambda x: F.layer_norm(x.half(), (4,)), FP32),
    "cdist, made of mm": ("standard", lambda x: torch.cdist(x.half(), x.flip(0)), FP32),
    "softmax": ("standard", lambda x: x.half().softmax(-1), FP32),
    "sum": ("standard", lambda x: (x.half() * 0 + 4e4).sum(), FP32),
    "promote": ("standard", lambda x: torch.atan2(x.half(), x), FP32),
    "promote, lists": ("standard; cat:promote", lambda x: torch.cat([x.half(), x]), FP32),
    "destination": ("standard", write_by_index, FP32),
    "inside a composite": ("standard", lambda x: F.cross_entropy(x.half(), CLASSES), FP32),
    "inside a composite without a rule": (
        "standard",
        lambda x: F.nll_loss(x.half(), CLASSES, reduction="none"),
        FP32,
    ),
    "island": ("standard", island, FP32),
    "no rule": ("standard", torch.sin, FP32),
}


@pytest.mark.parametrize("lower", [BF16, FP16])
@pytest.mark.parametrize("case", CASES)
def test_vmap_is_a_loop(case: str, lower: torch.dtype) -> None:
    """Fact A15."""
    policy, function, dtype = CASES[case]
    with autocast(DEVICE, lower, policy=policy):
        result, expected = vmap(function)(SAMPLES), loop(function, SAMPLES)
    assert result.dtype is (dtype or lower)
    assert_close(result, expected, dtype or lower)


@pytest.mark.parametrize("case", ["linear", "exp", "cdist, made of mm"])
def test_vmap_in_vmap_is_a_loop_of_loops(case: str) -> None:
    _, function, _ = CASES[case]
    batches = torch.stack([SAMPLES, SAMPLES.flip(0)])
    with autocast(DEVICE, BF16):
        result = vmap(vmap(function))(batches)
        expected = loop(lambda samples: loop(function, samples), batches)
    assert_close(result, expected, result.dtype)


def test_refuse_raises() -> None:
    with (
        autocast(DEVICE, BF16, policy='standard; sin:refuse "no sine today"'),
        pytest.raises(RuntimeError, match="no sine today"),
    ):
        vmap(torch.sin)(SAMPLES)


def test_with_our_kernels_alone() -> None:
    with only_our_kernels():
        context = autocast(DEVICE, BF16)
    with context:
        assert_close(vmap(LINEAR)(SAMPLES), loop(LINEAR, SAMPLES), BF16)


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
        rows, columns = jacrev(LINEAR)(SAMPLES[0, 0]), jacfwd(LINEAR)(SAMPLES[0, 0])
    assert y.dtype is BF16
    assert_close(tangent, (SAMPLES[1] @ LINEAR.weight.T).to(BF16), BF16)
    assert_close(rows, LINEAR.weight, BF16)
    assert_close(columns, LINEAR.weight.to(BF16), BF16)


def test_what_is_float32_is_so_for_every_transform() -> None:
    """Autocast off inside an op must not be on again one transform further down."""
    x = torch.randn(30, 4) + 100  # more than 25 rows: the distances are made with a matrix product

    def distances(x: Tensor) -> Tensor:
        return torch.cdist(x, x.flip(0)).sum()

    with autocast(DEVICE, BF16):
        (expected,) = torch.autograd.grad(distances(x.requires_grad_()), x)
        assert_close(grad(distances)(x), expected, FP32)
        assert_close(vmap(distances)(x[None])[0], distances(x), FP32)


# --- ensembles, caches, compiling -----------------------------------------------------------------


@pytest.mark.parametrize("inputs", [None, 0], ids=["same inputs", "own inputs"])
def test_an_ensemble(inputs: int | None) -> None:
    models = [copy.deepcopy(MODEL) for _ in range(6)]
    for model in models:
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    parameters, buffers = stack_module_state(models)

    def call(parameters: dict[str, Tensor], buffers: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(MODEL, (parameters, buffers), (x,))

    with autocast(DEVICE, BF16):
        result = vmap(call, (0, 0, inputs))(parameters, buffers, INPUTS)
        each = (model(INPUTS if inputs is None else INPUTS[i]) for i, model in enumerate(models))
        expected = torch.stack(list(each))
    assert result.dtype is BF16
    assert_close(result, expected, BF16)


NORMS: dict[str, Callable[[], nn.Module]] = {
    "batch": lambda: nn.BatchNorm1d(3),
    "batch, without statistics": lambda: nn.BatchNorm1d(3, track_running_stats=False),
    "instance": lambda: nn.InstanceNorm1d(3, affine=True, track_running_stats=True),
    "group": lambda: nn.GroupNorm(3, 3),
    "layer": lambda: nn.LayerNorm(4),
    "rms": lambda: nn.RMSNorm(4),
}


@pytest.mark.filterwarnings("ignore:Mismatch dtype between input and weight")
@pytest.mark.parametrize(("is_training", "lower"), [(True, BF16), (False, FP16)])
@pytest.mark.parametrize("policy", ["standard", "torch", "standard; layer_norm:leave"])
@pytest.mark.parametrize("norm", NORMS)
def test_an_ensemble_with_norms(
    norm: str, policy: str, is_training: bool, lower: torch.dtype
) -> None:
    """Their inputs are in lower precision, their weights and statistics in float32."""
    torch.manual_seed(0)
    models = [
        nn.Sequential(nn.Conv1d(2, 3, 1, bias=False), NORMS[norm]()).train(is_training)
        for _ in "ab"
    ]
    for parameter in (each for model in models for each in model[1].parameters()):
        nn.init.normal_(parameter, mean=1.0)
    parameters, buffers = stack_module_state(models)

    def call(parameters: Any, buffers: Any) -> Tensor:
        return functional_call(copy.deepcopy(models[0]), (parameters, buffers), (SAMPLES,))

    def total(parameters: Any, buffers: Any) -> Tensor:
        return call(parameters, buffers).float().pow(3).sum()

    def inside(parameters: Any, buffers: Any) -> Tensor:
        with autocast(DEVICE, lower, policy=policy):
            return total(parameters, buffers)

    with autocast(DEVICE, lower, policy=policy):
        result = vmap(call)(parameters, tree_map(torch.clone, buffers))
        around = vmap(grad(total))(parameters, tree_map(torch.clone, buffers))
        jacobian = jacrev(total)(*tree_map(lambda each: each[0].clone(), (parameters, buffers)))
    inner = vmap(grad(inside))(parameters, buffers)
    for number, model in enumerate(models):
        with autocast(DEVICE, lower, policy=policy):
            expected = model(SAMPLES)
            expected.float().pow(3).sum().backward()
        assert_close(result[number], expected, lower)
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            found = [around[name][number], inner[name][number]]
            for gradient in found if number else [*found, jacobian[name]]:
                assert gradient.dtype is FP32
                assert (gradient - parameter.grad).norm() < 0.05 * parameter.grad.norm()
        for name, buffer in model.named_buffers():
            assert_close(buffers[name][number], buffer, lower)


@pytest.mark.parametrize("policy", ["standard", "torch"])
def test_a_part_in_another_dtype_is_written_into_a_copy(policy: str) -> None:
    def write(x: Tensor) -> Tensor:
        return x.bfloat16().select_scatter(x[0], 0, 1).slice_scatter(x[:1], 0, 0, 1)

    with autocast(DEVICE, BF16, policy=policy):
        assert_close(vmap(write)(SAMPLES), loop(write, SAMPLES), BF16)


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


@pytest.mark.slow
def test_compiled() -> None:
    compiled = torch.compile(vmap(LINEAR), backend="aot_eager", fullgraph=True)
    plain = vmap(LINEAR)(SAMPLES)
    with autocast(DEVICE, BF16):
        assert torch.equal(compiled(SAMPLES), vmap(LINEAR)(SAMPLES))
        assert compiled(SAMPLES).dtype is BF16
    assert torch.equal(compiled(SAMPLES), plain)


# --- PyTorch beside ours --------------------------------------------------------------------------


@pytest.mark.slow
def test_outside_nothing_changes() -> None:
    code = (
        "import torch, halfstep._autocast as h\n"
        "from torch.func import grad, vmap\n"
        "F = torch.nn.functional\n"
        "torch.manual_seed(0)\n"
        "x, w = torch.randn(5, 2, 4), torch.randn(3, 4)\n"
        "fs = [lambda x: F.linear(x, w), lambda x: x.mm(w.T), lambda x: x.half().exp(),\n"
        "      lambda x: F.conv1d(x, w[:, :2, None]), lambda x: x.half().softmax(-1),\n"
        "      lambda x: F.cross_entropy(F.linear(x, w), torch.tensor([0, 1])),\n"
        "      lambda x: torch.cdist(x, x), lambda x: F.layer_norm(x, (4,)),\n"
        "      lambda x: grad(lambda x: F.linear(x, w).float().exp().sum())(x)]\n"
        "def run():\n"
        "    results = []\n"
        "    for enabled in (False, True):\n"
        "        with torch.autocast('cpu', torch.bfloat16, enabled=enabled):\n"
        "            results += [vmap(f)(x) for f in fs] + [vmap(vmap(fs[0]))(x[None])]\n"
        "    return results\n"
        "def ours():\n"
        "    key = 'FuncTorchDynamicLayerFrontMode'\n"
        "    return torch._C._dispatch_has_kernel_for_dispatch_key('aten::exp', key)\n"
        "before, registered = run(), [ours()]\n"
        "h.autocast('cpu', enabled=False); registered.append(ours())\n"
        "with h.autocast('cpu', torch.bfloat16): vmap(fs[0])(x)\n"
        "registered.append(ours())\n"
        "same = [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before, run())]\n"
        "print(all(same), *registered)\n"
    )
    done = forked.python("-c", code, cwd=Path.cwd())
    assert done.code == 0, done.err
    assert done.out.split() == ["True", "False", "False", "True"]


@pytest.mark.parametrize("inside", [True, False])
def test_numbers_where_ops_take_tensors(inside: bool) -> None:
    """PyTorch gives them to kernels in a form that none can pass on."""
    context = autocast(DEVICE, BF16, policy="standard; mul,add,div,sub:fp32")
    x = torch.rand(3)

    def f(a: Tensor) -> Tensor:
        return 1 / (a * 2 + 1 - 3)

    with context if inside else contextlib.nullcontext():
        assert torch.equal(torch.vmap(f)(x), f(x))
    gradient = torch.func.grad(lambda a: f(a).sum())(x)  # inside: see docs/autocast_details.md
    torch.testing.assert_close(gradient, -2 * f(x) ** 2)


def test_a_rule_for_an_op_that_takes_numbers_holds_under_vmap() -> None:
    x = torch.rand(3, dtype=BF16)
    with autocast(DEVICE, BF16, policy="standard; mul:fp32"):
        assert torch.vmap(lambda a: a * a)(x).dtype == FP32
