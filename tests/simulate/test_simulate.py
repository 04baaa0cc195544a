"""Results under simulate, against real autocast or against the definition."""

import copy
import threading
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from examples.train_text import GPT, GPTConfig
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep import simulate
from halfstep._numerics.formats import FORMATS, rounded

pytestmark = pytest.mark.slow

FP16, BF16, FP32 = torch.float16, torch.bfloat16, torch.float32
HALVES = pytest.mark.parametrize("dtype", [FP16, BF16])
EIGHTS = pytest.mark.parametrize("format", ["e4m3", "e5m2"])
ALL = pytest.mark.parametrize("format", ["fp16", "bf16", "e4m3", "e5m2"])


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(32, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(),
        nn.Linear(64, 10),
    )  # fmt: skip


def cnn() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(inplace=True),
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.Dropout(0.1), nn.MaxPool2d(2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def gpt() -> nn.Module:
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab=65, context=32, layers=2, heads=4, width=64))


def batch_for(model: nn.Module) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    if isinstance(model, GPT):
        return torch.randint(65, (4, 32)), torch.randint(65, (128,))
    x = torch.randn(8, 3, 12, 12) if isinstance(model[0], nn.Conv2d) else torch.randn(16, 32)
    return x, torch.randint(10, (x.shape[0],))


Result = tuple[Tensor, list[Tensor]]


def output_and_loss(model: nn.Module, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    # In float32: the CPU's log_softmax in lower precision rounds what it computes on the way.
    out = model(x)
    return out, F.cross_entropy(out.float().flatten(0, -2), y) * 1024


def gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def real(model: nn.Module, dtype: torch.dtype, policy: str = "standard") -> Result:
    model = copy.deepcopy(model)
    x, y = batch_for(model)
    with halfstep.autocast("cpu", dtype, policy=policy, module=model):
        out, loss = output_and_loss(model, x, y)
    loss.backward()
    return out.detach(), gradients(model)


def simulated(model: nn.Module, dtype: torch.dtype | str, policy: str = "standard") -> Result:
    model = copy.deepcopy(model)
    x, y = batch_for(model)
    with simulate(model, dtype, policy=policy):
        out, loss = output_and_loss(model, x, y)
        loss.backward()
    return out.detach(), gradients(model)


def equal(one: Result, other: Result) -> bool:
    pairs = zip([one[0], *one[1]], [other[0], *other[1]], strict=True)
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in pairs)


def error(one: Iterable[Tensor], other: Iterable[Tensor]) -> float:
    a, b = (torch.cat([t.double().flatten() for t in some]) for some in (one, other))
    return ((a - b).norm() / b.norm()).item()


# --- float16 and bfloat16: the real thing ---------------------------------------------------------


def kernels_round_once(dtype: torch.dtype, *shapes: tuple[int, int, int]) -> bool:
    """Whether products here add up in float32, in the order in which float32 ones do."""
    torch.manual_seed(0)
    for m, k, n in shapes:
        a, b = torch.randn(m, k).to(dtype), torch.randn(k, n).to(dtype)
        if not torch.equal(a @ b, (a.float() @ b.float()).to(dtype)):
            return False
    return True


def check(found: Result, wanted: Result, dtype: torch.dtype, *, is_exact: bool) -> None:
    """Bit for bit, or to within a rounding of the dtype."""
    assert found[0].dtype == wanted[0].dtype
    assert error([found[0]], [wanted[0]]) < torch.finfo(dtype).eps
    assert error(found[1], wanted[1]) < torch.finfo(dtype).eps
    assert equal(found, wanted) or not is_exact


SMALL = (8, 16, 8), (16, 8, 8), (8, 8, 16)
SHAPES = (16, 32, 64), (16, 64, 64), (64, 16, 64), (16, 64, 10), (64, 16, 10)

OPS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "linear": lambda x, w: F.linear(x, w, w[:, 0]),
    "linear 3d": lambda x, w: F.linear(x.view(2, 4, 16), w),
    "matmul": lambda x, w: x @ w.T,
    "bmm": lambda x, w: torch.bmm(x.view(2, 4, 16), w.T.expand(2, 16, 8)),
    "einsum": lambda x, w: torch.einsum("bi,oi->bo", x, w),
    "conv1d": lambda x, w: F.conv1d(x.view(2, 4, 16), w.view(8, 4, 4)),
}


@HALVES
@pytest.mark.parametrize("op", OPS)
def test_single_ops_are_those_of_autocast(dtype: torch.dtype, op: str) -> None:
    if not kernels_round_once(dtype, *SMALL):
        pytest.skip(f"products in {dtype} are rounded otherwise here")
    torch.manual_seed(0)
    x, w = torch.randn(8, 16), torch.randn(8, 16)
    found: list[tuple[Tensor, ...]] = []
    for is_real in (True, False):
        leaves = [x.clone().requires_grad_(), w.clone().requires_grad_()]
        context = halfstep.autocast("cpu", dtype) if is_real else simulate(nn.Module(), dtype)
        with context:
            out = OPS[op](*leaves)
            if not is_real:
                out.backward(out.detach().sin())
        if is_real:
            out.backward(out.detach().sin())
        found.append((out.detach(), leaves[0].grad, leaves[1].grad))
    for wanted, got in zip(*found, strict=True):
        assert got.dtype == wanted.dtype
        if "conv" in op:  # these add up in an order of their own
            assert error([got], [wanted]) < torch.finfo(dtype).eps
        else:
            assert torch.equal(got, wanted)


@HALVES
@pytest.mark.parametrize("make", [mlp, cnn])
def test_outputs_and_gradients_are_those_of_autocast(
    make: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    """Gradients of convolutions are added up in another order here."""
    model = make()
    wanted = real(model, dtype)
    is_exact = make is mlp and kernels_round_once(dtype, *SHAPES)
    check(simulated(model, dtype), wanted, dtype, is_exact=is_exact)
    assert error([simulated(model, dtype, "fp32")[0]], [wanted[0]]) > torch.finfo(dtype).eps / 8


@HALVES
def test_a_gpt_is_close_to_autocast(dtype: torch.dtype) -> None:
    """The CPU's attention kernel rounds probabilities, which are float32 in the simulation."""
    model = gpt()
    check(simulated(model, dtype), real(model, dtype), dtype, is_exact=False)


@HALVES
def test_islands_and_rules_for_modules_hold_in_both_passes(dtype: torch.dtype) -> None:
    policy = "standard; @3:fp32; gelu:fp32; linear@5:fp32"
    wanted = real(mlp(), dtype, policy)
    is_exact = kernels_round_once(dtype, *SHAPES)
    check(simulated(mlp(), dtype, policy), wanted, dtype, is_exact=is_exact)
    assert simulated(mlp(), dtype)[0].dtype != wanted[0].dtype


@pytest.mark.parametrize("call", ["tensor", "backward", "grad"])
def test_autocast_is_off_in_backward_passes_only(call: str) -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    seen: list[bool] = []
    with simulate(model, FP16):
        y = model(x)
        y.register_hook(lambda _: seen.append(torch.is_autocast_enabled("cpu")))
        match call:
            case "tensor":
                y.sum().backward()
            case "backward":
                torch.autograd.backward([y], [torch.ones_like(y)])
            case "grad":
                torch.autograd.grad(y.sum(), model.weight)
        assert torch.is_autocast_enabled("cpu")
        assert model(x).dtype == FP16
    assert seen == [False]


@HALVES
def test_a_residual_stream_in_place_overflows_as_it_does(dtype: torch.dtype) -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x)
            h.mul_(30.0).add_(h)
            return h.relu_() / 3

    model = Residual()
    nn.init.eye_(model.inner.weight)
    x = torch.tensor([[1.03, 700.1, 3000.0, -2.0]])
    with halfstep.autocast("cpu", dtype):
        wanted = model(x)
    with simulate(model, dtype) as s:
        y = model(x)
        y.sum().backward()
    assert torch.equal(y, wanted)
    assert y.isinf().sum() == (dtype is FP16)
    rows = {(row["module"], row["phase"]): row for row in s.rows()}
    assert rows["", "forward"]["saturated"] == (dtype is FP16)
    assert rows["inner", "forward"]["saturated"] == 0
    assert model.inner.weight.grad is not None
    assert model.inner.weight.grad.dtype == FP32


def test_random_numbers_are_those_of_autocast() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), torch.randn(4, 8)
    outputs = []
    for context in (halfstep.autocast("cpu", BF16), simulate(model, BF16)):
        torch.manual_seed(3)
        with context:
            outputs.append((model(x), torch.rand(3), torch.rand_like(model(x))))
    for wanted, got in zip(*outputs, strict=True):
        assert torch.equal(got, wanted)


@HALVES
def test_autocast_of_the_program_may_stand_in_the_block(dtype: torch.dtype) -> None:
    model = mlp()
    x, y = batch_for(model)
    wanted = simulated(model, dtype)
    with simulate(model, dtype):
        with halfstep.autocast("cpu", dtype):
            out, loss = output_and_loss(model, x, y)
        loss.backward()
    assert equal((out.detach(), gradients(model)), wanted)


# --- eight bits: the definition -------------------------------------------------------------------


@EIGHTS
def test_a_linear_layer_in_eight_bits(format: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 8), (torch.randn(4, 16) * 100).requires_grad_()
    gradient = torch.randn(4, 8) * 1e-3
    with simulate(layer, format):
        y = layer(x)
        y.backward(gradient)

    def held(t: Tensor) -> Tensor:
        return rounded(t.detach(), FORMATS[format], saturate=True)

    assert torch.equal(y, F.linear(held(x), held(layer.weight), layer.bias))
    assert torch.equal(x.grad, held(gradient) @ held(layer.weight))
    assert torch.equal(layer.weight.grad, held(gradient).T @ held(x))
    assert torch.equal(layer.bias.grad, gradient.sum(0))
    assert {y.dtype, x.grad.dtype, layer.weight.grad.dtype} == {FP32}


@EIGHTS
def test_a_convolution_in_eight_bits(format: str) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(3, 4, 3), torch.randn(2, 3, 6, 6, requires_grad=True)
    gradient = torch.randn(2, 4, 4, 4) * 1e-2
    with simulate(layer, format):
        y = layer(x)
        y.backward(gradient)

    def held(t: Tensor) -> Tensor:
        return rounded(t.detach(), FORMATS[format], saturate=True)

    assert torch.equal(y, F.conv2d(held(x), held(layer.weight), layer.bias))
    wanted = torch.nn.grad.conv2d_input(x.shape, held(layer.weight), held(gradient))
    torch.testing.assert_close(x.grad, wanted)
    wanted = torch.nn.grad.conv2d_weight(held(x), layer.weight.shape, held(gradient))
    torch.testing.assert_close(layer.weight.grad, wanted)


@EIGHTS
def test_attention_in_eight_bits_rounds_q_k_and_v(format: str) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 8, 16)
    held = [rounded(t, FORMATS[format], saturate=True) for t in (q, k, v)]
    with simulate(nn.Module(), format):
        y = F.scaled_dot_product_attention(q, k, v)
    assert torch.equal(y, F.scaled_dot_product_attention(*held))


def test_a_scale_for_each_tensor_saves_what_is_small_or_large() -> None:
    torch.manual_seed(0)
    layer, x = nn.Linear(16, 8, bias=False), torch.randn(4, 16)
    small, format = x * 2.0**-20, FORMATS["e4m3"]
    with simulate(layer, "e4m3") as plain:
        assert not layer(small).any()
    with simulate(layer, "e4m3", scale_by_amax=True) as scaled:
        y = layer(small)
        assert layer(x * 0).abs().max() == 0
    assert plain.rows()[0]["flushed"] == x.numel()
    assert scaled.rows()[0]["flushed"] < 3

    def held(t: Tensor) -> Tensor:
        scale = 1.0
        while (t * scale).abs().max() > format.largest:
            scale /= 2
        while (t * scale * 2).abs().max() < 256:  # the power of two at or below 448
            scale *= 2
        return rounded(t.detach() * scale, format, saturate=True) / scale

    assert torch.equal(y, F.linear(held(small), held(layer.weight)))


@EIGHTS
def test_what_the_policy_does_not_lower_is_not_rounded(format: str) -> None:
    model = mlp()
    plain = simulated(model, format)
    only_first = simulated(model, format, "standard; linear@3:fp32; @5:fp32")
    fp32 = simulated(model, format, "fp32")
    assert error([only_first[0]], [fp32[0]]) < error([plain[0]], [fp32[0]])
    assert equal(simulated(model, format, "standard; linear:fp32"), fp32)
    with simulate(model, format, policy="standard; linear@3:fp32; @5:fp32") as s:
        _, loss = output_and_loss(model, *batch_for(model))
        loss.backward()
    assert {(row["module"], row["phase"]) for row in s.rows()} == {
        ("0", "forward"),
        ("0", "backward"),
    }


# --- other ways to run ----------------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_changes_nothing(format: str, reentrant: bool) -> None:
    results, phases = [], []
    for is_checkpointed in (False, True):
        model = mlp()
        x, y = batch_for(model)
        x.requires_grad_()
        with simulate(model, format) as s:
            first = model[:4]
            h = checkpoint(first, x, use_reentrant=reentrant) if is_checkpointed else first(x)
            out, loss = output_and_loss(model[4:], h, y)
            loss.backward()
        results.append((out.detach(), [x.grad, *gradients(model)]))
        phases.append({row["phase"] for row in s.rows()})
    assert equal(*results)
    assert phases == [{"forward", "backward"}, {"forward", "recompute", "backward"}]


@ALL
def test_inference_mode(format: str) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    outputs, rows = [], []
    for mode in (torch.no_grad, torch.inference_mode):
        with simulate(model, format) as s, mode():
            outputs.append(model(x))
        rows.append(s.rows())
    assert torch.equal(*outputs)
    assert rows[0] == rows[1]
    assert rows[0]


def test_a_compiled_model_runs_eager_and_says_so() -> None:
    model = mlp()
    x, _ = batch_for(model)
    compiled = torch.compile(model, backend="eager")
    with simulate(model, FP16) as s:
        wanted = model(x)
    assert s.notes == ()
    with simulate(compiled, FP16) as s:
        assert torch.equal(compiled(x), wanted)
    assert "compiled code ran in eager mode" in s.table()
    assert {row["module"] for row in s.rows()} == {"0", "1", "3", "4", "5"}


def test_a_scaler_skips_what_overflows_and_goes_on() -> None:
    torch.manual_seed(0)
    model = mlp()
    x, y = batch_for(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0**20)
    before = copy.deepcopy(model.state_dict())
    with simulate(model, "fp16") as s:
        optimizer.zero_grad()
        scaler.scale(output_and_loss(model, x, y)[1]).backward()
    assert any(g.isinf().any() or g.isnan().any() for g in gradients(model))
    assert sum(row["saturated"] for row in s.rows() if row["phase"] == "backward") > 0
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0**19
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    for _ in range(12):
        with simulate(model, "fp16"):
            optimizer.zero_grad()
            scaler.scale(output_and_loss(model, x, y)[1]).backward()
        scaler.step(optimizer)
        scaler.update()
    assert not torch.equal(model[0].weight, before["0.weight"])
    assert all(p.isfinite().all() for p in model.parameters())


def test_gradients_that_bfloat16_holds_and_float16_does_not() -> None:
    flushed = {}
    for format in ("fp16", "bf16"):
        model, x = nn.Linear(4, 4), torch.ones(2, 4)
        with simulate(model, format) as s, nullcontext():
            (model(x).float().sum() * 1e-9).backward()
        assert model.bias.grad is not None
        flushed[format] = (model.bias.grad == 0).all().item(), s.rows()[0]["flushed"] > 0
    assert flushed == {"fp16": (True, True), "bf16": (False, False)}


def test_simulations_of_several_threads_leave_the_compiler_as_it_was() -> None:
    first_is_in, second_is_in, first_is_out = (threading.Event() for _ in range(3))

    def first() -> None:
        with simulate(nn.Linear(4, 4)):
            first_is_in.set()
            second_is_in.wait()
        first_is_out.set()

    def second() -> None:
        simulation = simulate(nn.Linear(4, 4))
        first_is_in.wait()
        with simulation:
            second_is_in.set()
            first_is_out.wait()

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    compiled: list[object] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Any:
        compiled.append(graph)
        return graph.forward

    torch.compile(lambda x: x.sin() + 1, backend=backend)(torch.ones(3))
    assert compiled
