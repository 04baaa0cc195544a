"""Every parallel form ends where one process ends: parameters, optimizer state, scale, skips.

Two ranks in ``make test``; four (marked ``ranks4``) in ``make test-ranks``. Arithmetic that is the
same must give the same bits. Where sums are made in another order (a norm over shards, a matrix
product over ranks) the difference stays below ``BOUND``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from tests.ranks import parallel
from tests.ranks.pool import Pool
from tests.ranks.training import Fault, Job, Plan, Step, Trained, alone, random_faults, run_job
from torch import Tensor

BOUND = 2e-6  # of parameters of about 1 after 12 steps; the largest that was seen is 2e-7


@dataclass(frozen=True)
class Form:
    """A parallel form, and what the reference must do to be the same arithmetic."""

    make: Callable[..., Job]
    args: tuple[Any, ...] = ()
    num_chunks: int = 1
    same_bits: bool = True
    # The gradients of DDP are the same on all ranks, so that halfstep asks no other rank: the bad
    # loss of one is an overflow on all, and a fault in a gradient of one alone cannot be.
    asks_ranks: bool = True
    # PyTorch has no fused SGD for DTensor. Its fused AdamW rounds the last entries of a shard,
    # which fill no vector, otherwise than the same ones inside the whole tensor.
    is_sharded: bool = False
    reference: Callable[[Plan, int], Job] = alone

    def work(self, rank: int, plans: list[Plan], num_ranks: int) -> list[Trained]:
        return [run_job(plan, self.make(rank, plan, *self.args), rank, num_ranks) for plan in plans]


def sharded(make: Callable[..., Job], *args: Any, **changed: Any) -> Form:
    """Return a form whose parameters are DTensors; by default the ranks share the batch."""
    return Form(make, args, is_sharded=True, **{"num_chunks": 2, **changed})


MICRO = parallel.NUM_MICROBATCHES
TWO = {
    "ddp": Form(parallel.ddp, num_chunks=2, asks_ranks=False),
    "fsdp": sharded(parallel.fsdp),
    "fsdp offloaded": sharded(parallel.fsdp_offloaded),
    "hsdp 2x1": sharded(parallel.hsdp, 2),
    "hsdp 1x2": sharded(parallel.hsdp, 1),
    "tensor": sharded(parallel.tensor_parallel, num_chunks=1, same_bits=False),
    "fsdp 2, tensor 1": sharded(parallel.fsdp_and_tensor_parallel, 2),
    "fsdp 1, tensor 2": sharded(
        parallel.fsdp_and_tensor_parallel, 1, num_chunks=1, same_bits=False
    ),
    "stages by hand": Form(parallel.stages_by_hand),
    "gpipe": Form(parallel.gpipe, num_chunks=MICRO),
    "1f1b": Form(parallel.one_forward_one_backward, num_chunks=MICRO),
    "experts": Form(parallel.experts, num_chunks=2, reference=parallel.experts_alone),
}

# Four gradients are added up in another order than in one process.
FOUR = {
    "ddp": Form(parallel.ddp, num_chunks=4, same_bits=False, asks_ranks=False),
    "fsdp": sharded(parallel.fsdp, num_chunks=4, same_bits=False),
    "hsdp 2x2": sharded(parallel.hsdp, 2, num_chunks=4, same_bits=False),
    "tensor": sharded(parallel.tensor_parallel, num_chunks=1, same_bits=False),
    "fsdp 2, tensor 2": sharded(parallel.fsdp_and_tensor_parallel, 2, same_bits=False),
    "stages by hand": Form(parallel.stages_by_hand),
    "gpipe": Form(parallel.gpipe, num_chunks=MICRO),
    "1f1b": Form(parallel.one_forward_one_backward, num_chunks=MICRO),
    "1f1b 2, fsdp 2": sharded(parallel.pipeline_of_fsdp, 2, num_chunks=1, same_bits=False),
    "experts": Form(
        parallel.experts, num_chunks=4, same_bits=False, reference=parallel.experts_alone
    ),
}


def plans_of(form: Form, num_ranks: int) -> list[Plan]:
    """Return four runs that cover optimizers, fused and not, clipped and not, and faults."""
    last = num_ranks - 1
    held = "gradient" if form.asks_ranks else "activation"
    by_hand = {
        2: Fault(held, last),
        3: Fault(held, 0),
        5: Fault("activation", last),
        6: Fault("batch", last),
        10: Fault("activation", 0),
    }
    kinds = ("batch", "activation", held)
    drawn = [random_faults(seed, num_ranks, kinds) for seed in range(3)]
    return [
        Plan(1, "SGD", False, None, 2.0**10, by_hand),
        Plan(2, "SGD", not form.is_sharded, 0.5, 2.0**5, drawn[0]),
        Plan(3, "AdamW", False, 0.5, 1000.0, drawn[1]),
        Plan(4, "AdamW", True, None, 2.0**16, drawn[2]),
    ]


def check(pool: Pool, form: Form) -> None:
    plans = plans_of(form, pool.num_ranks)
    ranks = pool.run(form.work, plans, pool.num_ranks)
    for number, plan in enumerate(plans):
        told = plan if form.asks_ranks else replace(plan, faults=overflows(plan.faults))
        one = run_job(told, form.reference(told, form.num_chunks), None, pool.num_ranks)
        trained = [rank[number] for rank in ranks]
        same_bits = form.same_bits and plan.max_norm is None
        same_bits = same_bits and not (form.is_sharded and plan.fused)
        for rank in trained:
            assert rank.steps == trained[0].steps  # to the last bit, norms too
            assert rank.bad_ranks == trained[0].bad_ranks
            check_steps(rank.steps, one.steps)
        for name in ("parameters", "state"):
            check_tensors([getattr(rank, name) for rank in trained], getattr(one, name), same_bits)
        for step, fault in plan.faults.items():
            if fault.kind == "gradient":
                assert trained[0].bad_ranks[step] == fault.rank


def overflows(faults: Mapping[int, Fault]) -> dict[int, Fault]:
    """Return faults at the same steps that leave the loss finite."""
    return {step: Fault("activation", fault.rank) for step, fault in faults.items()}


def check_steps(ours: list[Step], theirs: list[Step]) -> None:
    without_norm = [step._replace(norm=None) for step in ours]
    assert without_norm == [step._replace(norm=None) for step in theirs]
    for our, their in zip(ours, theirs, strict=True):
        if our.norm is not None:
            assert math.isclose(our.norm, their.norm, rel_tol=1e-5)


def check_tensors(ranks: list[dict[str, Tensor]], one: dict[str, Tensor], same_bits: bool) -> None:
    """Each rank has the values of the one process, and together the ranks have them all."""
    assert {name for rank in ranks for name in rank} == set(one)
    for rank in ranks:
        for name, value in rank.items():
            if same_bits:
                assert torch.equal(value, one[name]), name
            else:
                torch.testing.assert_close(value, one[name], rtol=0.0, atol=BOUND, msg=name)


@pytest.mark.parametrize("name", TWO)
def test_two_ranks_train_as_one(pool: Pool, name: str) -> None:
    check(pool, TWO[name])


@pytest.mark.ranks4
@pytest.mark.parametrize("name", FOUR)
def test_four_ranks_train_as_one(pool4: Pool, name: str) -> None:
    check(pool4, FOUR[name])
