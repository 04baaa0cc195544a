"""Products in lower precision with results in float32: the action fp32-out."""

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.versions import has_op
from tests.device import DEVICE, seeded
from torch import Tensor, nn
from torch.autograd import forward_ad

import halfstep
from halfstep import Policy, autocast, preset
from halfstep._autocast import sums
from halfstep._autocast.rule import HALVES
from halfstep._pytorch import dispatch

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
FP32_SUMS = 2e-6
"""What sums of some hundred terms in float32 may differ by, relative to the norm."""

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # inductor's own

Call = Callable[..., Tensor]

# A call, the shapes of what is added (or none) and of both factors.
CALLS: dict[str, tuple[Call, tuple[int, ...] | None, tuple[int, ...], tuple[int, ...]]] = {
    "linear": (lambda a, b: F.linear(a, b), None, (5, 300), (7, 300)),
    "linear, bias": (lambda c, a, b: F.linear(a, b, c), (7,), (2, 5, 300), (7, 300)),
    "linear, vector": (lambda c, a, b: F.linear(a, b, c), (7,), (300,), (7, 300)),
    "linear, weight of one row": (lambda a, b: F.linear(a, b), None, (5, 300), (300,)),
    "matmul": (torch.matmul, None, (2, 3, 5, 300), (2, 3, 300, 7)),
    "matmul, matrix": (torch.matmul, None, (2, 5, 300), (300, 7)),
    "matmul, broadcast": (torch.matmul, None, (2, 1, 5, 300), (3, 300, 7)),
    "matmul, vector": (torch.matmul, None, (5, 300), (300,)),
    "mm": (torch.mm, None, (5, 300), (300, 7)),
    "mm, no rows": (torch.mm, None, (0, 300), (300, 7)),
    "bmm": (torch.bmm, None, (2, 5, 300), (2, 300, 7)),
    "addmm": (torch.addmm, (7,), (5, 300), (300, 7)),
    "addmm, scaled": (
        lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=2), (5, 7), (5, 300), (300, 7)
    ),
    "addmm, nan": (
        lambda c, a, b: torch.addmm(c * torch.nan, a, b, beta=0), (5, 7), (5, 300), (300, 7)
    ),
    "baddbmm": (
        lambda c, a, b: torch.baddbmm(c, a, b, beta=2), (2, 5, 7), (2, 5, 300), (2, 300, 7)
    ),
}  # fmt: skip
UNUSED = ("mm, no rows", "addmm, nan")
"""Calls with an input that has no gradient."""

calls = pytest.mark.parametrize("name", CALLS)
halves = pytest.mark.parametrize("dtype", HALVES)


def inputs(name: str) -> list[Tensor]:
    _, *shapes = CALLS[name]
    made = [torch.randn(s, generator=seeded(i)) for i, s in enumerate(shapes) if s is not None]
    return [each.to(DEVICE).requires_grad_() for each in made]


def policy(name: str, action: str = "fp32-out") -> str:
    return f"standard; {name.partition(',')[0]}:{action}"


def by_rule(name: str, dtype: torch.dtype, given: list[Tensor], action: str = "fp32-out") -> Tensor:
    with autocast(DEVICE, dtype, policy=policy(name, action)):
        return CALLS[name][0](*given)


def rounded(given: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the inputs in float64 on the CPU, the factors rounded to lower precision."""
    *added, a, b = (each.detach().cpu() for each in given)
    return [each.double() for each in (*added, a.to(dtype), b.to(dtype))]


def error(found: Tensor, expected: Tensor) -> float:
    distance = (found.detach().cpu().double() - expected).norm()
    return float(distance / expected.norm()) if expected.numel() else float(distance)


# --- values and gradients -------------------------------------------------------------------------


@calls
@halves
def test_the_result_is_that_of_rounded_factors(name: str, dtype: torch.dtype) -> None:
    given = inputs(name)
    expected = CALLS[name][0](*rounded(given, dtype))
    result = by_rule(name, dtype, given)
    assert result.dtype is FP32
    assert result.shape == expected.shape
    assert error(result, expected) < FP32_SUMS
    if result.numel():
        assert error(by_rule(name, dtype, given, "lower"), expected) > 30 * FP32_SUMS


@pytest.mark.parametrize("name", [name for name in CALLS if name not in UNUSED])
@halves
def test_the_gradients_are_those_of_rounded_factors(name: str, dtype: torch.dtype) -> None:
    given = inputs(name)
    result = by_rule(name, dtype, given)
    up = torch.randn(result.shape, generator=seeded(9)).to(DEVICE)
    wide = [each.requires_grad_() for each in rounded(given, dtype)]
    reference = torch.autograd.grad(CALLS[name][0](*wide), wide, up.cpu().double())
    found = torch.autograd.grad(result, given, up)
    eps = torch.finfo(dtype).eps
    for gradient, expected in zip(found, reference, strict=True):
        assert gradient.dtype is FP32
        assert error(gradient, expected) < eps


@halves
def test_the_backward_pass_is_that_of_lower(dtype: torch.dtype) -> None:
    given = inputs("linear")
    one, other = (by_rule("linear", dtype, given, action) for action in ("fp32-out", "lower"))
    up = torch.randn(one.shape, generator=seeded(9)).to(DEVICE)
    found = torch.autograd.grad(one, given, up)
    expected = torch.autograd.grad(other, given, up.to(dtype))
    for gradient, of_lower in zip(found, expected, strict=True):
        assert error(gradient, of_lower.cpu().double()) < torch.finfo(dtype).eps / 4


def test_it_is_differentiable_twice() -> None:
    a, b = inputs("mm")
    up = torch.randn(5, 7, generator=seeded(9)).to(DEVICE).requires_grad_()
    (to_a,) = torch.autograd.grad(by_rule("mm", BF16, [a, b]), a, up, create_graph=True)
    to_up, to_b = torch.autograd.grad(to_a.sum(), (up, b))
    ones = torch.ones(5, 300, dtype=FP64, device="cpu")
    assert error(to_up, ones @ b.detach().cpu().bfloat16().double()) < 0.01
    assert error(to_b, ones.T @ up.detach().cpu().bfloat16().double()) < 0.01


def test_forward_mode() -> None:
    a, b = (each.detach() for each in inputs("mm"))
    with forward_ad.dual_level():
        result = by_rule("mm", BF16, [forward_ad.make_dual(a, a), b])
        tangent = forward_ad.unpack_dual(result).tangent
    assert tangent is not None
    assert error(tangent, torch.mm(*rounded([a, b], BF16))) < 0.01


def test_inside_torch_func() -> None:
    a, b = (each.detach() for each in inputs("bmm"))
    with autocast(DEVICE, BF16, policy="standard; mm:fp32-out"):
        gradient = torch.func.grad(lambda a: torch.mm(a, b[0]).sum())(a[0])
    assert gradient.shape == a[0].shape


def test_saved_are_the_factors_in_lower_precision() -> None:
    saved: list[torch.dtype] = []
    given = inputs("linear, bias")
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append(t.dtype) or t, lambda t: t
    ):
        by_rule("linear, bias", BF16, given)
    assert saved == [BF16, BF16]


# --- other inputs ---------------------------------------------------------------------------------


def test_float64_stays() -> None:
    given = [each.detach().double() for each in inputs("linear, bias")]
    assert by_rule("linear, bias", BF16, given).dtype is FP64


@pytest.mark.parametrize("dtype", [torch.long, torch.complex64])
def test_integers_and_complex_numbers_are_not_cast(dtype: torch.dtype) -> None:
    a = (1j * torch.eye(2)).to(dtype) if dtype.is_complex else torch.eye(2).to(dtype)
    with autocast(DEVICE, BF16, policy="standard; mm,addmm:fp32-out"):
        assert torch.mm(a, a).dtype is dtype
        assert torch.equal(torch.addmm(a, a, a), a + a @ a)


def test_sparse_factors_stay_in_float32() -> None:
    a, b = (each.detach() for each in inputs("mm"))
    assert torch.allclose(by_rule("mm", BF16, [a.to_sparse(), b]), a @ b, atol=1e-4)


@pytest.mark.parametrize("op", ["mm", "bmm"])
def test_shapes_that_an_op_does_not_take_are_its_error(op: str) -> None:
    a, b = torch.ones(2, 3, 4), torch.ones(4, 5)
    with autocast(DEVICE, BF16, policy=policy(op)), pytest.raises(RuntimeError, match="must be"):
        getattr(torch, op)(a, b)


def test_a_context_in_float32_rounds_nothing() -> None:
    given = inputs("mm")
    result = by_rule("mm", FP32, given)
    assert error(result, torch.mm(*(each.detach().cpu().double() for each in given))) < FP32_SUMS


# --- modules, compiled code, traces ---------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.gate = nn.Linear(8, 4, bias=False)
        self.lm_head = nn.Linear(8, 11, bias=False)
        self.lm_head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.embed(ids)
        gates = self.gate(h)
        return h, gates, self.lm_head(h + gates.softmax(-1).sum(-1, keepdim=True))


@pytest.mark.parametrize("action", ["fp32", "fp32-out"])
def test_a_rule_for_a_head_with_tied_weights(action: str) -> None:
    model, ids = Tied(), torch.arange(5)
    rule = f"standard; linear@lm_head:{action}"
    with autocast(DEVICE, BF16, policy=rule, module=model):
        _, gates, logits = model(ids)
    assert (gates.dtype, logits.dtype) == (BF16, FP32)
    logits.sum().backward()
    assert model.embed.weight.grad is not None
    assert model.embed.weight.dtype is FP32


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled(backend: str) -> None:
    """Without care, Inductor drops the rounding of factors that are cast down and up again."""
    if backend == "inductor" and (DEVICE != "cpu" or shutil.which("g++") is None):
        pytest.skip("inductor needs a device and a C++ compiler")
    torch._dynamo.reset()
    given = inputs("linear, bias")
    up = torch.randn(2, 5, 7, generator=seeded(9)).to(DEVICE)
    compiled = torch.compile(CALLS["linear, bias"][0], backend=backend, fullgraph=True)
    with autocast(DEVICE, BF16, policy=policy("linear")):
        result = compiled(*given)
    expected = by_rule("linear, bias", BF16, given)
    assert error(result, F.linear(*(rounded(given, BF16)[i] for i in (1, 2, 0)))) < FP32_SUMS
    found = torch.autograd.grad(result, given, up)
    for one, other in zip(found, torch.autograd.grad(expected, given, up), strict=True):
        assert error(one, other.detach().cpu().double()) < torch.finfo(BF16).eps


def test_a_trace_names_the_rule() -> None:
    model = Tied()
    text = "standard; linear@lm_head:fp32-out"
    with halfstep.trace(model) as trace, autocast(DEVICE, BF16, policy=text, module=model):
        model(torch.arange(5))
    rows = [row for row in trace.ops if row.module == "lm_head"]
    assert {row.rule for row in rows} == {"linear@lm_head:fp32-out"}
    assert [(row.compute, row.output) for row in rows] == [("float32", "float32")]


# --- text -----------------------------------------------------------------------------------------


def test_it_is_read_and_written(tmp_path) -> None:  # type: ignore[no-untyped-def]
    made = Policy.parse("standard; linear@lm_head:fp32-out; mm,addmm[cuda,bf16]:fp32-out")
    assert Policy.parse(str(made)) == made
    made.save(tmp_path / "mine.policy")
    assert Policy.load(tmp_path / "mine.policy") == made
    assert made.action("mm.default", "cuda", BF16) == "fp32-out"
    title = "@lm_head:fp32-out, factors cast to the lower precision, results in float32"
    assert title in made.by_action()


@pytest.mark.parametrize("op", ["softmax", "*mm", "conv2d", "einsum"])
def test_other_ops_are_an_error_that_names_those_it_is_for(op: str) -> None:
    with pytest.raises(ValueError, match="linear, matmul, mm, bmm, addmm, baddbmm"):
        Policy.parse(f"standard; {op}:fp32-out")


# --- CUDA -----------------------------------------------------------------------------------------


@pytest.fixture
def own_kernels() -> Iterator[list[torch.dtype]]:
    """Give the CPU the kernels that CUDA has; what they are called with is noted."""
    seen: list[torch.dtype] = []

    def multiply(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
        seen.extend((a.dtype, b.dtype, dtype))
        return a.to(dtype) @ b.to(dtype)

    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    for op in ("mm", "bmm"):
        library.impl(f"{op}.dtype", multiply, "CPU")  # type: ignore[no-untyped-call]
    dispatch.has_kernel_on.cache_clear()
    yield seen
    library._destroy()  # type: ignore[no-untyped-call]
    dispatch.has_kernel_on.cache_clear()


@pytest.mark.skipif(DEVICE != "cpu", reason="the kernels are registered for a CPU")
@pytest.mark.parametrize("name", ["linear, bias", "matmul", "bmm", "addmm, scaled"])
@halves
def test_where_there_is_a_kernel_it_gets_the_factors_in_lower_precision(name, dtype, own_kernels):
    given = inputs(name)
    result = by_rule(name, dtype, given)
    assert own_kernels == [dtype, dtype, FP32]
    assert error(result, CALLS[name][0](*rounded(given, dtype))) < FP32_SUMS
    result.sum().backward()
    assert all(each.grad is not None for each in given)


@pytest.mark.gpu
@halves
@calls
def test_the_kernel_of_cuda_equals_the_reference(name: str, dtype: torch.dtype) -> None:
    given = [each.detach().cuda() for each in inputs(name)]
    with autocast("cuda", dtype, policy=policy(name)):
        result = CALLS[name][0](*given)
    expected = CALLS[name][0](*rounded(given, dtype))
    assert result.dtype is FP32
    assert error(result, expected) < FP32_SUMS


@pytest.mark.gpu
def test_cuda_multiplies_in_lower_precision() -> None:
    a, b = (each.detach().cuda().bfloat16() for each in inputs("mm"))
    with torch.profiler.profile() as profile:
        sums.with_fp32_result("mm.default", [a, b], {})
    assert "aten::_to_copy" not in {event.key for event in profile.key_averages()}


# --- experts in groups ----------------------------------------------------------------------------

GROUPED = pytest.mark.skipif(not has_op("_grouped_mm"), reason="PyTorch has no such product")


@GROUPED
@pytest.mark.parametrize("mixed", [None, BF16])
@pytest.mark.parametrize(("k", "n", "dtype"), [(16, 16, BF16), (12, 16, FP32), (16, 12, FP32)])
def test_experts_are_lowered_where_their_rows_begin_at_16_bytes(k, n, dtype, mixed):
    torch.manual_seed(0)
    offs = torch.tensor([3, 8], dtype=torch.int32, device=DEVICE)
    x = torch.randn(8, k, device=DEVICE, requires_grad=True)
    weight = torch.randn(2, n, k, device=DEVICE, dtype=mixed, requires_grad=True)
    with autocast(DEVICE, BF16):
        y = torch._grouped_mm(x, weight.mT, offs=offs)
    assert y.dtype is dtype
    seed = torch.randn(8, n, device=DEVICE)
    (y * seed).sum().backward()
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    expected = torch.cat([wide[0][:3] @ wide[1][0].mT, wide[0][3:] @ wide[1][1].mT])
    (expected * seed).sum().backward()
    for ours, exact in ((y, expected), (x.grad, wide[0].grad), (weight.grad, wide[1].grad)):
        error = (ours.double() - exact).abs().max() / exact.abs().max()
        assert error < (1e-2 if BF16 in (dtype, mixed) else 1e-6)


@GROUPED
@pytest.mark.parametrize("name", ["grouped_mm", "F.grouped_mm", "torch._grouped_mm"])
def test_names_of_the_product_of_experts(name):
    assert Policy.parse(f"standard; {name}:fp32") == Policy.parse("standard; _grouped_mm:fp32")
    assert preset("standard").action("_scaled_grouped_mm.default", DEVICE, BF16) == "leave"
