"""Where PyTorch's scalers let ranks disagree, on two ranks, and the same with halfstep.

Each case has inf in a gradient of rank 1 only. The numbers, A23 to A27 and R1, are those of the
table in docs/coming_from.md.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.ranks import cases
from tests.ranks.pool import Pool, RankFailedError
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

import halfstep

SCALERS = {
    "torch": torch.amp.GradScaler,
    "sharded": ShardedGradScaler,
    "halfstep": halfstep.GradScaler,
}
STEPPED, SKIPPED = (True, 8.0), (False, 4.0)  # was a step taken, and the scale after it


def step(
    scaler: halfstep.GradScaler, gradients: list[tuple[nn.Parameter, Tensor]], fused: bool = False
) -> tuple[bool, float]:
    """Step with these gradients; return whether the last parameter moved, and the scale."""
    for parameter, gradient in gradients:
        parameter.grad = gradient
    optimizer = torch.optim.SGD([parameter for parameter, _ in gradients], lr=1.0, fused=fused)
    last = gradients[-1][0].detach()
    before = local(last).clone()
    scaler.scale(torch.ones(()))
    scaler.step(optimizer)
    scaler.update()
    return not torch.equal(local(last), before), scaler.get_scale()


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def plain(value: float) -> tuple[nn.Parameter, Tensor]:
    return nn.Parameter(torch.zeros(2)), torch.full((2,), value)


def distributed(value: float, placement: Placement) -> tuple[nn.Parameter, Tensor]:
    mesh = init_device_mesh("cpu", (2,))
    parameter = nn.Parameter(distribute_tensor(torch.zeros(4), mesh, [placement]))
    shape = parameter.to_local().shape  # type: ignore[attr-defined]
    return parameter, DTensor.from_local(torch.full(shape, value), mesh, [placement])


def one_bad_shard(rank: int, kind: str, replicated_first: bool) -> tuple[bool, float]:
    gradients = [
        distributed(1.0, Replicate()),
        distributed(math.inf if rank == 1 else 1.0, Shard(0)),
    ]
    scaler = SCALERS[kind]("cpu", init_scale=8.0)
    return step(scaler, gradients if replicated_first else gradients[::-1])


def mixed(rank: int, kind: str) -> tuple[bool, float]:
    gradients = [distributed(math.inf if rank == 1 else 1.0, Shard(0)), plain(1.0)]
    return step(SCALERS[kind]("cpu", init_scale=8.0), gradients)


def stages(rank: int, kind: str, fused: bool) -> tuple[bool, float]:
    world = {} if kind == "torch" else {"process_group": dist.group.WORLD}
    scaler = SCALERS[kind]("cpu", init_scale=8.0, **world)
    return step(scaler, [plain(math.inf if rank == 1 else 1.0)], fused)


def test_a23_found_inf_is_reduced_as_the_first_gradient_is_placed(pool: Pool) -> None:
    assert pool.run(one_bad_shard, "torch", True) == [STEPPED, SKIPPED]
    assert pool.run(one_bad_shard, "torch", False) == [SKIPPED, SKIPPED]


@pytest.mark.parametrize("replicated_first", [True, False])
def test_a23_halfstep_agrees_in_any_order(pool: Pool, replicated_first: bool) -> None:
    assert pool.run(one_bad_shard, "halfstep", replicated_first) == [SKIPPED, SKIPPED]


def test_a24_dtensor_and_plain_gradients_in_one_optimizer_raise(pool: Pool) -> None:
    with pytest.raises(RankFailedError, match=r"mixed torch\.Tensor and DTensor"):
        pool.run(mixed, "torch")


def test_a24_halfstep_takes_both(pool: Pool) -> None:
    assert pool.run(mixed, "halfstep") == [SKIPPED, SKIPPED]


def test_a25_found_inf_of_plain_gradients_is_never_shared(pool: Pool) -> None:
    assert pool.run(stages, "torch", False) == [STEPPED, SKIPPED]


@pytest.mark.parametrize("fused", [False, True])
def test_a25_halfstep_shares_it_with_the_process_group(pool: Pool, fused: bool) -> None:
    assert pool.run(stages, "halfstep", fused) == [SKIPPED, SKIPPED]


def behind_the_all_reduce(rank: int, kind: str, **options: Any) -> list[float]:
    """Return the scale and a weight after some steps of DDP, the first with inf on rank 1."""
    module = cases.ddp()
    scaler, optimizer = SCALERS[kind]("cpu", init_scale=8.0, **options), cases.sgd(module)
    for step in range(5):
        optimizer.zero_grad()
        cases.backward(scaler, module, cases.batch(rank, step))
        if rank == 1 and step == 0:
            next(module.parameters()).grad.fill_(math.inf)  # type: ignore[union-attr]
        scaler.step(optimizer)
        scaler.update()
    return [scaler.get_scale(), next(module.parameters()).flatten()[0].item()]


def behind_the_all_reduce_with_a_group(rank: int) -> list[float]:
    return behind_the_all_reduce(rank, "halfstep", process_group=dist.group.WORLD)


def test_r1_ranks_under_ddp_drift_apart_without_a_word(pool: Pool) -> None:
    first, second = pool.run(behind_the_all_reduce, "torch")
    assert (first[0], second[0]) == (8.0, 4.0)
    assert first[1] != second[1]


def test_r1_with_a_process_group_all_ranks_of_ddp_skip(pool: Pool) -> None:
    first, second = pool.run(behind_the_all_reduce_with_a_group)
    assert first == second
    assert first[0] == 4.0


def test_a26_a_fused_optimizer_hides_found_inf_from_the_sharded_scaler(pool: Pool) -> None:
    assert pool.run(stages, "sharded", False) == [SKIPPED, SKIPPED]
    assert pool.run(stages, "sharded", True) == [STEPPED, SKIPPED]


def test_a27_the_sharded_scaler_makes_a_float16_loss_inf() -> None:
    loss = torch.tensor(4.0, dtype=torch.float16)
    assert ShardedGradScaler("cpu", init_scale=2.0**15).scale(loss).item() == math.inf


def test_a27_halfstep_scales_a_float16_loss_in_float32() -> None:
    weight = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    scaler = halfstep.GradScaler(init_scale=2.0**15)
    scaled = scaler.scale((weight * 4.0).sum().half())
    assert (scaled.item(), scaled.dtype) == (4.0 * 2.0**15, torch.float32)
    scaled.backward()
    scaler.step(optimizer)
    scaler.update()
    assert scaler.outcome(optimizer).taken
    assert weight.item() == -1.0
