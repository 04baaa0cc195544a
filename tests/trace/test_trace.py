"""Rows of a trace, which changes nothing else."""

import copy
import gc
import json
import re
import threading
import weakref
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
import torch.nn.functional as F
from examples.train_text import GPT, GPTConfig
from tests.device import DEVICE
from tests.training import assert_same
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep._autocast import kernels
from halfstep._tools.trace.rows import Row
from halfstep.events import observe_ops

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1))


def bf16(policy: str = "standard") -> halfstep.autocast:
    return halfstep.autocast(DEVICE, BF16, policy=policy)


def traced(model: nn.Module, x: Tensor, policy: str = "standard") -> halfstep.trace:
    with halfstep.trace(model) as t:
        with bf16(policy):
            loss = model(x).float().sum()
        loss.backward()
    return t


def line(row: Row) -> tuple[object, ...]:
    inputs = " ".join(value.dtype for value in row.inputs)
    return row.module, row.op, inputs, row.compute, row.output, row.rule, row.cast_bytes


# --- rows -----------------------------------------------------------------------------------------


def test_the_rows_of_a_forward_pass(model: nn.Sequential) -> None:
    x = torch.ones(3, 8)
    with halfstep.trace(model) as t, bf16():
        model(x)
    b, f = "bfloat16", "float32"
    assert [line(row) for row in t.ops] == [
        # bias [8], x [3, 8], weight [8, 8]: 2 + 4 bytes for each element
        ("0", "addmm", f"{f} {f} {f}", b, b, "linear:lower", 6 * (8 + 24 + 64)),
        ("1", "relu", b, b, b, None, 0),
        ("2", "addmm", f"{f} {b} {f}", b, b, "linear:lower", 6 * (4 + 32)),
        ("3", "_softmax", b, f, f, "softmax:fp32-dtype", 6 * 12),
    ]
    assert {row.phase for row in t.ops} == {"forward"}
    assert {cast.source.name for cast in t.ops[0].casts} == {"", "0.weight", "0.bias"}
    assert [cast.source.name for cast in t.ops[3].casts] == ["output of 2 addmm"]


def test_rows_of_the_backward_pass_belong_to_the_modules(model: nn.Sequential) -> None:
    t = traced(model, torch.ones(3, 8))
    backward = [(row.module, row.op, row.rule, row.cast_bytes) for row in t.ops if is_backward(row)]
    assert backward == [
        ("", "ones_like", None, 0),  # the gradient that it begins with
        ("3", "_softmax_backward_data", "softmax:fp32-dtype", 0),
        ("3", "_to_copy", "softmax:fp32-dtype", 6 * 12),
        ("2", "mm", "linear:lower", 0),
        ("2", "mm", "linear:lower", 0),
        ("2", "sum", "linear:lower", 0),
        *[("2", "_to_copy", "linear:lower", 6 * size) for size in weight_and_bias(t, "2")],
        ("1", "threshold_backward", None, 0),
        ("0", "mm", "linear:lower", 0),
        ("0", "sum", "linear:lower", 0),
        *[("0", "_to_copy", "linear:lower", 6 * size) for size in weight_and_bias(t, "0")],
    ]


def weight_and_bias(t: halfstep.trace, module: str) -> list[int]:
    """Sizes, in the order in which their gradients come."""
    casts = [
        cast for row in t.ops if row.module == module and is_backward(row) for cast in row.casts
    ]
    sizes = {"0": [64, 8], "2": [32, 4]}[module]
    found = [cast.bytes // 6 for cast in casts]
    assert sorted(found) == sorted(sizes)
    return found


def is_backward(row: Row) -> bool:
    return row.phase == "backward"


def test_a_weight_whose_cast_is_kept_is_not_cast_again() -> None:
    linear, x = nn.Linear(256, 256, bias=False), torch.ones(2, 256)
    with halfstep.trace(linear) as t, torch.no_grad(), bf16():
        linear(linear(linear(x)))
    assert [sorted(cast.source.name for cast in row.casts) for row in t.ops] == [
        ["", "weight"],
        ["weight"],
        [],
    ]
    assert [row.call for row in t.ops] == [1, 2, 3]


def test_casts_by_hand_are_rows_of_their_own(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t:
        x = torch.ones(3, 8).to(BF16)
        F.relu(x.float().to(torch.float64))
    hand = [row for row in t.ops if row.is_cast_only]
    assert [str(row.casts[0]) for row in hand] == ["fp32->bf16", "bf16->fp32", "fp32->fp64"]
    assert all(row.casts[0].by_hand and row.rule is None for row in hand)
    assert [row.op for row in t.ops if not row.is_cast_only] == ["ones", "relu"]


def test_casts_by_copy_and_other_conversions(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t:
        torch.zeros(4, dtype=BF16).copy_(torch.ones(4))
        torch.ones(2, dtype=torch.int64).float()
        torch.ones(3).copy_(torch.ones(3))
    assert [(row.op, row.cast_bytes) for row in t.ops if row.op != "ones"] == [
        ("zeros", 0),
        ("_to_copy", 24),
        ("_to_copy", 0),  # from integers
        ("copy_", 0),
    ]


def test_ops_that_return_nothing(model: nn.Sequential) -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    with halfstep.trace(model) as t:
        torch._foreach_add_(tensors, 1.0)
        tensors[0].sum().item()
        with torch.profiler.record_function("a marker without tensors"):
            pass
    assert [(row.op, row.output, row.is_cast_only) for row in t.ops] == [
        ("_foreach_add_", "float32", False),
        ("sum", "float32", False),
        ("_local_scalar_dense", "", False),
    ]
    assert "cast " not in t.table()
    assert t.table().splitlines()[1] == "forward: 3 ops, 0 casts of 0 B"


def test_a_sum_without_dimensions_computes_in_its_dtype(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t, bf16():
        x = torch.zeros(4, dtype=BF16)
        x.sum()
        x * torch.zeros(())
    computes = {row.op: row.compute for row in t.ops}
    assert (computes["sum"], computes["mul"]) == ("float32", "bfloat16")


def test_views_are_not_rows(model: nn.Sequential) -> None:
    x = torch.ones(4, 6)
    with halfstep.trace(model) as t:
        x.t().reshape(2, 12).unsqueeze(0).expand(3, 2, 12).chunk(2, -1)[0].detach()[0].unflatten(
            -1, (2, 3)
        )
        torch.ops.aten._unsafe_view(x, [24])
        torch.empty_like(x)
    assert [row.op for row in t.ops] == ["clone"]  # the reshape of a transposed tensor


def test_explicit_leave_is_told(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t, bf16("standard; softmax:leave"):
        model(torch.ones(3, 8))
    assert line(t.ops[-1])[3:] == ("bfloat16", "bfloat16", "softmax:leave", 0)


def test_ops_in_composites_have_their_own_rules(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t, bf16("standard; cross_entropy_loss:leave"):
        F.cross_entropy(torch.ones(2, 4, dtype=BF16), torch.tensor([0, 1]))
    rules = {row.op: row.rule for row in t.ops if "loss" in row.op or "softmax" in row.op}
    # log_softmax:fp32-dtype stands aside: cross_entropy asks for the dtype of its input.
    assert rules == {
        "_log_softmax": "cross_entropy_loss:leave",
        "nll_loss_forward": "nll_loss:fp32",
    }


def test_a_rule_that_stood_aside_is_not_told(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t, bf16():
        torch.ones(4, dtype=BF16).softmax(0, dtype=BF16)
        torch.ones(4, dtype=BF16).softmax(0)
    rows = [row for row in t.ops if row.op == "_softmax"]
    assert [(row.rule, row.output) for row in rows] == [
        (None, "bfloat16"),
        ("softmax:fp32-dtype", "float32"),
    ]


def test_autocast_around_the_trace_and_made_before_it(model: nn.Sequential) -> None:
    x, region = torch.ones(3, 8), bf16()
    with region:
        model(x)
        with halfstep.trace(model) as t:
            model(x)
    with halfstep.trace(model) as u, region:
        model(x)
    rules = [row.rule for row in t.ops if row.rule]
    assert rules == ["linear:lower", "linear:lower", "softmax:fp32-dtype"]
    assert [line(row)[:2] for row in t.ops] == [line(row)[:2] for row in u.ops]


def test_a_policy_first_used_in_the_block(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t, bf16("standard; relu:fp32; mul:lower"):
        model(torch.ones(3, 8)) * torch.ones(4)
    assert [row.rule for row in t.ops if row.op in ("relu", "mul")] == ["relu:fp32", "mul:lower"]
    assert t.policies == ("standard; relu:fp32; mul:lower",)
    with bf16("standard; relu:fp32; mul:lower"):
        assert (torch.ones(3) * torch.ones(3)).dtype is BF16  # its kernels stay


def with_norm(x: Tensor) -> Tensor:
    """Ops that are composites, and some with rules of their own in them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4), nn.Softmax(-1))
    nn.init.constant_(model[0].weight, 0.3)
    out: Tensor = model(x).reshape(4, -1).contiguous()
    return F.cross_entropy(out, torch.zeros(4, dtype=torch.int64))


@pytest.mark.parametrize("make", [bf16, lambda: torch.autocast(DEVICE, BF16)])
def test_inference_mode_has_the_rows_of_no_grad(model, make):
    found = []
    for mode in (torch.no_grad, torch.inference_mode):
        torch.manual_seed(0)
        with mode(), make():
            plain = with_norm(torch.ones(4, 8))
        torch.manual_seed(0)
        with halfstep.trace(model) as t, mode(), make():
            assert torch.equal(with_norm(torch.ones(4, 8)), plain)
        found.append([line(row) for row in t.ops])
    no_grad, inference = found
    assert inference == no_grad
    assert "nll_loss_forward" in {words[1] for words in inference}


def test_composites_in_what_a_kernel_of_autocast_has_cast(model: nn.Sequential) -> None:
    """Inside one, autocast is off: what it is made of is not cast again."""
    q = torch.randn(1, 2, 4, 8)

    def attention() -> Tensor:
        mask = torch.zeros(1, 2, 4, 4).requires_grad_()
        return F.scaled_dot_product_attention(q, q, q, attn_mask=mask)

    for make in (bf16, lambda: torch.autocast(DEVICE, BF16), lambda: bf16("fp32; linear:fp32")):
        with torch.inference_mode(), make():
            plain = attention(), F.linear(q, q[0, 0])
        with halfstep.trace(model), torch.inference_mode(), make():
            traced = attention(), F.linear(q, q[0, 0])
        assert [each.dtype for each in traced] == [each.dtype for each in plain]
        assert all(map(torch.equal, traced, plain))


def test_without_autocast(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t:
        model(torch.ones(3, 8)).sum().backward()
    assert {(row.compute, row.rule, row.autocast, len(row.casts)) for row in t.ops} == {
        ("float32", None, None, 0)
    }
    assert t.policies == ()


def test_under_the_autocast_of_pytorch(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t, torch.autocast(DEVICE, BF16):
        model(torch.ones(3, 8))
        torch.ones(2).to(BF16)
        torch.ones(2).relu()
    rows = [row for row in t.ops if row.op != "ones"]
    assert [(row.module, row.op, row.compute, row.cast_bytes) for row in rows] == [
        ("0", "addmm", "bfloat16", 6 * (8 + 24 + 64)),
        ("1", "relu", "bfloat16", 0),
        ("2", "addmm", "bfloat16", 6 * (4 + 32)),
        ("3", "_softmax", "bfloat16", 0),
        ("", "_to_copy", "", 12),
        ("", "relu", "float32", 0),
    ]
    assert {row.rule for row in rows} == {None}
    assert [cast.by_hand for row in rows for cast in row.casts] == [False] * 5 + [True]
    assert {row.autocast for row in rows} == {"bfloat16"}


def test_the_small_gpt_of_the_demo() -> None:
    torch.manual_seed(0)
    gpt = GPT(GPTConfig.of_size("tiny", vocab=96))
    t = traced(gpt, torch.zeros(2, 8, dtype=torch.int64))
    modules = {row.module for row in t.ops}
    assert {"tokens", "norm", "blocks.1.attention.qkv", "blocks.0.down"} <= modules
    for phase in ("forward", "backward"):
        rules = {row.rule for row in t.ops if (row.module, row.phase) == ("blocks.1.norm1", phase)}
        assert "layer_norm:fp32" in rules
    attention = [row for row in t.ops if row.module == "blocks.0.attention" and row.rule]
    assert {row.rule for row in attention} == {"scaled_dot_product_attention:lower"}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_nested_tensors(layout: torch.layout) -> None:
    linear = nn.Linear(4, 3)
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(5, 4)], layout=layout)
    with halfstep.trace(linear) as t, bf16():
        linear(x)
    casts = [cast for row in t.ops for cast in row.casts if not cast.source.name]
    assert [cast.bytes for cast in casts] == [6 * 7 * 4]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_transformer_with_padding() -> None:
    """PyTorch computes it with nested tensors."""
    model = MODELS["transformer"][0]().eval()
    x, mask = torch.randn(2, 5, 16), torch.tensor([[False] * 3 + [True] * 2, [False] * 5])
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=mask)
        with halfstep.trace(model) as t:
            assert torch.equal(model(x, src_key_padding_mask=mask), plain)
    assert "_transformer_encoder_layer_fwd" in t.table()


def test_a_module_with_two_names_has_the_first(model: nn.Sequential) -> None:
    both = nn.ModuleDict({"one": model[0], "other": model[0]})
    with halfstep.trace(both) as t:
        both["other"](torch.ones(1, 8))
    assert [row.module for row in t.ops if row.op == "addmm"] == ["one"]


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad + grad


def test_a_function_of_the_user_and_double_backward() -> None:
    class Doubling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Double.apply(x).square()  # type: ignore[no-untyped-call, no-any-return]

    model, x = nn.Sequential(Doubling()), torch.ones(3, requires_grad=True)
    with halfstep.trace(model) as t:
        (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        grad.sum().backward()
    assert [row.op for row in t.ops if row.module == "0"][:2] == ["mul", "pow"]
    backward = [row for row in t.ops if is_backward(row)]
    assert {row.module for row in backward if row.op == "add"} == {"0"}
    assert "recompute" not in {row.phase for row in t.ops}


# --- activation checkpointing ---------------------------------------------------------------------


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("of_module", [True, False])
def test_recomputed_ops(model: nn.Sequential, reentrant: bool, of_module: bool) -> None:
    run = model if of_module else (lambda x: F.softmax(F.linear(x, model[0].weight), -1))
    x = torch.ones(3, 8, requires_grad=True)
    with halfstep.trace(model) as t:
        with bf16():
            loss = checkpoint(run, x, use_reentrant=reentrant).float().sum()
        loss.backward()
    wanted = [(row.module, row.op, row.rule) for row in t.ops if row.phase == "forward"]
    again = [(row.module, row.op, row.rule) for row in t.ops if row.phase == "recompute"]
    ops = [line for line in wanted if line[1] in ("addmm", "mm", "relu", "_softmax")]
    # A checkpoint copies the random state of a device.
    assert [line for line in again if line[1] not in ("_to_copy", "clone")] == ops
    backward = {row.module for row in t.ops if is_backward(row)}
    assert backward >= ({"0", "1", "2", "3"} if of_module else {""})


def test_sums_of_gradients_have_no_rule_and_those_of_a_parameter_its_module() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = x.relu()
            return self.inner(x) + self.inner(x)

    model = Twice()
    with halfstep.trace(model) as t:
        for _ in range(2):
            with bf16():
                loss = model(torch.ones(4, 8, requires_grad=True)).sum()
            loss.backward()
    sums = [row for row in t.ops if is_backward(row) and row.op in ("add", "add_")]
    assert {(row.module, row.rule) for row in sums if row.op == "add_"} == {("inner", None)}
    assert {row.rule for row in sums} == {None}
    seeds = [row.phase for row in t.ops if row.op == "ones_like"]
    assert seeds == ["backward", "backward"]


@pytest.mark.parametrize("reentrant", [True, False])
def test_gradients_after_a_checkpoint_belong_to_their_modules(model, reentrant):
    outer = nn.Sequential(nn.Linear(8, 8), model, nn.Linear(4, 4))
    x = torch.ones(3, 8, requires_grad=True)
    with halfstep.trace(outer) as t:
        with bf16():
            hidden = checkpoint(outer[1], outer[0](x), use_reentrant=reentrant)
            loss = outer[2](hidden).sum()
        loss.backward()
    again = [row.module for row in t.ops if row.phase == "recompute" and row.op == "addmm"]
    assert again == ["1.0", "1.2"]
    products = [row.module for row in t.ops if is_backward(row) and row.op == "mm"]
    assert products == ["2", "2", "1.2", "1.2", "1.0", "1.0", "0", "0"]


# --- nothing else changes -------------------------------------------------------------------------


def results(
    model: nn.Module, make_input: Callable[[], Tensor], trace: bool, dtype: torch.dtype
) -> list[Tensor]:
    torch.manual_seed(1)
    model = copy.deepcopy(model)
    x = make_input()

    def forward_and_backward() -> Tensor:
        with halfstep.autocast(DEVICE, dtype):
            out: Tensor = model(x)
            loss = out.float().square().mean()
        loss.backward()
        return out

    if trace:
        with halfstep.trace(model):
            out = forward_and_backward()
    else:
        out = forward_and_backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    assert grads
    return [out, *grads, torch.get_rng_state()]


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "dropout": (
        lambda: nn.Sequential(
            nn.Linear(8, 8), nn.Dropout(0.5), nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(-1)
        ),
        lambda: torch.randn(4, 8),
    ),
    "gpt": (lambda: GPT(GPTConfig.of_size("tiny", vocab=96)), lambda: torch.randint(96, (2, 16))),
    "convolutions": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(288, 4)
        ),
        lambda: torch.randn(2, 3, 8, 8),
    ),
    "transformer": (
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), 2),
        lambda: torch.randn(2, 5, 16),
    ),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_results_are_the_same_bit_for_bit(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    make_model, make_input = MODELS[name]
    model = make_model()
    plain = results(model, make_input, trace=False, dtype=dtype)
    seen = results(model, make_input, trace=True, dtype=dtype)
    assert_same(plain, seen)


def test_modules_do_not_see_that_they_are_watched() -> None:
    """nn.TransformerEncoderLayer computes otherwise, and rounds otherwise, if it has hooks."""
    model = MODELS["transformer"][0]().eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        plain = model(x)
        with halfstep.trace(model) as t:
            assert torch.equal(model(x), plain)
            assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert "_transformer_encoder_layer_fwd" in {row.op for row in t.ops}


def test_hooks_of_the_user_run_as_always(model: nn.Sequential) -> None:
    seen: list[str] = []
    model[0].register_forward_pre_hook(lambda *_: seen.append("before"))
    model[0].register_forward_hook(lambda _, __, y: (seen.append("after"), y * 2)[1])
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    x = torch.ones(3, 8, requires_grad=True)
    plain = model(x)
    plain.sum().backward()
    with halfstep.trace(model):
        got = model(x)
        got.sum().backward()
    assert torch.equal(got, plain)
    assert seen == ["before", "after", "backward"] * 2


def test_everything_is_undone(model: nn.Sequential) -> None:
    from torch.nn.modules import module as hooks

    x = torch.ones(3, 8)
    with bf16():
        plain = model(x)
    t = traced(model, x)
    assert kernels._observer is None
    assert not kernels._registering
    assert not hooks._global_forward_hooks
    assert not hooks._global_forward_pre_hooks
    num_ops = len(t.ops)
    with bf16():
        assert torch.equal(model(x), plain)
    assert len(t.ops) == num_ops


def test_ops_are_given_back_to_pytorch(model: nn.Sequential) -> None:
    """Rules that PyTorch's kernels carry out are ours for the trace only."""

    def kernels_of(op: torch._ops.OpOverload) -> list[str]:
        """Return the active kernel and those that it overrides."""
        lines = torch._C._dispatch_dump(op.name()).splitlines()
        return [line for line in lines if line.startswith("AutocastCPU")]

    op = torch.ops.aten.conv3d.default
    with bf16():
        before = kernels_of(op)
        with halfstep.trace(model):
            assert len(kernels_of(op)) == len(before) + 1
        assert kernels_of(op) == before


def test_no_tensor_is_kept(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t, bf16():
        x = torch.ones(3, 8)
        y = model(x)
        alive = weakref.ref(y), weakref.ref(x)
        del x, y
        assert [ref() for ref in alive] == [None, None]
    model_alive = weakref.ref(held := nn.Linear(2, 2))
    with halfstep.trace(held) as t:
        pass
    del held
    gc.collect()
    assert model_alive() is None
    assert t.ops == ()


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ArithmeticError("no")


@pytest.mark.parametrize("inside", [True, False])
def test_an_exception_in_the_forward_pass(model: nn.Sequential, inside: bool) -> None:
    failing = nn.Sequential(model, Failing())
    x = torch.ones(3, 8)
    with halfstep.trace(failing) as t:
        if inside:
            with pytest.raises(ArithmeticError), bf16():
                failing(x)
            F.relu(x)
    if not inside:
        with pytest.raises(ArithmeticError), halfstep.trace(failing) as t, bf16():
            failing(x)
        assert kernels._observer is None
    ops = [row for row in t.ops if row.outputs]
    assert [row.module for row in ops[:4]] == ["0.0", "0.1", "0.2", "0.3"]
    assert [(row.module, row.rule) for row in ops[4:]] == [("", None)] * inside


def test_casts_before_an_error_are_shown(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t, pytest.raises(RuntimeError), bf16():
        F.linear(torch.ones(2, 3), torch.ones(5, 4))
    (row,) = (row for row in t.ops if row.casts)
    assert (row.op, row.rule, len(row.casts)) == ("_to_copy", "linear:lower", 2)


# --- one trace at a time, in one thread -----------------------------------------------------------


def test_nested_traces_are_refused(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t:
        with pytest.raises(halfstep.CallOrderError, match="another trace is running"):
            halfstep.trace(model).__enter__()
        model(torch.ones(1, 8))
    assert [row.module for row in t.ops if row.op == "addmm"] == ["0", "2"]
    with pytest.raises(halfstep.CallOrderError, match="make another"):
        t.__enter__()


def test_a_trace_is_left_in_its_thread(model: nn.Sequential) -> None:
    t, errors = halfstep.trace(model), []

    def leave() -> None:
        try:
            t.__exit__(None, None, None)
        except halfstep.CallOrderError as error:
            errors.append(str(error))

    with t:
        thread = threading.Thread(target=leave)
        thread.start()
        thread.join()
        model(torch.ones(1, 8))
    assert "in a thread that did not enter it" in errors[0]
    assert repr(t) == "<trace: 5 ops, no policy: table(), ops>"
    assert kernels._observer is None


def test_other_threads_are_not_seen(model: nn.Sequential) -> None:
    got: list[Tensor] = []

    def call_model() -> None:
        with bf16():
            got.append(model(torch.ones(3, 8)))

    with halfstep.trace(model) as t:
        thread = threading.Thread(target=call_model)
        thread.start()
        thread.join()
    assert t.ops == ()
    call_model()
    assert torch.equal(*got)


def test_observers_are_told_of_ruled_ops_only() -> None:
    from contextlib import contextmanager

    told = []

    @contextmanager
    def observe(op: str, rule: halfstep.Rule, policy: kernels.PolicyOnDevice):  # type: ignore[no-untyped-def]
        told.append((op, str(rule), policy.device))
        yield

    x = torch.ones(2, 2)
    with observe_ops(observe):
        x @ x
        with bf16():
            torch.relu(x @ x)
    with bf16():
        x @ x
    assert told == [("matmul.default", "matmul:lower", DEVICE)]


@pytest.mark.parametrize("model", [None, "model", torch.ones(2)])
def test_what_is_no_model_is_refused(model: object) -> None:
    with pytest.raises(TypeError, match="pass the model, a"):
        halfstep.trace(model)  # type: ignore[arg-type]


# --- torch.compile --------------------------------------------------------------------------------


class Wrapping(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


@pytest.mark.parametrize("in_place", [True, False])
def test_compiled_code_runs_in_eager_mode(model: nn.Sequential, in_place: bool) -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    model = Wrapping(model)
    eager = copy.deepcopy(model)
    compiled: nn.Module = model
    if in_place:
        model.compile(backend=backend)
    else:
        compiled = torch.compile(model, backend=backend)  # type: ignore[assignment]
    x = torch.ones(3, 8)
    with bf16():
        compiled(x)
        with halfstep.trace(compiled) as t:
            compiled(x)
        compiled(x)
    assert len(graphs) == 1  # neither compiled again nor thrown away
    with halfstep.trace(eager) as u, bf16():
        eager(x)
    assert [line(row)[:-1] for row in t.ops] == [line(row)[:-1] for row in u.ops]
    assert "compiled code ran in eager mode for the trace" in t.table()
    assert "compiled" not in u.table()


@pytest.mark.slow
def test_torch_compile_can_be_used_in_the_block() -> None:
    model, x = nn.Linear(4, 4), torch.ones(2, 4)
    with halfstep.trace(model) as t:
        compiled = torch.compile(lambda x: model(x).relu(), backend="eager")
        assert torch.equal(compiled(x), model(x).relu())
    assert torch.equal(compiled(x), model(x).relu())
    assert [row.op for row in t.ops] == ["addmm", "relu", "addmm", "relu", "equal"]


# --- text and data --------------------------------------------------------------------------------


def test_rows_are_plain_values(model: nn.Sequential) -> None:
    ops = traced(model, torch.ones(3, 8)).ops
    assert json.loads(json.dumps([asdict(op) for op in ops]))[0]["op"] == "addmm"
    first = ops[0]
    assert [value.dtype for value in first.inputs] == ["float32"] * 3
    assert [value.shape for value in first.inputs] == [(8,), (3, 8), (8, 8)]
    assert [value.shape for value in first.outputs] == [(3, 8)]
    assert (len(first.casts), first.cast_bytes) == (3, 6 * 96)
    assert {cast.to for cast in first.casts} == {"bfloat16"}


def test_the_table(model: nn.Sequential) -> None:
    t = traced(nn.Sequential(model), torch.ones(3, 8))
    lines = t.table().splitlines()
    assert lines[0].split() == ["op", "n", "inputs", "compute", "rule", "bytes"]
    assert lines[1] == "forward: 5 ops, 6 casts of 864 B"
    linear = next(i for i, text in enumerate(lines) if "  addmm" in text and "3 fp32" in text)
    assert lines[linear].split()[:7] == ["addmm", "1", "3", "fp32", "bf16", "linear:lower", "-"]
    assert lines[linear + 1].split()[:7] == ["cast", "fp32->bf16", "3", "-", "-", "-", "576"]
    by_hand = [text.split()[:3] for text in lines if "linear:lower" in text and "cast" in text]
    assert by_hand == [["cast", "bf16->fp32", "2"]] * 2
    starts = {text.index("linear:lower") for text in lines if "linear:lower" in text}
    assert len(starts) == 1  # a column
    order = [text.strip() for text in lines if text.startswith("  0")]
    assert order == ["0.0", "0.1", "0.2", "0.3", "0.3", "0.2", "0.1", "0.0"]
    assert lines[-2].startswith("total: 13 ops, ")
    assert "policy standard" in lines[-1]


def test_modules_that_differ_in_an_index_share_a_block() -> None:
    torch.manual_seed(0)
    text = traced(
        GPT(GPTConfig.of_size("tiny", vocab=96)), torch.zeros(2, 8, dtype=torch.int64)
    ).table()
    lines = text.splitlines()
    assert "  blocks.*.attention.qkv  x2" in lines
    assert max(map(len, lines)) <= 115
    assert "_scaled_dot_pro..tention_for_cpu  2" in text
    norm = lines[lines.index("  blocks.*.norm1  x2") + 1]
    assert norm.split()[:2] == ["native_layer_norm", "2"]
    blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)]
    lines = traced(nn.Sequential(*blocks), torch.ones(3, 8)).table().splitlines()
    assert {"  *.0  x2", "  *.1  x2"} <= {*lines}  # one index differs, the other does not


def test_columns_without_content_are_left_out(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t:
        model(torch.ones(3, 8))
    assert t.table().splitlines()[0].split() == ["op", "n", "inputs", "compute"]


def test_notes(model: nn.Sequential) -> None:
    with halfstep.trace(nn.Linear(2, 2)) as t:
        model(torch.ones(3, 8))
    assert "no module of the model ran" in t.table()
    with halfstep.trace(model) as t:
        for policy in ("bf16-lean", "standard"):
            with bf16(policy):
                model(torch.ones(3, 8))
    assert t.policies == ("bf16-lean", "standard")
    assert t.table().endswith("\npolicy bf16-lean\npolicy standard")
    assert traced(model, torch.ones(3, 8)).notes == ()


def test_calls_that_are_alike_share_a_line() -> None:
    linear = nn.Linear(8, 8)
    with halfstep.trace(linear) as t:
        for _ in range(3):
            linear(torch.ones(2, 8))
    assert [text.split()[:2] for text in t.table().splitlines() if "addmm" in text] == [
        ["addmm", "3"]
    ]


def test_an_empty_trace(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t:
        pass
    assert "total: 0 ops" in t.table()


def test_a_trace_can_be_read_while_it_runs(model: nn.Sequential) -> None:
    with halfstep.trace(model) as t:
        model(torch.ones(1, 8))
        before = len(t.ops)
        model(torch.ones(1, 8))
        assert len(t.ops) == 2 * before
        assert t.policies == ()


def test_an_island_shows_the_rule_that_makes_it_one() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 4))
    x = torch.ones(2, 4, requires_grad=True)
    with halfstep.trace(model) as ran:
        with halfstep.autocast(DEVICE, torch.bfloat16, policy="standard; @1:fp32", module=model):
            model(x).sum().backward()
        with torch.no_grad():
            model(x)  # outside of autocast, no rule acts
    rules = {(row.module, row.op, row.rule) for row in ran.ops if row.phase == "forward"}
    assert ("1.0", "addmm", "@1:fp32") in rules
    assert ("1", "_to_copy", "@1:fp32") in rules
    assert ("0", "addmm", "linear:lower") in rules
    assert ("1.0", "addmm", None) in rules
    assert re.search(r"^ +cast bf16->fp32 .* @1:fp32 ", ran.table(), re.MULTILINE)
    assert "by hand" not in ran.table()
