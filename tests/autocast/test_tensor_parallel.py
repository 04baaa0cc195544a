"""Models whose weights are DTensors: tensor parallel on two ranks, also with fully_shard.

Each rank multiplies with its part of a weight. Where the parts of a product are added up (in lower
precision, as they are computed) the last bits are not those of one rank alone.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tests.autocast.sharding import (
    Alive,
    Block,
    Model,
    alive_after,
    data_of,
    dtypes_of_outputs,
    groups,
    lower,
    three_steps,
    whole,
)
from tests.device import DEVICE
from tests.ranks.pool import Pool
from torch import Tensor, nn

import halfstep
from halfstep import autocast, keep

pytestmark = pytest.mark.slow

BF16 = torch.bfloat16
BOUND = 2.0**-6  # of the norm of a gradient or an output: bfloat16 has 8 bits


def across(model: nn.Module, mesh: Any = None) -> nn.Module:
    """Split the products of blocks by columns, then by rows."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = mesh or init_device_mesh("cpu", (2,))
    for block in model.modules():
        if isinstance(block, Block):
            parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def sequence(model: nn.Module) -> nn.Module:
    """Split the rows of the input between blocks too: there each rank has some samples."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    rows = Shard(0)
    plan = {
        "norm": SequenceParallel(sequence_dim=0),
        "up": ColwiseParallel(input_layouts=rows),
        "down": RowwiseParallel(output_layouts=rows, use_local_output=False),
    }
    mesh = init_device_mesh("cpu", (2,))
    for block in model.modules():
        if isinstance(block, Block):
            parallelize_module(block, mesh, plan)
    first = PrepareModuleInput(
        input_layouts=Replicate(), desired_input_layouts=rows, use_local_output=False
    )
    head = ColwiseParallel(input_layouts=rows, output_layouts=Replicate())
    parallelize_module(model, mesh, {"blocks.0": first, "head": head})
    return model


def both(model: nn.Module, *, shape: tuple[int, int]) -> nn.Module:
    """Shard what is parallel."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    across(model, mesh["tensor"])
    for block in model.modules():
        if isinstance(block, Block):
            fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "tensor": across,
    "sequence": sequence,
    "sharded 2x1": functools.partial(both, shape=(2, 1)),
    "sharded 1x2": functools.partial(both, shape=(1, 2)),
}


# --- training -------------------------------------------------------------------------------------


def trained(rank: int, way: str) -> Any:
    return three_steps(WAYS[way](Model()), None)


@pytest.mark.parametrize("way", WAYS)
def test_training_is_that_of_one_rank(way: str, pool: Pool) -> None:
    reference = three_steps(Model(), None)
    for told in pool.run(trained, way):
        if way == "sharded 2x1":  # each rank has all of a product
            assert told["losses"] == reference["losses"]
            assert all(map(torch.equal, told["evaluations"], reference["evaluations"]))
        # Later steps start from parameters that AdamW moves by signs of small gradients.
        first = told["gradients"][0], reference["gradients"][0]
        for mine, theirs in zip(*(each.values() for each in first), strict=True):
            assert (mine - theirs).norm() <= BOUND * theirs.norm()
        assert told["losses"] == pytest.approx(reference["losses"], rel=BOUND)


def evaluated(rank: int, way: str, fused: bool) -> list[tuple[Tensor, Tensor]]:
    """Return after each step what the model gives, twice, and a copy of it made that moment."""
    trains = WAYS[way](Model())
    optimizer = torch.optim.AdamW(groups(trains), lr=0.01, fused=fused, foreach=False)
    results = []
    x, target = data_of(0)[0]
    for _ in range(3):
        with lower():
            F.cross_entropy(trains(x).float(), target).backward()
        optimizer.step()
        optimizer.zero_grad()
        fresh = WAYS[way](Model())
        copies = {name: whole(p.detach()) for name, p in trains.named_parameters()}
        with torch.no_grad(), lower():
            for name, param in fresh.named_parameters():
                param.copy_(placed(copies[name], param))
            trains(x)
            results.append((whole(trains(x)), whole(fresh(x))))
    return results


def placed(tensor: Tensor, like: Any) -> Any:
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor, like.device_mesh, like.placements)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_no_stale_cast_after_a_step(way: str, fused: bool, pool: Pool) -> None:
    for results in pool.run(evaluated, way, fused):
        for mine, fresh in results:
            assert torch.equal(mine, fresh)
        assert not torch.equal(results[0][0], results[1][0])


# --- memory ---------------------------------------------------------------------------------------


def left_in_memory(rank: int, way: str) -> tuple[int, int]:
    return alive_after(WAYS[way](Model()), lower, BF16)


@pytest.mark.parametrize(
    ("way", "in_forward"),
    # The parts of four large weights, or all of them.
    [("tensor", 4 * 128 * 128 * 2), ("sharded 2x1", 4 * 128 * 256 * 2)],
)
def test_casts_left_in_memory(way: str, in_forward: int, pool: Pool) -> None:
    for alive in pool.run(left_in_memory, way):
        assert alive == (in_forward, 0)


def released(rank: int, way: str) -> tuple[int, bool]:
    spread = WAYS[way](Model())
    weight = weakref.ref(spread.blocks[0].up.weight)  # type: ignore[index,union-attr]
    with Alive() as alive, torch.no_grad(), lower():
        for _ in range(3):
            spread(data_of(0)[0][0])
        left = alive.bytes(BF16)
    del spread
    gc.collect()
    return left, weight() is None


@pytest.mark.parametrize("way", WAYS)
def test_nothing_keeps_weights_or_their_casts(way: str, pool: Pool) -> None:
    assert pool.run(released, way) == [(0, True), (0, True)]


def written_through_a_state_dict(rank: int) -> tuple[Tensor, Tensor]:
    """As torch.distributed.checkpoint loads: no version of the weight counts it."""
    spread: Any = across(Model())
    x = data_of(0)[0][0]
    with torch.no_grad(), lower():
        for _ in range(3):
            spread(x)
        version = spread.blocks[0].up.weight._version
        state = spread.state_dict()
        for name in ("blocks.0.up.weight", "blocks.1.down.weight"):
            state[name].to_local().mul_(2)
        assert spread.blocks[0].up.weight._version == version
        del state
        after = whole(spread(x))
        fresh: Any = Model()
        fresh.blocks[0].up.weight.mul_(2)
        fresh.blocks[1].down.weight.mul_(2)
        return after, whole(across(fresh)(x))


def test_a_write_that_pytorch_does_not_count_is_seen(pool: Pool) -> None:
    for after, fresh in pool.run(written_through_a_state_dict):
        assert torch.equal(after, fresh)


# --- islands, rules, traces -----------------------------------------------------------------------

RULES = "standard; @head:fp32; linear@blocks.1.up:fp32; gelu@blocks.0:fp32"


def with_rules(rank: int, way: str) -> dict[str, str]:
    spread = WAYS[way](Model())
    return dtypes_of_outputs(spread, lambda: autocast(DEVICE, BF16, policy=RULES, module=spread))[0]


def with_islands(rank: int, way: str) -> dict[str, str]:
    spread = WAYS[way](Model())
    keep(spread, "*.norm", "blocks.1", "head")
    return dtypes_of_outputs(spread, lower)[0]


@pytest.mark.parametrize("way", WAYS)
def test_rules_for_modules_and_islands_hold(way: str, pool: Pool) -> None:
    ruled, kept = Model(), Model()
    keep(kept, "*.norm", "blocks.1", "head")
    rules, _ = dtypes_of_outputs(ruled, lambda: autocast(DEVICE, BF16, policy=RULES, module=ruled))
    islands, _ = dtypes_of_outputs(kept, lower)

    assert rules["blocks.1.up"] == islands["blocks.1.up"] == "torch.float32"
    assert pool.run(with_rules, way) == [rules, rules]
    assert pool.run(with_islands, way) == [islands, islands]


def traced(rank: int, way: str) -> set[tuple[str, ...]]:
    return rows_of(WAYS[way](Model()))


def rows_of(model: nn.Module) -> set[tuple[str, ...]]:
    x, target = data_of(0)[0]
    with halfstep.trace(model) as trace:
        with lower():
            loss = F.cross_entropy(model(x).float(), target)
        loss.backward()
    ours = ("native_layer_norm", "addmm", "gelu", "mm", "gelu_backward")
    return {
        (row.phase, row.module, row.op, row.compute, str(row.rule))
        for row in trace.ops
        if row.op in ours
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_trace_names_modules_and_rules_as_of_one_rank(way: str, pool: Pool) -> None:
    expected = rows_of(Model())
    for rows in pool.run(traced, way):
        assert rows == expected
