"""Models whose weights fully_shard spreads over two ranks, and DDP: as one rank alone would train.

A step has two batches: one on each rank, or both on both; one rank alone has both. The mean of two
gradients has one rounding, as their sum: all is equal bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.sharding import (
    CAST_BYTES,
    SHARDED,
    Model,
    alive_after,
    data_of,
    lower,
    three_steps,
)
from tests.ranks.pool import Pool
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import halfstep

pytestmark = pytest.mark.slow

BF16, FP32 = torch.bfloat16, torch.float32


# --- training -------------------------------------------------------------------------------------


def trained(rank: int, way: str, data: str) -> Any:
    spread = SHARDED[way](Model())
    return three_steps(spread, rank if data == "of its own" else None)


@functools.cache
def alone() -> dict[str, list[Any]]:
    return three_steps(Model(), None)


@pytest.mark.parametrize("data", ["of its own", "the same"])
@pytest.mark.parametrize("way", [way for way in SHARDED if way != "lower precision"])
def test_training_is_that_of_one_rank_bit_for_bit(way: str, data: str, pool: Pool) -> None:
    first, second = pool.run(trained, way, data)
    reference = alone()

    if data == "of its own":
        by_rank = zip(first["losses"], second["losses"], strict=True)
        assert [loss for both in by_rank for loss in both] == reference["losses"]
    else:  # two micro-batches on each rank
        assert first["losses"] == second["losses"] == reference["losses"]
    for told in (first, second):
        for mine, theirs in zip(told["gradients"], reference["gradients"], strict=True):
            assert all(map(torch.equal, mine.values(), theirs.values()))
        # Also the second and the third after a step.
        assert all(map(torch.equal, told["evaluations"], reference["evaluations"]))


def test_training_on_weights_gathered_in_lower_precision(pool: Pool) -> None:
    """There the weights of norms, and gradients before they are reduced, are rounded too."""
    told, _ = pool.run(trained, "lower precision", "of its own")
    one, other = told["gradients"][0], alone()["gradients"][0]

    for mine, theirs in zip(one.values(), other.values(), strict=True):
        assert (mine - theirs).norm() < 0.02 * theirs.norm()


# --- memory ---------------------------------------------------------------------------------------


def left_in_memory(rank: int, way: str) -> dict[str, tuple[int, int]]:
    plain = functools.partial(torch.autocast, "cpu", BF16)
    off = functools.partial(torch.autocast, "cpu", BF16, enabled=False)
    measured: dict[str, tuple[int, int]] = {}
    for name, context in (("halfstep", lower), ("torch", plain), ("off", off)):
        sharded = SHARDED[way](Model())
        for dtype in (BF16, FP32):
            measured[f"{name} {dtype}"] = alive_after(sharded, context, dtype)
    return measured


@pytest.mark.parametrize("way", ["resharded", "kept gathered", "checkpointed"])
def test_no_cast_of_a_gathered_weight_is_in_memory_after_its_op(way: str, pool: Pool) -> None:
    for measured in pool.run(left_in_memory, way):
        assert measured["halfstep torch.bfloat16"] == (0, 0)
        assert measured["torch torch.bfloat16"] == (0 if way == "checkpointed" else CAST_BYTES, 0)
        # And what fully_shard frees is freed.
        assert measured["halfstep torch.float32"] == measured["off torch.float32"]


# --- what fully_shard cannot do either ------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 64)
        self.aside: Any = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.up(x)
        self.aside = y * 2
        return y.relu()


class Aside(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()
        self.head = nn.Linear(64, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.inner(x))
        return out


def backward_of_what_was_kept_aside(rank: int) -> str:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    sharded = Aside()
    fully_shard(sharded.inner)
    fully_shard(sharded)
    with lower():
        sharded(data_of(0)[0][0].requires_grad_())
    with pytest.raises(halfstep.errors.CallOrderError) as raised:
        sharded.inner.aside.sum().backward()
    return str(raised.value)


def test_a_backward_pass_before_which_nothing_is_gathered_is_told(pool: Pool) -> None:
    for message in pool.run(backward_of_what_was_kept_aside):
        assert "weight (64, 128) that was freed after the forward pass" in message


def recomputed(rank: int) -> Any:
    sharded = SHARDED["resharded"](Model())
    x, target = data_of(0)[0]
    with lower():
        hidden = checkpoint(sharded, x.requires_grad_(), use_reentrant=False)
        F.cross_entropy(hidden.float(), target).backward()
    return x.grad


def test_a_sharded_model_inside_a_checkpoint(pool: Pool) -> None:
    plain = Model()
    x, target = data_of(0)[0]
    with lower():
        F.cross_entropy(plain(x.requires_grad_()).float(), target).backward()
    for grad in pool.run(recomputed):
        assert torch.equal(grad, x.grad)
