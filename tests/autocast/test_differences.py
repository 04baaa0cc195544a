"""The table of docs/coming_from.md: what PyTorch still does, beside what halfstep does.

When PyTorch mends one, its half is skipped with a message: a notice, not a failure.
"""

import asyncio
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn

from halfstep._autocast import Policy, Rule, autocast, preset, scopes
from halfstep._pytorch import dispatch
from halfstep.errors import CallOrderError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Raises(NamedTuple):
    error: type[Exception]
    words: str


def after_a_change_inside(context: Any) -> float:
    weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
    with context(DEVICE, dtype=BF16):
        F.linear(x, weight)
        with torch.no_grad():
            weight.fill_(2)
        return F.linear(x, weight).item()


def one_weight_in_two_dtypes(context: Any) -> torch.dtype:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with context(DEVICE, dtype=BF16):
        F.linear(x, weight)
        with context(DEVICE, dtype=FP16):
            return F.linear(x, weight).dtype


def written_by_index(context: Any) -> torch.dtype:
    x = torch.zeros(2, 2)
    with context(DEVICE, dtype=BF16):
        x[torch.tensor([0, 1])] = F.linear(torch.ones(2, 2), torch.ones(2, 2))
    return x.dtype


def cat_mixed(context: Any) -> torch.dtype:
    with context(DEVICE, dtype=BF16):
        return torch.cat([torch.ones(1, dtype=FP16), torch.ones(1)]).dtype


def float64_and_float32(context: Any) -> list[torch.dtype]:
    x, weight = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2)
    with context(DEVICE, dtype=BF16):
        return [F.linear(x, weight).dtype, (weight @ x).dtype]


def overflows(context: Any) -> list[Any]:
    with context(DEVICE, dtype=FP16):
        results = (
            torch.tensor(12.0, dtype=FP16).exp(),
            torch.tensor(300.0, dtype=FP16).pow(2),
            torch.ones(70000, dtype=FP16).sum(),
        )
    with context("cpu", dtype=BF16):
        dtype = torch.acos(torch.zeros(1, dtype=BF16, device="cpu")).dtype
    return [*(bool(result.isinf()) for result in results), dtype]


def with_a_rule(context: Any) -> torch.dtype:
    with context(DEVICE, policy=Policy([Rule("linear", "leave")])):
        return F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype


def gradient(context: Any, *, compiled: bool) -> Tensor:
    torch._dynamo.reset()
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(8, 8)), torch.randn(4, 8)

    def loss() -> Tensor:
        with context(DEVICE, dtype=BF16):
            hidden = F.linear(x, weight)
            with context(DEVICE, enabled=False):
                hidden = F.linear(hidden.float(), weight)
            return F.linear(hidden, weight).float().square().sum()

    run = torch.compile(loss, backend="aot_eager", fullgraph=True) if compiled else loss
    run().backward()
    assert weight.grad is not None
    return weight.grad


def compiles_to_the_same(context: Any) -> bool:
    return torch.equal(*(gradient(context, compiled=each) for each in (False, True)))


def without_a_device(context: Any) -> bool:
    with context():
        return torch.is_autocast_enabled("cuda" if torch.cuda.is_available() else "cpu")


def stays_on_after_entering_twice(context: Any) -> bool:
    before, one = torch.is_autocast_enabled(DEVICE), context(DEVICE)
    with one, one:
        pass
    stays_on = torch.is_autocast_enabled(DEVICE)
    torch.set_autocast_enabled(DEVICE, before)
    return stays_on


def bce_in_bfloat16(context: Any) -> str:
    """On CUDA only PyTorch refuses it, where nothing here can run it: its list is asked."""
    if context is torch.autocast:
        return preset("torch").action("binary_cross_entropy.default", "cuda", BF16)
    with context(DEVICE, BF16):
        return str(F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2)).isfinite().item())


def determinant(context: Any) -> float:
    with context(DEVICE, dtype=BF16):
        return torch.linalg.det(F.linear(torch.eye(2), torch.eye(2))).item()


def lstm(context: Any) -> bool:
    """PyTorch cannot, but on a CPU that computes in float16."""
    with context(DEVICE, dtype=FP16):
        return bool(nn.LSTM(8, 6)(torch.ones(2, 8))[0].isfinite().all())


def last_column(context: Any) -> float:
    """At 1 it is half a pixel outside of the image."""
    with context(DEVICE, dtype=BF16):
        grid = F.affine_grid(torch.eye(2, 3)[None], [1, 1, 512, 512], align_corners=False)
    return grid[0, 0, -1, 0].item()


def bce_gradient(context: Any) -> float:
    p = torch.tensor([1e-5], dtype=FP16, requires_grad=True)
    with context(DEVICE, dtype=FP16):
        F.binary_cross_entropy(p, torch.ones(1)).backward()
    return p.grad.item()


def is_on_after_taking_turns(context: Any) -> bool:
    async def task(dtype: torch.dtype, num_turns: int) -> None:
        with context(DEVICE, dtype=dtype):
            for _ in range(num_turns):
                await asyncio.sleep(0)

    async def tasks() -> None:
        await asyncio.gather(task(BF16, 1), task(FP16, 2))

    before = torch.is_autocast_enabled(DEVICE)
    try:
        asyncio.run(tasks())
        return torch.is_autocast_enabled(DEVICE)
    finally:
        torch.set_autocast_enabled(DEVICE, before)


def compiled_gradient_error(context: Any) -> float:
    """The error of the gradient of code in float32 inside of autocast, relative to eager code."""
    weight = nn.Parameter(torch.linspace(0, 1, 12).reshape(4, 3))

    def full_precision(x: Tensor) -> Tensor:
        with torch.autocast(DEVICE, enabled=False):
            return (x @ weight).sin().sum()

    def gradient(run: Callable[[Tensor], Tensor]) -> Tensor:
        with context(DEVICE, dtype=BF16):
            loss = run(torch.linspace(1, 2, 8).reshape(2, 4))
        return torch.autograd.grad(loss, weight)[0]

    expected = gradient(full_precision)
    compiled = gradient(torch.compile(full_precision, backend="aot_eager", fullgraph=True))
    return (compiled - expected).abs().max().item()


def contexts_after_an_error_in_compiled_code(context: Any) -> int:
    """The number of contexts that the thread is still in."""

    def function(x: Tensor, index: Tensor) -> Tensor:
        with context(DEVICE, dtype=BF16):
            return x.index_select(0, index)

    compiled = torch.compile(function, backend="eager", fullgraph=True)
    with pytest.raises(IndexError):
        compiled(torch.ones(2), torch.tensor([9]))
    num = 0
    while scopes.nesting_depth() > 0:
        torch.autocast_decrement_nesting()
        num += 1
    return num


def weight_gradient_of_a_batch(context: Any) -> float:
    weight = torch.ones(1, 1, 3, 3, requires_grad=True)
    with context(DEVICE, BF16):
        result = F.conv2d(torch.ones(600, 1, 8, 8), weight)
    result.backward(torch.ones_like(result))
    return weight.grad.max().item() / (600 * 36)


def error_in_the_loss_of_lower_logits(context: Any) -> float:
    """By PyTorch's list for CUDA; that for the CPU has float32."""
    logits, target = torch.linspace(-4, 4, 1000)[None].to(BF16), torch.tensor([7])
    with autocast(DEVICE, BF16, policy="torch-cuda" if context is torch.autocast else "standard"):
        losses = F.cross_entropy(logits, target), F.cross_entropy(logits.float(), target)
    return abs(losses[0].item() - losses[1].item())


def gradient_of_a_row(context: Any) -> float:
    table = torch.ones(2, 1, dtype=BF16, requires_grad=True)
    with context(DEVICE, BF16):
        rows = table[torch.zeros(4096, dtype=torch.long)]
    rows.backward(torch.ones_like(rows))
    return table.grad[0].item()


def needs_cuda() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def largest_gradient_of_a_recurrent_layer(context: Any) -> float:
    needs_cuda()
    layer = torch.nn.LSTM(4, 4).cuda()
    with context("cuda", BF16):
        result = layer(torch.ones(2, 3, 4, device="cuda"))[0]
    (result.float().sum() * 1e-9).backward()
    return max(p.grad.abs().max().item() for p in layer.parameters() if p.grad is not None)


def count_of_a_cell(context: Any) -> float:
    needs_cuda()
    cell, steps = torch.nn.LSTMCell(1, 1).cuda(), 300
    for param in cell.parameters():
        torch.nn.init.zeros_(param)
    torch.nn.init.constant_(cell.bias_ih, 50.0)  # every gate is open, and the cell adds 1 a step
    x = torch.zeros(1, 1, device="cuda")
    state = x, x
    with torch.no_grad(), context("cuda", BF16):
        for _ in range(steps):
            state = cell(x, state)
    return state[1].item()


SAME_DTYPE = Raises(RuntimeError, "same dtype")
F64 = torch.float64
# The program, what PyTorch does, and what halfstep does: a value, a predicate, or an error.
DIFFERENCES: dict[str, tuple[Callable[[Any], Any], Any, Any]] = {
    "A13": (after_a_change_inside, 1, 2),
    "A14": (one_weight_in_two_dtypes, SAME_DTYPE, FP16),
    "A16": (written_by_index, Raises(RuntimeError, "dtypes match"), FP32),
    "A17": (cat_mixed, Raises(RuntimeError, "Unexpected floating ScalarType"), FP32),
    "A18": (float64_and_float32, SAME_DTYPE, [F64, F64]),
    "A19": (overflows, [True, True, True, BF16], [False, False, False, FP32]),
    "A20": (with_a_rule, Raises(TypeError, "policy"), FP32),
    "A21": (compiles_to_the_same, False, True),
    "C1": (without_a_device, Raises(TypeError, "device_type"), True),
    "C2": (
        lambda context: context(DEVICE, dtype=torch.int8),
        Raises(UserWarning, "Disabling autocast"),
        Raises(ValueError, "lowers to"),
    ),
    "C3": (stays_on_after_entering_twice, True, False),
    "C4": (bce_in_bfloat16, "refuse", "True"),
    "C5": (determinant, Raises(RuntimeError, "not implemented for 'BFloat16'"), 1),
    "C6": (lstm, Raises(RuntimeError, "could not create a primitive"), True),
    "C7": (bce_gradient, -math.inf, Raises(RuntimeError, "binary_cross_entropy_with_logits")),
    "C8": (is_on_after_taking_turns, True, Raises(CallOrderError, "asyncio tasks")),
    "C9": (compiled_gradient_error, lambda error: error > 1e-4, 0),
    "C10": (contexts_after_an_error_in_compiled_code, 1, 0),
    "C11": (
        weight_gradient_of_a_batch,
        lambda share: dispatch.has_onednn(BF16) or share < 0.8,
        pytest.approx(1, abs=4e-3),
    ),
    "C12": (last_column, 1, 511 / 512),
    "C13": (largest_gradient_of_a_recurrent_layer, 0, lambda largest: largest > 0),
    "C14": (count_of_a_cell, 256, 300),
    "E2": (error_in_the_loss_of_lower_logits, lambda error: error > 1e-3, 0),
    "E3": (gradient_of_a_row, 256, 4096),
}


def check(program: Callable[[Any], Any], context: Any, expected: Any) -> None:
    if isinstance(expected, Raises):
        with pytest.raises(expected.error, match=expected.words):
            program(context)
    elif callable(expected):
        assert expected(program(context))
    else:
        assert program(context) == expected


@pytest.mark.parametrize("row", DIFFERENCES)
def test_halfstep(row: str) -> None:
    program, _, expected = DIFFERENCES[row]
    check(program, autocast, expected)


def test_bce_in_float16_can_be_allowed() -> None:
    allowed = partial(autocast, policy="standard; binary_cross_entropy:fp32")
    assert bce_gradient(allowed) == -math.inf


@pytest.mark.parametrize("row", DIFFERENCES)
def test_pytorch_still_has_it(row: str) -> None:
    program, expected, _ = DIFFERENCES[row]
    try:
        check(program, torch.autocast, expected)
    except (AssertionError, pytest.fail.Exception):
        pytest.skip(f"PyTorch {torch.__version__} mended {row}: update docs/coming_from.md")


def test_the_table_in_the_docs_has_these_rows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    table = page.partition("### autocast")[2].partition("\n### ")[0]
    assert set(re.findall(r"^\| ([A-Z]\d+) ", table, re.M)) == set(DIFFERENCES)
