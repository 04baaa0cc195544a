"""The table of docs/coming_from.md: what PyTorch still does, beside what halfstep does.

When PyTorch mends one, its half is skipped with a message: a notice, not a failure.
"""

import asyncio
import math
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn

from halfstep._autocast import Policy, Rule, autocast, preset, scopes
from halfstep._pytorch import dispatch
from halfstep.errors import CallOrderError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DIFFERENCES: dict[str, Any] = {}


def difference(row: str) -> Callable[[Any], Any]:
    """Note a row of the table: a class with the functions ``pytorch`` and ``halfstep``."""

    def note(case: Any) -> Any:
        DIFFERENCES[row] = case
        return case

    return note


def after_a_change_inside(context: Any) -> float:
    weight, x = nn.Parameter(torch.ones(1, 1)), torch.ones(1, 1)
    with context(DEVICE, dtype=BF16):
        F.linear(x, weight)
        with torch.no_grad():
            weight.fill_(2)
        return F.linear(x, weight).item()


@difference("A13")
class AWeightChangedInPlace:
    @staticmethod
    def pytorch() -> None:
        assert after_a_change_inside(torch.autocast) == 1

    @staticmethod
    def halfstep() -> None:
        assert after_a_change_inside(autocast) == 2


def one_weight_in_two_dtypes(context: Any) -> torch.dtype:
    weight, x = nn.Parameter(torch.ones(2, 2)), torch.ones(2, 2)
    with context(DEVICE, dtype=BF16):
        F.linear(x, weight)
        with context(DEVICE, dtype=FP16):
            return F.linear(x, weight).dtype


@difference("A14")
class OneWeightInTwoDtypes:
    @staticmethod
    def pytorch() -> None:
        with pytest.raises(RuntimeError, match="same dtype"):
            one_weight_in_two_dtypes(torch.autocast)

    @staticmethod
    def halfstep() -> None:
        assert one_weight_in_two_dtypes(autocast) == FP16


def written_by_index(context: Any) -> torch.dtype:
    x = torch.zeros(2, 2)
    with context(DEVICE, dtype=BF16):
        x[torch.tensor([0, 1])] = F.linear(torch.ones(2, 2), torch.ones(2, 2))
    return x.dtype


@difference("A16")
class WritingByIndex:
    @staticmethod
    def pytorch() -> None:
        with pytest.raises(RuntimeError, match="dtypes match"):
            written_by_index(torch.autocast)

    @staticmethod
    def halfstep() -> None:
        assert written_by_index(autocast) == FP32


def cat_mixed(context: Any) -> torch.dtype:
    with context(DEVICE, dtype=BF16):
        return torch.cat([torch.ones(1, dtype=FP16), torch.ones(1)]).dtype


@difference("A17")
class CatOfAMix:
    @staticmethod
    def pytorch() -> None:
        with pytest.raises(RuntimeError, match="Unexpected floating ScalarType"):
            cat_mixed(torch.autocast)

    @staticmethod
    def halfstep() -> None:
        assert cat_mixed(autocast) == FP32


def float64_and_float32(context: Any) -> list[torch.dtype]:
    x, weight = torch.ones(2, 2, dtype=torch.float64), torch.ones(2, 2)
    with context(DEVICE, dtype=BF16):
        return [F.linear(x, weight).dtype, (weight @ x).dtype]


@difference("A18")
class Float64AndFloat32:
    @staticmethod
    def pytorch() -> None:
        with pytest.raises(RuntimeError, match="same dtype"):
            float64_and_float32(torch.autocast)

    @staticmethod
    def halfstep() -> None:
        assert float64_and_float32(autocast) == [torch.float64, torch.float64]


def overflows(context: Any) -> list[bool]:
    with context(DEVICE, dtype=FP16):
        results = (
            torch.tensor(12.0, dtype=FP16).exp(),
            torch.tensor(300.0, dtype=FP16).pow(2),
            torch.ones(70000, dtype=FP16).sum(),
        )
    return [bool(result.isinf()) for result in results]


@difference("A19")
class OverflowOnTheCpu:
    @staticmethod
    def pytorch() -> None:
        assert overflows(torch.autocast) == [True, True, True]
        with torch.autocast("cpu", BF16):
            assert torch.acos(torch.zeros(1, dtype=BF16, device="cpu")).dtype is BF16

    @staticmethod
    def halfstep() -> None:
        assert overflows(autocast) == [False, False, False]
        with autocast("cpu", BF16):
            assert torch.acos(torch.zeros(1, dtype=BF16, device="cpu")).dtype is FP32


@difference("A20")
class ChangingARule:
    @staticmethod
    def pytorch() -> None:
        with pytest.raises(TypeError, match="policy"):
            torch.autocast(DEVICE, policy="mine")

    @staticmethod
    def halfstep() -> None:
        with autocast(DEVICE, policy=Policy([Rule("linear", "leave")])):
            assert F.linear(torch.ones(1, 1), torch.ones(1, 1)).dtype == FP32


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


@difference("A21")
class OneWeightUsedTwice:
    @staticmethod
    def pytorch() -> None:
        eager, compiled = (gradient(torch.autocast, compiled=c) for c in (False, True))
        assert not torch.equal(eager, compiled)

    @staticmethod
    def halfstep() -> None:
        eager, compiled = (gradient(autocast, compiled=c) for c in (False, True))
        assert torch.equal(eager, compiled)


@difference("C1")
class WithoutADevice:
    @staticmethod
    def pytorch() -> None:
        with pytest.raises(TypeError, match="device_type"):
            torch.autocast()

    @staticmethod
    def halfstep() -> None:
        with autocast():
            assert torch.is_autocast_enabled("cuda" if torch.cuda.is_available() else "cpu")


@difference("C2")
class WhatCannotBe:
    @staticmethod
    def pytorch() -> None:
        with pytest.warns(UserWarning, match="Disabling autocast"):
            torch.autocast(DEVICE, dtype=torch.int8)

    @staticmethod
    def halfstep() -> None:
        with pytest.raises(ValueError, match="lowers to"):
            autocast(DEVICE, torch.int8)
        with pytest.raises(ValueError, match=r"write dtype=torch\.float16"):
            autocast(DEVICE, "torch.float16")  # type: ignore[arg-type]


def stays_on_after_entering_twice(context: Any) -> bool:
    before = torch.is_autocast_enabled(DEVICE)
    with context, context:
        pass
    stays_on = torch.is_autocast_enabled(DEVICE)
    torch.set_autocast_enabled(DEVICE, before)
    return stays_on


@difference("C3")
class OneInstanceTwice:
    @staticmethod
    def pytorch() -> None:
        assert stays_on_after_entering_twice(torch.autocast(DEVICE))

    @staticmethod
    def halfstep() -> None:
        assert not stays_on_after_entering_twice(autocast(DEVICE))


@difference("C4")
class BceInBfloat16:
    @staticmethod
    def pytorch() -> None:
        """On CUDA only, where nothing here can run it: its list is asked instead."""
        assert preset("torch").action("binary_cross_entropy.default", "cuda", BF16) == "refuse"

    @staticmethod
    def halfstep() -> None:
        with autocast(DEVICE, BF16):
            assert F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2)).isfinite()
        with autocast(DEVICE, FP16), pytest.raises(RuntimeError, match="with_logits"):
            F.binary_cross_entropy(torch.full((2,), 0.5), torch.ones(2))


def determinant(context: Any) -> torch.Tensor:
    with context(DEVICE, dtype=BF16):
        return torch.linalg.det(F.linear(torch.eye(2), torch.eye(2)))


@difference("C5")
class WithoutAKernelInLowerPrecision:
    @staticmethod
    def pytorch() -> None:
        with pytest.raises(RuntimeError, match="not implemented for 'BFloat16'"):
            determinant(torch.autocast)

    @staticmethod
    def halfstep() -> None:
        assert determinant(autocast) == 1


def lstm(context: Any) -> torch.Tensor:
    with context(DEVICE, dtype=FP16):
        return nn.LSTM(8, 6)(torch.ones(2, 8))[0]


@difference("C6")
class LstmInFloat16OnTheCpu:
    @staticmethod
    def pytorch() -> None:
        """On a CPU that computes in float16 it works."""
        with pytest.raises(RuntimeError, match="could not create a primitive"):
            lstm(torch.autocast)

    @staticmethod
    def halfstep() -> None:
        assert lstm(autocast).isfinite().all()


def last_column(context: Any) -> float:
    with context(DEVICE, dtype=BF16):
        grid = F.affine_grid(torch.eye(2, 3)[None], [1, 1, 512, 512], align_corners=False)
    return grid[0, 0, -1, 0].item()


@difference("C12")
class CoordinatesOfAnImage:
    @staticmethod
    def pytorch() -> None:
        """Half a pixel outside of the image."""
        assert last_column(torch.autocast) == 1

    @staticmethod
    def halfstep() -> None:
        assert last_column(autocast) == 511 / 512


def bce_gradient(context: Any) -> float:
    p = torch.tensor([1e-5], dtype=FP16, requires_grad=True)
    with context(DEVICE, dtype=FP16):
        F.binary_cross_entropy(p, torch.ones(1)).backward()
    assert p.grad is not None
    return p.grad.item()


@difference("C7")
class BceInFloat16OnTheCpu:
    @staticmethod
    def pytorch() -> None:
        assert bce_gradient(torch.autocast) == -math.inf

    @staticmethod
    def halfstep() -> None:
        with pytest.raises(RuntimeError, match="binary_cross_entropy_with_logits"):
            bce_gradient(autocast)
        allowed = partial(autocast, policy="standard; binary_cross_entropy:fp32")
        assert bce_gradient(allowed) == -math.inf


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


@difference("C8")
class TasksThatTakeTurns:
    @staticmethod
    def pytorch() -> None:
        assert is_on_after_taking_turns(torch.autocast)

    @staticmethod
    def halfstep() -> None:
        with pytest.raises(CallOrderError, match="asyncio tasks"):
            is_on_after_taking_turns(autocast)
        assert not torch.is_autocast_enabled(DEVICE)


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


@difference("C9")
class CompiledBackwardPass:
    @staticmethod
    def pytorch() -> None:
        assert compiled_gradient_error(torch.autocast) > 1e-4

    @staticmethod
    def halfstep() -> None:
        assert compiled_gradient_error(autocast) == 0


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


@difference("C10")
class AnErrorInCompiledCode:
    @staticmethod
    def pytorch() -> None:
        assert contexts_after_an_error_in_compiled_code(torch.autocast) == 1

    @staticmethod
    def halfstep() -> None:
        assert contexts_after_an_error_in_compiled_code(autocast) == 0


def weight_gradient_of_a_batch(context: Any) -> float:
    weight = torch.ones(1, 1, 3, 3, requires_grad=True)
    with context(DEVICE, BF16):
        result = F.conv2d(torch.ones(600, 1, 8, 8), weight)
    result.backward(torch.ones_like(result))
    assert weight.grad is not None
    return weight.grad.max().item() / (600 * 36)


@difference("C11")
class ABatchOfConvolutions:
    @staticmethod
    def pytorch() -> None:
        assert dispatch.has_onednn(BF16) or weight_gradient_of_a_batch(torch.autocast) < 0.8

    @staticmethod
    def halfstep() -> None:
        assert weight_gradient_of_a_batch(autocast) == pytest.approx(1, abs=4e-3)


def loss_of_lower_logits(policy: str) -> Tensor:
    # PyTorch's list for the CPU has float32.

    logits = torch.linspace(-4, 4, 1000)[None].to(BF16)
    with autocast(DEVICE, BF16, policy=policy):
        return F.cross_entropy(logits, torch.tensor([7])) - F.cross_entropy(
            logits.float(), torch.tensor([7])
        )


@difference("E2")
class TheLossOfLowerLogits:
    @staticmethod
    def pytorch() -> None:
        assert loss_of_lower_logits("torch-cuda").abs() > 1e-3

    @staticmethod
    def halfstep() -> None:
        assert loss_of_lower_logits("standard") == 0


def gradient_of_a_row(context: Any) -> Tensor:
    table = torch.ones(2, 1, dtype=BF16, requires_grad=True)
    with context(DEVICE, BF16):
        rows = table[torch.zeros(4096, dtype=torch.long)]
    rows.backward(torch.ones_like(rows))
    assert table.grad is not None
    return table.grad[0]


@difference("E3")
class SumsOfManyTerms:
    @staticmethod
    def pytorch() -> None:
        assert gradient_of_a_row(torch.autocast) == 256

    @staticmethod
    def halfstep() -> None:
        assert gradient_of_a_row(autocast) == 4096


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


@difference("C13")
class RecurrentLayersInFloat16:
    @staticmethod
    def pytorch() -> None:
        assert largest_gradient_of_a_recurrent_layer(torch.autocast) == 0

    @staticmethod
    def halfstep() -> None:
        assert largest_gradient_of_a_recurrent_layer(autocast) > 0


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


@difference("C14")
class StateOfACell:
    @staticmethod
    def pytorch() -> None:
        assert count_of_a_cell(torch.autocast) == 256

    @staticmethod
    def halfstep() -> None:
        assert count_of_a_cell(autocast) == 300


@pytest.mark.parametrize("row", DIFFERENCES)
def test_halfstep(row: str) -> None:
    DIFFERENCES[row].halfstep()


@pytest.mark.parametrize("row", DIFFERENCES)
def test_pytorch_still_has_it(row: str) -> None:
    try:
        DIFFERENCES[row].pytorch()
    except (AssertionError, pytest.fail.Exception):
        pytest.skip(f"PyTorch {torch.__version__} mended {row}: update docs/coming_from.md")


def test_the_table_in_the_docs_has_these_rows() -> None:
    page = (Path(__file__).parents[2] / "docs" / "coming_from.md").read_text(encoding="utf-8")
    table = page.partition("### autocast")[2].partition("\n### ")[0]
    assert set(re.findall(r"^\| ([A-Z]\d+) ", table, re.M)) == set(DIFFERENCES)
