"""The states of ranks under DistributedDataParallel, compared now and then through the store."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.ranks import cases
from tests.ranks.pool import Pool
from torch import Tensor, distributed, nn

import halfstep
from halfstep._scaler import ranks

EVERY = 3
"""Most loops here are short, and compare more often than every 100 updates."""

DIFFER = r"""update\(\): (\d+) updates ago the ranks had different states, and their weights may .*:
  scale 2\^10, growth tracker (\d+), (\d+) steps taken, 0 skipped: rank 0
  scale 2\^9, growth tracker (\d+), (\d+) steps taken, 1 skipped: rank 1
Cause: gradients that were changed on some ranks after DistributedDataParallel had averaged them"""


def scaler(**options: Any) -> halfstep.GradScaler:
    return halfstep.GradScaler(init_scale=1024.0, **options)


class Loop:
    """A training with DistributedDataParallel on this rank.

    Args:
        rank: Of this process.
        fused: The kind of optimizer.
        module: Wrapped already.
    """

    def __init__(
        self,
        rank: int,
        *,
        fused: bool = False,
        module: nn.Module | None = None,
        **options: Any,
    ) -> None:
        self.rank, self.module = rank, cases.ddp() if module is None else module
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-3, fused=fused)
        self.scaler = scaler(**options)

    def step(self, number: int, spoil: float | None = None, *, updates: bool = True) -> None:
        """Take one step; ``spoil`` is put into a gradient behind the all-reduce."""
        self.optimizer.zero_grad()
        cases.backward(self.scaler, self.module, cases.batch(self.rank, number))
        if spoil is not None:
            next(self.module.parameters()).grad.view(-1)[0] = spoil  # type: ignore[union-attr]
        if updates:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def steps(self, count: int) -> None:
        """Take steps in which nothing goes bad."""
        for number in range(count):
            self.step(number)


def often(rank: int, work: Callable[..., Any], *args: Any, every: int = EVERY) -> Any:
    """Work while the states are compared more often than every 100 updates."""
    original, ranks.CHECK_EVERY = ranks.CHECK_EVERY, every
    try:
        return work(rank, *args)
    finally:
        ranks.CHECK_EVERY = original


def num_ranks_here() -> int:
    """Return a sum over the ranks: a collective of the script's own."""
    ones = torch.ones(8)
    distributed.all_reduce(ones)
    assert ones.eq(ones[0]).all()
    return int(ones[0])


# --- ranks that differ ----------------------------------------------------------------------------


def spoilt_on_rank_1(rank: int, at: int, fused: bool) -> Any:
    loop = Loop(rank, fused=fused)
    for number in range(1, 1000):
        kind, message = cases.raised(
            lambda number=number: loop.step(number, math.inf if (rank, number) == (1, at) else None)
        )
        if kind:
            return number, kind, message
    return None


@pytest.mark.parametrize(("at", "raised_at", "fused"), [(2, 6, False), (3, 6, True), (4, 9, False)])
def test_a_gradient_that_goes_bad_on_one_rank_is_an_error_on_all(
    pool: Pool, at: int, raised_at: int, fused: bool
) -> None:
    for number, kind, message in pool.run(often, spoilt_on_rank_1, at, fused):
        assert (number, kind) == (raised_at, "RanksError")
        found = re.match(DIFFER, message)
        assert found is not None, message
        taken = raised_at - EVERY
        counts = [EVERY, taken, taken, taken - at, taken - 1]
        assert [int(each) for each in found.groups()] == counts


def test_it_is_an_error_within_200_updates(pool: Pool) -> None:
    for number, kind, message in pool.run(spoilt_on_rank_1, 1, False):
        assert (number, kind) == (200, "RanksError")
        assert message.startswith("update(): 100 updates ago")


def differing(rank: int, how: str) -> Any:
    loop = Loop(rank)
    loop.steps(2)
    if rank == 1:
        if how == "scale":
            loop.scaler.update(new_scale=64.0)
        if how == "checkpoint":
            loop.scaler.load_state_dict(scaler().state_dict())
    return cases.raised(lambda: loop.steps(4))


@pytest.mark.parametrize(
    ("how", "row"),
    [
        ("scale", "scale 2^6, growth tracker 3, 3 steps taken, 0 skipped: rank 1"),
        ("checkpoint", "scale 2^10, growth tracker 1, 1 step taken, 0 skipped: rank 1"),
    ],
)
def test_what_some_ranks_alone_have_loaded_or_set_is_told(pool: Pool, how: str, row: str) -> None:
    for kind, message in pool.run(often, differing, how):
        assert kind == "RanksError"
        assert row in message


def cured(rank: int) -> Any:
    loop = Loop(rank)
    saved = loop.scaler.state_dict()
    loop.step(0, math.inf if rank == 1 else None)
    found = [cases.raised(lambda: loop.steps(5))[0]]
    loop.scaler.load_state_dict(saved)
    found.append(cases.raised(lambda: loop.steps(4 * EVERY))[0])
    loop.step(0, math.inf if rank == 0 else None)
    return [*found, cases.raised(lambda: loop.steps(3 * EVERY))[0]]


def test_all_go_on_after_the_error_and_compare_anew(pool: Pool) -> None:
    assert pool.run(often, cured) == [["RanksError", "", "RanksError"]] * 2


@pytest.mark.ranks4
def test_every_rank_is_named(pool4: Pool) -> None:
    for kind, message in pool4.run(often, spoilt_on_two_ranks):
        assert kind == "RanksError"
        assert "  scale 2^10, growth tracker 3, 3 steps taken, 0 skipped: rank 0, 3\n" in message
        assert "  scale 2^9, growth tracker 1, 2 steps taken, 1 skipped: rank 1, 2\n" in message


def spoilt_on_two_ranks(rank: int) -> Any:
    loop = Loop(rank)
    loop.step(0)
    loop.step(1, math.nan if rank in (1, 2) else None)
    return cases.raised(lambda: loop.steps(4))


def scalers_of_one_rank(rank: int) -> Any:
    """Rank 0 has made one that it never uses, and trains something of its own with another."""
    if rank == 0:
        scaler()
        own = cases.model()
        optimizer, local = cases.sgd(own), scaler(process_group="local")
        for number in range(4 * EVERY):
            cases.backward(local, own, cases.batch(0, number))
            local.step(optimizer)
            local.update()
    loop = Loop(rank)
    loop.steps(15)
    loop.step(0, math.inf if rank == 1 else None)
    return cases.raised(lambda: loop.steps(2 * EVERY))[0]


def test_scalers_that_other_ranks_do_not_have_are_left_out(pool: Pool) -> None:
    assert pool.run(often, scalers_of_one_rank) == ["RanksError"] * 2


# --- ranks that do not ----------------------------------------------------------------------------


def healthy(rank: int) -> Any:
    loop = Loop(rank, growth_interval=50)
    for number in range(230):
        x = math.inf if number in (3, 99, 100, 150) and rank == 1 else 1.0
        loop.optimizer.zero_grad()
        cases.backward(loop.scaler, loop.module, cases.batch(rank, number) * x)
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
    return loop.scaler.counts(), loop.scaler.get_scale()


def test_a_healthy_training_with_skips_is_none_the_worse(pool: Pool) -> None:
    assert pool.run(healthy) == [((226, 4, 0, None), 256.0)] * 2


def two_optimizers(rank: int) -> Any:
    """One steps in every iteration, the other in every third, with an update of its own."""
    first, second = Loop(rank), Loop(rank)
    for number in range(30):
        first.step(number)
        if number % 3 == 0:
            second.scaler = first.scaler
            second.step(number)
    return first.scaler.counts().taken


def one_update_for_two(rank: int) -> Any:
    first, second = Loop(rank), Loop(rank)
    second.scaler = first.scaler
    for number in range(15):
        first.step(number, updates=False)
        second.step(number, updates=False)
        first.scaler.step(first.optimizer)
        first.scaler.step(second.optimizer)
        first.scaler.update()
    return first.scaler.counts().taken


def not_enabled(rank: int) -> Any:
    loop = Loop(rank, enabled=False)
    loop.steps(15)
    return loop.scaler.get_scale()


class Branches(nn.Module):
    """Each rank uses another branch in each step."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.branches = nn.ModuleList([cases.model(), cases.model(1)])
        self.next = rank

    def forward(self, x: Tensor) -> Tensor:
        self.next = 1 - self.next
        out: Tensor = self.branches[self.next](x)
        return out


def unused_parameters(rank: int) -> Any:
    module = nn.parallel.DistributedDataParallel(Branches(rank), find_unused_parameters=True)
    loop = Loop(rank, module=module)
    loop.steps(15)
    return loop.scaler.counts().taken


def accumulated(rank: int) -> Any:
    loop = Loop(rank)
    assert isinstance(loop.module, nn.parallel.DistributedDataParallel)
    for number in range(15):
        with loop.module.no_sync():
            for part in range(rank + 1):  # ranks may have any number of micro-batches
                cases.backward(loop.scaler, loop.module, cases.batch(rank, 100 + part))
        cases.backward(loop.scaler, loop.module, cases.batch(rank, number))
        loop.scaler.step(loop.optimizer)
        loop.scaler.update()
        loop.optimizer.zero_grad()
    return loop.scaler.counts().taken


def from_a_checkpoint(rank: int) -> Any:
    first = Loop(rank)
    first.steps(4)
    again = Loop(rank)
    again.scaler.load_state_dict(first.scaler.state_dict())
    again.steps(11)
    return again.scaler.counts().taken


@pytest.mark.parametrize(
    ("work", "found"),
    [
        (two_optimizers, 40),
        (one_update_for_two, 15),
        (not_enabled, 1.0),
        (unused_parameters, 15),
        (accumulated, 15),
        (from_a_checkpoint, 15),
    ],
)
def test_ranks_that_agree_are_left_alone(
    pool: Pool, work: Callable[[int], Any], found: float
) -> None:
    assert pool.run(often, work, group_timeout=10.0) == [found] * 2


# --- ranks that have not made the same calls ------------------------------------------------------


def left_out(rank: int, how: str) -> Any:
    """Rank 1 makes one update less, and the script has collectives of its own."""
    loop = Loop(rank)
    sums = []
    for number in range(4 * EVERY):
        if (rank, number) == (1, 1) and how == "raises":
            loop.step(number, updates=False)
            original, loop.optimizer.step = loop.optimizer.step, _fails  # type: ignore[method-assign]
            assert cases.raised(lambda: loop.scaler.step(loop.optimizer))[0] == "ZeroDivisionError"
            loop.optimizer.step = original  # type: ignore[method-assign]
            loop.scaler.update(new_scale=1024.0)
        else:
            loop.step(number, updates=(rank, number) != (1, 1))
        sums.append(num_ranks_here())
    return sums


def _fails() -> None:
    raise ZeroDivisionError


@pytest.mark.parametrize("how", ["calls nothing", "raises"])
def test_a_rank_with_fewer_updates_upsets_no_collective(pool: Pool, how: str) -> None:
    assert pool.run(often, left_out, how, group_timeout=10.0) == [[2] * 4 * EVERY] * 2


def ends_earlier(rank: int) -> Any:
    """Between two comparisons, and just when one has begun."""
    counts = []
    for number in (EVERY - 1, EVERY, 2 * EVERY - 1):
        loop = Loop(rank)
        loop.steps(number)
        counts.append(num_ranks_here())
    return counts


def test_a_loop_may_end_between_two_comparisons(pool: Pool) -> None:
    assert pool.run(often, ends_earlier) == [[2, 2, 2]] * 2


def without_a_store(rank: int) -> Any:
    loop = Loop(rank)
    original = ranks.default_store
    ranks.default_store = distributed.Store  # type: ignore[assignment]  # fails in each call
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            loop.steps(4 * EVERY)
    finally:
        ranks.default_store = original
    return [(str(each.message).split(":")[0], each.filename) for each in told]


def test_without_a_store_nothing_is_compared_and_that_is_said_once(pool: Pool) -> None:
    message = "the states of the ranks are no longer compared, since the store of the process group"
    assert pool.run(often, without_a_store) == [[(f"{message} has failed", __file__)]] * 2


def keys_left(rank: int) -> Any:
    loop = Loop(rank)
    loop.steps(8 * EVERY)
    num_ranks_here()
    store = ranks.default_store()
    keys = {number: f"halfstep/states/1/{number}" for number in range(100)}
    return [number for number, key in keys.items() if store.check([key])]


def test_the_store_keeps_the_last_comparison_only(pool: Pool) -> None:
    assert pool.run(often, keys_left) == [[8 * EVERY]] * 2


def worlds(rank: int, path: str) -> Any:
    """A scaler that lives in two worlds, and in the second another one."""
    lasting = scaler()
    for world in range(2):
        num_ranks_here()  # the other one may still connect
        distributed.destroy_process_group()
        store = distributed.FileStore(f"{path}{world}", 2)
        distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
        loop = Loop(rank)
        loop.scaler = lasting
        loop.steps(3 * EVERY)
    loop.scaler = halfstep.GradScaler(init_scale=8.0)
    loop.steps(9 * EVERY)
    return lasting.counts().taken


def test_scalers_of_several_worlds_are_told_apart(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(often, worlds, str(tmp_path / "store"), timeout=20.0) == [6 * EVERY] * 2
