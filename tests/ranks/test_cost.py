"""What a step sends to the other ranks, counted on PyTorch's fake process group."""

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist

BENCHMARKS = str(Path(__file__).parents[2] / "benchmarks")

FOUND_INF = ("all_reduce max", 48)
"""12 int32."""

NORM = ("all_reduce sum", 8)
"""One float64."""

LAYOUTS = ["plain", "FSDP2", "FSDP2 + TP"]
CALLS = {
    "step()": [FOUND_INF],
    "unscale_(), step()": [FOUND_INF, FOUND_INF],  # a rank may have written to its gradients
    "step(max_norm)": [NORM, FOUND_INF],
}


@pytest.fixture(scope="module")
def scripts() -> Iterator[tuple[ModuleType, ModuleType]]:
    """The benchmarks ``ranks_counts`` and ``ranks_cost``, which import each other by name."""
    sys.path.insert(0, BENCHMARKS)
    try:
        yield importlib.import_module("ranks_counts"), importlib.import_module("ranks_cost")
    finally:
        sys.path.remove(BENCHMARKS)


@pytest.mark.parametrize("optimizer", ["plain", "fused"])
@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_step_is_one_small_collective_however_many_ranks_and_tensors(
    scripts: tuple[ModuleType, ModuleType], layout: str, call: str, optimizer: str
) -> None:
    counts, cost = scripts
    for ranks, tensors in [(4, 1), (10_000, 30)]:
        with counts.fake_ranks(ranks):
            sent = cost.sent(layout, tensors, optimizer, call)
        assert [(each.name, each.nbytes) for each in sent] == CALLS[call]
        assert {each.ranks for each in sent} == {ranks}


def test_parameters_of_ddp_send_nothing(scripts: tuple[ModuleType, ModuleType]) -> None:
    counts, cost = scripts
    with counts.fake_ranks(4):
        model = counts.ddp()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        make, clip = counts.scalers("DDP")["halfstep"]
        for call in (counts.step, counts.unscale_then_step, clip):
            optimizer = cost.OPTIMIZERS["plain"](model.parameters())
            assert counts.counted(make(), call, optimizer).found == []


def test_gradients_on_several_meshes_are_one_collective_of_all_ranks(scripts):
    counts, cost = scripts
    with counts.fake_ranks(8):
        model = counts.fsdp2_and_tp_of_some()
        for param in model.parameters():
            param.grad = torch.zeros_like(param)
        assert len({param.device_mesh for param in model.parameters()}) == 2
        make, clip = counts.scalers("FSDP2")["halfstep"]
        found = counts.counted(make(), clip, cost.OPTIMIZERS["plain"](model.parameters())).found
    assert [(each.name, each.nbytes, each.ranks) for each in found] == [(*NORM, 8), (*FOUND_INF, 8)]


# --- what stands beside it in docs/distributed.md -------------------------------------------------


def test_clipping_dtensors_with_torch_sends_a_number_for_each_of_them(scripts):
    counts, cost = scripts
    with counts.fake_ranks(4):
        for tensors in (3, 30):
            optimizer = cost.OPTIMIZERS["plain"](cost.parameters("FSDP2", tensors))
            scaler = torch.amp.GradScaler("cpu")
            found = counts.counted(scaler, counts.clip_with_torch, optimizer).found
            assert [str(each) for each in found] == [
                "all_reduce max 4 B of 4",
                f"all_reduce sum {4 * tensors} B of 4",
            ]


def test_what_is_counted_is_what_is_sent(scripts: tuple[ModuleType, ModuleType]) -> None:
    counts, _ = scripts
    with counts.fake_ranks(4), counts.Collectives() as collectives:
        half = dist.new_group([2, 3])
        dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX)
        dist.all_reduce(torch.ones(2, dtype=torch.float64), group=half, async_op=True).wait()
        torch.ones(1).item()
    assert [str(each) for each in collectives.found] == [
        "all_reduce max 12 B of 4",
        "all_reduce sum 16 B of 2",
    ]
    assert collectives.num_waits == 1
