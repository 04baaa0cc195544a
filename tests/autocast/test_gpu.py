"""The same on CUDA. Run by ``make gpu``."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.autocast_test_lists import AutocastTestLists
from torch.utils.checkpoint import checkpoint

from halfstep._autocast import Policy, Rule, autocast, preset, weight_cache
from halfstep._autocast.kernels import observe_ops

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:.*deprecated")]
HALVES = [torch.float16, torch.bfloat16]
LOW_SOFTMAX = preset("standard") | Rule("softmax", "lower")


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 8), nn.Softmax(-1)
    ).cuda()


def gradients(run: nn.Module, context: object) -> list[Tensor]:
    torch.manual_seed(1)
    run.zero_grad()
    x = torch.randn(32, 64, device="cuda")
    with context:  # type: ignore[attr-defined]
        out = run(x)
    out.float().square().sum().backward()
    return [out, *(p.grad for p in run.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("policy", ["standard", "torch"])
@pytest.mark.usefixtures("both_kernels")
def test_training_equals_torch_autocast(dtype: torch.dtype, policy: str) -> None:
    context = autocast("cuda", dtype, policy=policy)
    run = make_model()
    expected = gradients(run, torch.autocast("cuda", dtype))
    for got, want in zip(gradients(run, context), expected, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("group", ["torch_fp16", "torch_fp32", "nn_fp16", "nn_fp32"])
def test_the_op_lists_with_our_kernels(dtype: torch.dtype, group: str) -> None:
    context = autocast("cuda", dtype)
    for op, args, *rest in getattr(AutocastTestLists(torch.device("cuda")), group):
        kwargs = rest[0] if rest and isinstance(rest[0], dict) else {}
        function = getattr(torch._C._nn if group.startswith("nn") else torch, op, None)
        is_wide = op in ("addr", "addbmm") or op.endswith("_cell")  # in float32 here
        if function is None or op == "einsum" or is_wide or True in rest:
            continue
        with observe_ops(lambda *_: nullcontext()), context:
            got = function(*args, **kwargs)
        with torch.autocast("cuda", dtype):
            want = function(*args, **kwargs)
        if isinstance(want, Tensor):
            assert got.dtype == want.dtype, op
            torch.testing.assert_close(got, want, msg=op)


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoint_recomputes_under_the_policy(reentrant: bool) -> None:
    """On CUDA the backward pass runs in a thread of its own."""
    seen: list[torch.dtype] = []

    def noting(x: Tensor) -> Tensor:
        y = F.softmax(x.bfloat16(), -1)
        seen.append(y.dtype)
        return y.exp().sum()

    x = torch.randn(4, device="cuda", requires_grad=True)
    with autocast("cuda", torch.bfloat16, policy=LOW_SOFTMAX):
        loss = checkpoint(noting, x, use_reentrant=reentrant)
    loss.backward()
    assert seen == [torch.bfloat16, torch.bfloat16]


@pytest.mark.parametrize("policy", ["standard", LOW_SOFTMAX])
def test_compiled(policy: Policy | str) -> None:
    run = make_model()
    expected = gradients(run, autocast("cuda", torch.bfloat16, policy=policy))
    compiled = torch.compile(run, fullgraph=True)
    for got, want in zip(
        gradients(compiled, autocast("cuda", torch.bfloat16, policy=policy)), expected, strict=True
    ):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-6, atol=2**-6)


def test_the_device_is_inferred() -> None:
    with autocast(dtype=torch.float16):
        assert (torch.ones(2, 2, device="cuda") @ torch.ones(2, 2, device="cuda")).dtype == (
            torch.float16
        )


# --- recurrent layers of cuDNN --------------------------------------------------------------------


def trained(layer: nn.RNNBase, context: object, factor: float = 1.0) -> list[Tensor]:
    layer.zero_grad()
    torch.manual_seed(1)
    x = torch.randn(5, 3, 8, device="cuda")
    with context:  # type: ignore[attr-defined]
        out = layer(x)[0]
    (out.float().sum() * factor).backward()
    return [out, *(p.grad / factor for p in layer.parameters() if p.grad is not None)]


RECURRENT = [nn.LSTM(8, 16, 2), nn.GRU(8, 16), nn.RNN(8, 16, bidirectional=True)]


@pytest.mark.parametrize("policy", ["standard", "torch"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("layer", RECURRENT)
def test_a_recurrent_layer_is_that_of_torch_autocast(layer, dtype, policy):
    if (dtype, policy) == (torch.bfloat16, "standard"):
        pytest.skip("runs in float32")
    layer.cuda()
    expected = trained(layer, torch.autocast("cuda", dtype))
    for got, want in zip(
        trained(layer, autocast("cuda", dtype, policy=policy)), expected, strict=True
    ):
        assert got.dtype == want.dtype
        torch.testing.assert_close(got, want, rtol=2**-9, atol=2**-9)


@pytest.mark.parametrize("layer", RECURRENT)
def test_a_recurrent_layer_runs_in_float32_under_bfloat16(layer: nn.RNNBase) -> None:
    """torch.autocast takes float16, in which gradients that no scaler scales are 0."""
    layer.cuda()
    theirs = trained(layer, torch.autocast("cuda", torch.bfloat16), 1e-9)
    assert theirs[0].dtype == torch.float16
    assert not any(grad.any() for grad in theirs[1:])
    out, *grads = trained(layer, autocast("cuda", torch.bfloat16), 1e-9)
    assert out.dtype == torch.float32
    torch.testing.assert_close(grads, trained(layer, nullcontext(), 1e-9)[1:])


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
def test_a_recurrent_layer_of_weights_in_bfloat16() -> None:
    layer = nn.LSTM(8, 16, 2).to("cuda", torch.bfloat16)
    x = torch.randn(5, 3, 8, device="cuda")
    with autocast("cuda", torch.bfloat16):
        out = layer(x)[0]
    torch.testing.assert_close(out, nn.LSTM.float(layer)(x)[0])


def test_the_state_of_a_recurrent_layer_counts() -> None:
    layer, x = nn.LSTM(1, 1).cuda(), torch.zeros(2500, 1, 1, device="cuda")
    for param in layer.parameters():
        nn.init.zeros_(param)
    nn.init.constant_(layer.bias_ih_l0, 50.0)  # every gate is open, and the cell adds 1 a step
    for dtype in HALVES:
        with autocast("cuda", dtype):
            assert layer(x)[1][1].item() == 2500


# --- the cache of weight casts --------------------------------------------------------------------


def product(weight: nn.Parameter) -> Tensor:
    return F.linear(torch.ones(1, weight.shape[1], device="cuda"), weight)


def kept_weight() -> nn.Parameter:
    """Return a weight whose cast is kept in the context in force."""
    weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
    for _ in range(3):
        product(weight)
    assert kept_cast(weight) is not None
    return weight


def kept_cast(weight: nn.Parameter) -> Any:
    [entry] = weight_cache.used.casts[id(weight)][1].values()
    return entry.cast


def test_a_cast_is_kept_and_a_change_is_seen() -> None:
    with autocast("cuda", torch.float16):
        weight = kept_weight()
        with torch.no_grad():
            weight.fill_(3)
        assert product(weight)[0, 0].item() == 192
        weight.grad = torch.full_like(weight, -1.0)
        torch.optim.SGD([weight], lr=1.0, fused=True).step()
        assert product(weight)[0, 0].item() == 256


def test_a_capturable_optimizer_in_a_graph() -> None:
    weight = nn.Parameter(torch.ones(64, 64, device="cuda"))
    optimizer = torch.optim.Adam([weight], lr=0.5, capturable=True)
    weight.grad = torch.ones_like(weight)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            with autocast("cuda", torch.float16):
                product(weight)
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with autocast("cuda", torch.float16):
            out = [product(weight) for _ in range(3)][-1]
        optimizer.step()
    for _ in range(3):
        before = weight.detach().half().sum(1)[0].item()
        graph.replay()
        assert out[0, 0].item() == pytest.approx(before, rel=1e-2)


def test_another_stream_makes_its_own_cast() -> None:
    with autocast("cuda", torch.float16):
        weight = kept_weight()
        before = kept_cast(weight)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            product(weight)
            assert kept_cast(weight) is not before
    torch.cuda.synchronize()


def test_the_end_of_a_context_frees_memory() -> None:
    with autocast("cuda", torch.float16):
        weight = kept_weight()
        before = torch.cuda.memory_allocated()
    assert before - torch.cuda.memory_allocated() >= weight.numel() * 2


# --- modules and torch.func -----------------------------------------------------------------------


def test_rules_for_modules() -> None:
    run, x = make_model(), torch.ones(2, 64, device="cuda")
    with autocast("cuda", torch.float16, policy="standard; softmax@4:lower", module=run):
        assert run(x).dtype == torch.float16
    with autocast("cuda", torch.float16, policy="standard; @3:fp32", module=run):
        assert run[:4](x).dtype == torch.float32


def test_inside_vmap() -> None:
    layer, x = nn.Linear(8, 4).cuda(), torch.randn(5, 3, 8, device="cuda")
    with autocast("cuda", torch.float16):
        ours = torch.vmap(layer)(x)
    with torch.autocast("cuda", torch.float16):
        theirs = torch.vmap(layer)(x)
    assert torch.equal(ours, theirs)
    assert ours.dtype is theirs.dtype
