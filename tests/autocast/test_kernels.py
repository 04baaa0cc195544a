"""What kernels do to arguments, op by op; PyTorch's own autocast is the reference."""

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests import forked
from tests.autocast.versions import has_op
from tests.device import DEVICE, seeded
from torch import Tensor
from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists

from halfstep._autocast import Policy, Rule, autocast, preset
from halfstep._autocast.kernels import observe_ops, prepare, prepared
from halfstep._pytorch import dispatch

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated")

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64

Call = Callable[[], Tensor]


def rand(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.rand(shape, generator=seeded(sum(shape))).to(dtype)


def spd(n: int) -> Tensor:
    a = rand(n, n, dtype=FP32)
    return (a @ a.T + n * torch.eye(n)).to(BF16)


# One call for every op of PyTorch's CPU list for which autocast_test_lists has no entry.
CPU_CALLS: dict[str, Call] = {
    "adaptive_avg_pool3d": lambda: F.adaptive_avg_pool3d(rand(1, 2, 4, 4, 4), 2),
    "adaptive_max_pool3d": lambda: torch._C._nn.adaptive_max_pool3d(rand(1, 2, 4, 4, 4), 2)[0],
    "cdist": lambda: torch.cdist(rand(2, 3), rand(4, 3)),
    "cholesky": lambda: torch.ops.aten.cholesky(spd(3)),
    "cholesky_inverse": lambda: torch.cholesky_inverse(rand(3, 3).tril() + torch.eye(3).to(BF16)),
    "cholesky_solve": lambda: torch.cholesky_solve(rand(3, 1), spd(3)),
    "cross_entropy_loss": lambda: F.cross_entropy(rand(2, 3), torch.tensor([0, 2])),
    "ctc_loss.IntList": lambda: torch.ctc_loss(rand(5, 1, 4), torch.tensor([[1, 2]]), [5], [2]),
    "ctc_loss.Tensor": lambda: torch.ctc_loss(
        rand(5, 1, 4), torch.tensor([[1, 2]]), torch.tensor([5]), torch.tensor([2])
    ),
    "fake_quantize_per_tensor_affine": lambda: torch.fake_quantize_per_tensor_affine(
        rand(4), 0.1, 0, 0, 255
    ),
    **{
        f"fft_{name}": lambda name=name: getattr(torch.fft, name)(rand(4, 4))  # type: ignore[misc]
        for name in ("fft", "ifft", "fft2", "ifft2", "fftn", "ifftn", "rfft", "rfft2", "rfftn")
    },
    **{
        f"fft_{name}": lambda name=name: getattr(torch.fft, name)(rand(4, 4))  # type: ignore[misc]
        for name in ("irfft", "irfft2", "irfftn", "hfft", "ihfft")
    },
    "fractional_max_pool2d": lambda: F.fractional_max_pool2d(
        rand(1, 2, 6, 6), 2, output_size=2, _random_samples=rand(1, 2, 2)
    ),
    "fractional_max_pool3d": lambda: F.fractional_max_pool3d(
        rand(1, 2, 6, 6, 6), 2, output_size=2, _random_samples=rand(1, 2, 3)
    ),
    "geqrf": lambda: torch.geqrf(rand(3, 3))[0],
    "grid_sampler": lambda: torch.grid_sampler(rand(1, 2, 4, 4), rand(1, 3, 3, 2), 0, 0, False),
    "grid_sampler_2d": lambda: torch.grid_sampler_2d(
        rand(1, 2, 4, 4), rand(1, 3, 3, 2), 0, 0, False
    ),
    "_grid_sampler_2d_cpu_fallback": lambda: torch._grid_sampler_2d_cpu_fallback(
        rand(1, 2, 4, 4), rand(1, 3, 3, 2), 0, 0, False
    ),
    "grid_sampler_3d": lambda: torch.grid_sampler_3d(
        rand(1, 2, 4, 4, 4), rand(1, 3, 3, 3, 3), 0, 0, False
    ),
    "index_copy": lambda: torch.index_copy(rand(3, dtype=FP32), 0, torch.tensor([0, 2]), rand(2)),
    "inverse": lambda: torch.inverse(spd(3)),
    "kl_div": lambda: F.kl_div(rand(3), rand(3), reduction="sum"),
    "linalg_cholesky": lambda: torch.linalg.cholesky(spd(3)),
    "linalg_cholesky_ex": lambda: torch.linalg.cholesky_ex(spd(3))[0],
    "linalg_cond": lambda: torch.linalg.cond(spd(3)),
    "linalg_cond.p_str": lambda: torch.linalg.cond(spd(3), "fro"),
    "linalg_eig": lambda: torch.linalg.eig(spd(3))[0],
    "linalg_eigh": lambda: torch.linalg.eigh(spd(3))[0],
    "linalg_eigvals": lambda: torch.linalg.eigvals(spd(3)),
    "linalg_eigvalsh": lambda: torch.linalg.eigvalsh(spd(3)),
    "linalg_householder_product": lambda: torch.linalg.householder_product(rand(3, 2), rand(2)),
    "linalg_inv": lambda: torch.linalg.inv(spd(3)),
    "linalg_inv_ex": lambda: torch.linalg.inv_ex(spd(3))[0],
    "linalg_lstsq": lambda: torch.linalg.lstsq(spd(3), rand(3, 1))[0],
    "linalg_matrix_rank": lambda: torch.linalg.matrix_rank(spd(3), 0.1),
    "linalg_matrix_rank.tol_tensor": lambda: torch.linalg.matrix_rank(spd(3), rand(1)[0]),
    "linalg_matrix_rank.atol_rtol_tensor": lambda: torch.linalg.matrix_rank(
        spd(3), atol=rand(1)[0]
    ),
    "linalg_matrix_rank.atol_rtol_float": lambda: torch.linalg.matrix_rank(spd(3), atol=0.1),
    "linalg_matrix_sqrth": lambda: torch.linalg.matrix_sqrth(spd(3)),
    "linalg_qr": lambda: torch.linalg.qr(spd(3))[1],
    "linalg_solve": lambda: torch.linalg.solve(spd(3), rand(3)),
    "linalg_svd": lambda: torch.linalg.svd(spd(3))[1],
    "linalg_svdvals": lambda: torch.linalg.svdvals(spd(3)),
    "linalg_tensorinv": lambda: torch.linalg.tensorinv(spd(4), ind=1),
    "linalg_tensorsolve": lambda: torch.linalg.tensorsolve(spd(4), rand(4)),
    "linalg_vecdot": lambda: torch.linalg.vecdot(rand(2, 3), rand(2, 3, dtype=FP32)),
    "lu_solve": lambda: torch.lu_solve(
        rand(3, 1), spd(3), torch.tensor([1, 2, 3], dtype=torch.int32)
    ),
    "_lu_with_info": lambda: torch._lu_with_info(spd(3))[0],
    "max_pool3d": lambda: torch.max_pool3d(rand(1, 2, 4, 4, 4), 2),
    "max_unpool2d": lambda: torch._C._nn.max_unpool2d(
        rand(1, 1, 1, 2), torch.tensor([[[[0, 3]]]]), [1, 4]
    ),
    "max_unpool3d": lambda: torch._C._nn.max_unpool3d(
        rand(1, 1, 1, 1, 2), torch.tensor([[[[[0, 3]]]]]), [1, 1, 4], [1, 1, 2], [0, 0, 0]
    ),
    "multilabel_margin_loss_forward": lambda: torch.ops.aten.multilabel_margin_loss_forward(
        rand(1, 4), torch.tensor([[3, 0, -1, 1]]), 1
    )[0],
    "nanquantile": lambda: torch.nanquantile(rand(3), rand(1)),
    "nanquantile.scalar": lambda: torch.nanquantile(rand(3), 0.5),
    "orgqr": lambda: torch.orgqr(rand(3, 2), rand(2)),
    "ormqr": lambda: torch.ormqr(rand(3, 2), rand(2), rand(3, 1)),
    "pinverse": lambda: torch.pinverse(spd(3)),
    "polar": lambda: torch.polar(rand(3), rand(3)),
    "prod": lambda: torch.prod(rand(3)),
    "prod.dim_int": lambda: torch.prod(rand(3), 0),
    "qr": lambda: torch.ops.aten.qr(spd(3))[1],
    "quantile": lambda: torch.quantile(rand(3), rand(1)),
    "quantile.scalar": lambda: torch.quantile(rand(3), 0.5),
    "reflection_pad2d": lambda: F.pad(rand(1, 2, 5, 5), (1, 1, 1, 1), mode="reflect"),
    "replication_pad1d": lambda: F.pad(rand(1, 2, 5), (1, 1), mode="replicate"),
    "replication_pad2d": lambda: F.pad(rand(1, 2, 5, 5), (1, 1, 1, 1), mode="replicate"),
    "replication_pad3d": lambda: F.pad(rand(1, 2, 5, 5, 5), (1,) * 6, mode="replicate"),
    "scaled_dot_product_attention": lambda: F.scaled_dot_product_attention(
        *(rand(1, 2, 3, 4, dtype=FP32),) * 3
    ),
    "stft": lambda: torch.ops.aten.stft.default(
        rand(32), 8, None, None, rand(8), False, None, True
    ),
    "stft.center": lambda: torch.stft(rand(32), 8, window=rand(8), return_complex=True),
    "svd": lambda: torch.svd(spd(3))[1],
    "trace": lambda: torch.trace(rand(3, 3)),
    "triangular_solve": lambda: torch.ops.aten.triangular_solve(rand(3, 1), spd(3))[0],
    "view_as_complex": lambda: torch.view_as_complex(rand(3, 2)),
    "conv1d.padding": lambda: F.conv1d(rand(1, 2, 4, dtype=FP32), rand(2, 2, 3), padding="same"),
    "conv2d.padding": lambda: F.conv2d(rand(1, 2, 4, 4), rand(2, 2, 3, 3), padding="same"),
    "conv3d.padding": lambda: F.conv3d(rand(1, 2, 4, 4, 4), rand(2, 2, 3, 3, 3), padding="same"),
    "einsum": lambda: torch.einsum("ij,jk->ik", rand(2, 3, dtype=FP32), rand(3, 2)),
}
CPU_CALLS = {op: call for op, call in CPU_CALLS.items() if has_op(op.partition(".")[0])}


@pytest.mark.parametrize("op", CPU_CALLS)
def test_ours_does_what_pytorch_does_on_the_cpu(op: str) -> None:
    with torch.autocast(DEVICE, BF16):
        expected = CPU_CALLS[op]()
    with observe_ops(lambda *_: nullcontext()), autocast(DEVICE, BF16, policy="torch"):
        result = CPU_CALLS[op]()

    assert result.dtype == expected.dtype
    if op == "linalg_lstsq":  # LAPACK's last bit depends on where the memory is
        torch.testing.assert_close(result, expected)
    else:
        assert torch.equal(result, expected)


@pytest.mark.parametrize("op", [op for op in CPU_CALLS if not op.startswith("linalg_matrix_rank")])
def test_standard_runs_every_op_of_the_cpu_list(op: str) -> None:
    for half in (FP16, BF16):
        with autocast(DEVICE, half):
            assert CPU_CALLS[op]().isfinite().all()


def test_every_op_of_the_cpu_list_is_called_somewhere() -> None:
    lists = AutocastCPUTestLists(torch.device(DEVICE))
    groups = ("torch_16", "nn_16", "torch_fp32", "nn_fp32", "torch_need_autocast_promote")
    listed = {entry[0] for group in groups for entry in getattr(lists, group)}
    called = {op.removesuffix(".default") for op in CPU_CALLS} | listed
    nowhere = {
        op
        for op in dispatch.overloads_with_autocast_kernel("cpu")
        if op.removesuffix(".default") not in called and op.partition(".")[0] not in listed
        # tests/autocast/test_presets.py speaks of new ones; before 2.13 dimensions had names.
        if preset("torch").rule(op, "cpu", BF16) is not None and "imname" not in op
    }
    # Called by nn.LSTM and friends on oneDNN builds; and the one that no public function reaches.
    assert nowhere <= {"mkldnn_rnn_layer.default", "_convolution.deprecated"}


# --- the default policy cures what PyTorch's list for the CPU leaves broken -----------------------


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (lambda: torch.tensor(12.0, dtype=FP16).exp(), 162754.79),
        (lambda: torch.tensor(300.0, dtype=FP16).pow(2), 90000.0),
        (lambda: torch.ones(70000, dtype=FP16).sum(), 70000.0),
        (lambda: torch.full((3,), 200.0, dtype=FP16).norm() ** 2, 120000.0),
        (lambda: torch.full((4,), 30000.0, dtype=FP16).cumsum(0)[-1], 120000.0),
    ],
)
def test_float16_on_the_cpu_does_not_overflow(call: Call, expected: float) -> None:
    """Fact A19."""
    with autocast(DEVICE, FP16):
        assert call().item() == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("first", [FP16, BF16, FP32, FP64])
@pytest.mark.parametrize("second", [FP16, BF16, FP32, FP64])
@pytest.mark.parametrize("join", [torch.cat, torch.stack])
def test_cat_and_stack_take_any_mix(join, first, second):
    """Fact A17."""
    tensors = [torch.ones(2, dtype=first), torch.full((2,), 2.0, dtype=second)]
    with autocast(DEVICE, BF16):
        joined = join(tensors)

    assert joined.dtype == torch.promote_types(first, second)
    assert joined.flatten().tolist() == [1, 1, 2, 2]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (BF16, BF16, BF16),
        (BF16, FP32, FP32),
        (FP16, BF16, FP32),
        (FP16, FP16, FP16),
        (BF16, FP64, FP64),
        (FP32, FP64, FP64),
    ],
)
def test_promote_takes_the_widest(first, second, expected):
    a, b = rand(4, dtype=first), rand(4, dtype=second)
    with autocast(DEVICE, BF16):
        result = torch.atan2(a, b)

    assert result.dtype == expected
    assert torch.equal(result, torch.atan2(a.to(expected), b.to(expected)))


# --- what autocast never touches ------------------------------------------------------------------


@pytest.mark.usefixtures("both_kernels")
def test_integers_complex_and_float64_stay() -> None:
    with autocast(DEVICE, BF16, policy=preset("standard") | Rule("sin", "fp32")):
        assert torch.mm(rand(2, 2, dtype=FP64), rand(2, 2, dtype=FP64)).dtype == FP64
        assert (
            torch.mm(torch.ones(2, 2, dtype=torch.int64), torch.eye(2, dtype=torch.int64)).dtype
            == torch.int64
        )
        assert torch.exp(rand(2, dtype=FP64)).dtype == FP64
        assert torch.sum(torch.ones(2, dtype=torch.int32)).dtype == torch.int64
        assert torch.norm(rand(2, dtype=FP64)).dtype == FP64
        assert torch.sin(rand(2, dtype=torch.complex64)).dtype == torch.complex64
        assert torch.sin(rand(2, dtype=FP64)).dtype == FP64
        assert torch.sin(rand(2)).dtype == FP32


def test_a_dtype_that_the_caller_asks_for_is_respected() -> None:
    with autocast(DEVICE, BF16):
        assert torch.sum(rand(3), dtype=BF16).dtype == BF16
        assert torch.softmax(rand(3), 0, dtype=FP64).dtype == FP64
        assert torch.norm(rand(3), 2, dim=0, dtype=BF16).dtype == BF16
        assert torch.softmax(rand(3), 0).dtype == FP32


def test_ops_that_write_to_their_arguments_are_left_alone() -> None:
    with autocast(DEVICE, BF16):
        x = rand(3)
        assert x.exp_().dtype == BF16
        out = torch.empty(3, dtype=BF16)
        assert torch.exp(rand(3), out=out) is out


# --- a policy of the user -------------------------------------------------------------------------


def test_each_action_on_an_op_that_pytorch_never_casts() -> None:
    x, y = rand(3), rand(3, dtype=FP32)

    def under(call: Call, *rules: Rule) -> Tensor:
        with autocast(DEVICE, BF16, policy=Policy(rules)):
            return call()

    assert under(lambda: torch.sin(y), Rule("sin", "lower")).dtype == BF16
    assert under(lambda: torch.sin(x), Rule("sin", "fp32")).dtype == FP32
    assert under(lambda: torch.nansum(x), Rule("nansum", "fp32-dtype")).dtype == FP32
    assert under(lambda: torch.lerp(x, y, 0.5), Rule("lerp", "promote")).dtype == FP32
    with pytest.raises(RuntimeError, match="no sine today"):
        under(lambda: torch.sin(x), Rule("sin", "refuse", message="no sine today"))
    assert under(lambda: torch.matmul(x, y.bfloat16()), Rule("matmul", "leave")).dtype == BF16


def test_a_rule_for_float32_alone() -> None:
    with autocast(DEVICE, FP32, policy=Policy([Rule("sin", "fp32", dtype=FP32)])):
        assert torch.sin(rand(3)).dtype == FP32
    with autocast(DEVICE, BF16, policy=Policy([Rule("sin", "fp32", dtype=FP32)])):
        assert torch.sin(rand(3)).dtype == BF16


@pytest.mark.parametrize("action", ["fp32", "promote"])
def test_tensors_given_by_keyword_are_cast_too(action: Any) -> None:
    weight = rand(8, dtype=BF16 if action == "fp32" else FP32)
    with autocast(DEVICE, BF16, policy=Policy([Rule("histogram", action)])):
        counts = torch.histogram(rand(8), 4, weight=weight).hist
    assert counts.dtype == FP32


def test_norms_without_a_dtype_argument() -> None:
    x = torch.full((4, 4), 200.0, dtype=FP16)
    with autocast(DEVICE, FP16):
        assert torch.ops.aten.norm.Scalar(x).item() == 800.0
        assert torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]).tolist() == [400.0] * 4
        assert torch.ops.aten.norm.ScalarOpt_dim(x, 2, [0]).dtype == FP32
        assert torch.ops.aten.norm.ScalarOpt_dim(x, None, [0], True).shape == (1, 4)


@pytest.mark.usefixtures("forgotten_policies")
def test_pytorchs_kernels_do_what_they_agree_on() -> None:
    torchs, standard = (prepared(prepare(preset(name), "cpu")) for name in ("torch", "standard"))
    plan = torchs.plan_for(BF16)
    assert {preset("torch").action(op, "cpu", BF16) for op in plan} == {"lower"}
    assert "avg_pool3d.default" not in plan
    assert "softmax.int" in standard.plan_for(BF16)
    assert prepare(preset("torch"), "cpu") != prepare(preset("torch"), "cuda")


def test_observing_registers_a_kernel_once_however_many_policies_there_are(monkeypatch) -> None:
    """Tuning prepares hundreds, and observes ops in each trial."""
    assert prepare(preset("standard"), DEVICE) != prepare(preset("torch"), DEVICE)
    calls: list[Any] = []
    monkeypatch.setattr(dispatch.PythonKernels, "register", lambda _, *args: calls.append(args[:2]))
    with observe_ops(pytest.fail):
        assert len(calls) == len(set(calls)) > 100


def test_a_rule_can_be_taken_back() -> None:
    """Fact A20: rms_norm in float32, with no way out."""
    lean = Policy([*preset("standard").rules, Rule("rms_norm", "leave"), Rule("softmax", "lower")])
    x = rand(2, 8)
    with autocast(DEVICE, BF16):
        assert F.rms_norm(x, (8,)).dtype == FP32
        assert F.softmax(x, -1).dtype == FP32
    with autocast(DEVICE, BF16, policy=lean):
        assert F.rms_norm(x, (8,)).dtype == BF16
        assert F.softmax(x, -1).dtype == BF16


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule("sotfmax", "fp32"), r"no op 'sotfmax'; did you mean 'softmax'"),
        (Rule("softmax.integer", "fp32"), r"no op 'softmax.integer'; did you mean 'softmax.int'"),
        (Rule("exp_", "fp32"), r"'destination' is the action for ops in place"),
        (Rule("exp.out", "fp32"), r"'destination' is the action for ops in place"),
        (Rule("exp", "fp32-dtype"), r"optional dtype argument.*use the action 'fp32'"),
    ],
)
def test_a_rule_that_cannot_be_carried_out_is_refused(rule: Rule, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        autocast(DEVICE, BF16, policy=Policy([rule]))


# --- PyTorch's own autocast beside ours -----------------------------------------------------------


def plain_results() -> list[Tensor]:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Softmax(-1), torch.nn.LayerNorm(8))
    torch.manual_seed(1)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    with torch.autocast(DEVICE, BF16):
        y = model(rand(2, 8, dtype=FP32))
        loss = F.mse_loss(torch.cat([y, y]).exp(), torch.zeros(4, 8)) + y.sum().to(FP32)
    loss.backward()
    return [y, loss, *(p.grad for p in model.parameters() if p.grad is not None)]


def equal(first: list[Tensor], second: list[Tensor]) -> bool:
    return all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def in_a_fresh_process(code: str) -> str:
    """Run code where halfstep has registered nothing yet, and return what it prints."""
    done = forked.python("-c", code, cwd=Path.cwd())
    assert done.code == 0, done.err
    return done.out


@pytest.mark.slow
def test_plain_autocast_is_unchanged_after_ours() -> None:
    calls = "".join(
        f"    outs.append({call})\n"
        for call in (
            "torch.softmax(x, -1)",
            "torch.exp(x)",
            "torch.cat([x, w])",
            "torch.nn.functional.linear(x, w)",
            "torch.norm(x)",
            "torch.sum(x, 0)",
            "torch.nn.functional.layer_norm(x, (4,))",
            "torch.nn.functional.cross_entropy(x, torch.tensor([0, 1]))",
            "torch.nn.functional.max_pool3d(x.expand(1, 2, 2, 2, 4), 2)",
        )
    )
    code = (
        "import torch, halfstep._autocast as h\n"
        "x = torch.arange(8.).reshape(2, 4).bfloat16() / 8\n"
        "w = torch.arange(16.).reshape(4, 4).requires_grad_()\n"
        "def run():\n"
        "  outs = []\n"
        "  with torch.autocast('cpu', torch.bfloat16):\n"
        f"{calls}"
        "  return outs\n"
        "before = run()\n"
        "for policy in ('standard', 'torch-cuda'):\n"
        "  with h.autocast('cpu', torch.bfloat16, policy=policy): torch.softmax(x, -1)\n"
        "with h.kernels.observe_ops(print): after = run()\n"
        "print(all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(before, after)))\n"
    )

    assert in_a_fresh_process(code).strip() == "True"


def test_plain_autocast_is_unchanged_in_a_thread_while_ours_is_active() -> None:
    expected = plain_results()
    results: list[list[Tensor]] = []
    with autocast(DEVICE, FP16):
        thread = threading.Thread(target=lambda: results.append(plain_results()))
        thread.start()
        thread.join()
        assert torch.exp(rand(2, dtype=FP16)).dtype == FP32

    assert equal(results[0], expected)


@pytest.mark.slow
def test_nothing_is_registered_before_the_first_context() -> None:
    code = (
        "import torch, halfstep\n"
        "import halfstep._autocast as h, halfstep._autocast.kernels\n"
        "dump = torch._C._dispatch_dump('aten::exp')\n"
        "h.autocast('cpu', enabled=False)\n"
        "print('AutocastCPU' in dump, 'AutocastCPU' in torch._C._dispatch_dump('aten::exp'))\n"
        "h.autocast('cpu')\n"
        "print('AutocastCPU' in torch._C._dispatch_dump('aten::exp'))\n"
    )

    assert in_a_fresh_process(code).split() == ["False", "False", "True"]


def test_numbers_are_left_alone_after_another_policy_had_a_rule() -> None:
    """``x * 2`` calls ``mul(Tensor, Tensor)``: a kernel is given the number itself."""
    with autocast(DEVICE, BF16, policy="standard; add,mul:lower"):
        assert (torch.ones(2) * 2).dtype is BF16
    with autocast(DEVICE, BF16):
        assert (2 * torch.ones(2)).dtype is FP32
        assert (torch.ones(2) + 2.5).tolist() == [3.5, 3.5]
        assert (torch.ones((), dtype=BF16) * 2.5).dtype is BF16
        assert torch.add(torch.ones(2), 1, alpha=2).tolist() == [3, 3]
