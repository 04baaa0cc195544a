"""Models whose weights fully_shard spreads over two ranks, and DDP: as one rank alone would train.

A step has two batches: one on each rank, or both on both; one rank alone has both. The mean of two
gradients has one rounding, as their sum: all is equal bit for bit.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.sharding import SHARDED, Model, data_of, lower, three_steps
from tests.ranks.pool import Pool
from torch.utils.checkpoint import checkpoint

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


def trained_in_one_context(rank: int, way: str) -> Any:
    spread = SHARDED[way](Model())
    with lower():
        return three_steps(spread, rank, nullcontext)


@pytest.mark.parametrize("way", ["resharded", "kept gathered"])
def test_no_cast_is_of_an_earlier_gather(way: str, pool: Pool) -> None:
    """A gather counts no write: in a context around many steps an old cast would look new."""
    reference = alone()
    for rank, told in enumerate(pool.run(trained_in_one_context, way)):
        assert told["losses"] == reference["losses"][rank::2]
        for mine, theirs in zip(told["gradients"], reference["gradients"], strict=True):
            assert all(map(torch.equal, mine.values(), theirs.values()))
        assert all(map(torch.equal, told["evaluations"], reference["evaluations"]))


# --- inside others --------------------------------------------------------------------------------


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
