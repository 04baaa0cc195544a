"""The pool itself: results, exceptions, a rank that waits for ever, a rank that dies."""

from __future__ import annotations

import datetime
import os
import re
import threading
import warnings

import pytest
import torch
import torch.distributed as dist
from tests.ranks import pool as pools
from tests.ranks.pool import Pool, RankFailedError
from torch import Tensor


class OddError(Exception):
    """Can be pickled, but not read back."""

    def __init__(self, one: str, two: str) -> None:
        super().__init__(one + two)


def add_up(rank: int, start: int) -> tuple[int, int, Tensor]:
    total = torch.tensor(float(rank + start))
    dist.all_reduce(total)
    return os.getpid(), torch.get_num_threads(), total


def raise_on(rank: int, ranks: list[int]) -> None:
    if rank in ranks:
        raise ValueError(f"bad weight on {rank}")
    dist.barrier()


def raise_odd(rank: int) -> None:
    raise OddError("one", "two")


def leave_alone(rank: int) -> tuple[str, str]:
    """Each waits for the other in a collective of its own."""
    seconds = datetime.timedelta(seconds=0.5)
    group = [dist.new_group([0, 1], timeout=seconds) for _ in range(2)][rank]
    with pytest.raises(RuntimeError) as caught:
        dist.barrier(group)
    return str(caught.value), type(caught.value).__name__


def die_or_wait(rank: int) -> None:
    if rank == 1:
        os.abort()
    threading.Event().wait()


def warn(rank: int) -> None:
    warnings.warn("not so good", UserWarning, stacklevel=1)


def return_what_cannot_be_pickled(rank: int) -> object:
    return lambda: rank


def test_returns_the_result_of_each_rank_and_keeps_the_processes(pool: Pool) -> None:
    first, second = pool.run(add_up, 1), pool.run(add_up, 5)
    assert [total.item() for *_, total in first + second] == [3.0, 3.0, 11.0, 11.0]
    pids = [pid for pid, *_ in first]
    assert len({*pids, os.getpid()}) == 3
    assert pids == [pid for pid, *_ in second]
    assert first[0][1] == 1


def test_what_a_rank_raises_is_raised_in_the_test(pool: Pool) -> None:
    pids = [pid for pid, *_ in pool.run(add_up, 0)]
    with pytest.raises(RankFailedError, match="bad weight on 1") as caught:
        pool.run(raise_on, [0, 1])
    assert "rank 0: Traceback" in str(caught.value)
    assert "in raise_on" in str(caught.value)
    assert isinstance(caught.value.original(1), ValueError)
    assert isinstance(caught.value.__cause__, ValueError)
    # All have answered, so that the same processes go on.
    assert pids == [pid for pid, *_ in pool.run(add_up, 0)]


def test_a_rank_that_waits_for_one_that_raised_fails_at_once(pool: Pool) -> None:
    pids = [pid for pid, *_ in pool.run(add_up, 0)]
    with pytest.raises(RankFailedError, match=r"rank 0: (?s:.*) barrier") as caught:
        pool.run(raise_on, [1], group_timeout=1000.0)
    assert isinstance(caught.value.original(0), RuntimeError)
    assert str(caught.value.__cause__) == "bad weight on 1"  # the one that came first
    assert pids == [pid for pid, *_ in pool.run(add_up, 0)]


def test_a_collective_gives_up_in_time(pool: Pool) -> None:
    errors, kinds = zip(*pool.run(leave_alone), strict=True)
    assert set(kinds) == {"RuntimeError"}
    # The first to give up closes its connection, which the other one may see.
    assert re.search("[Tt]imed out", "".join(errors))


def test_a_rank_that_dies_is_told_and_one_that_waits_for_ever_is_killed(pool, monkeypatch):
    monkeypatch.setattr(pools, "GRACE", 0.5)
    with pytest.raises(
        RankFailedError, match="rank 1: the process died with exit code -6"
    ) as caught:
        pool.run(die_or_wait)
    assert "rank 0: no answer" in str(caught.value)
    assert str(caught.value).count("in die_or_wait") == 2  # where they stood
    assert caught.value.__cause__ is None
    assert pool.run(add_up, 0)[1][2] == 1.0


def test_a_warning_is_an_error(pool: Pool) -> None:
    with pytest.raises(RankFailedError, match="UserWarning: not so good"):
        pool.run(warn)


def test_what_cannot_be_pickled_is_told(pool: Pool) -> None:
    with pytest.raises(RankFailedError, match="onetwo") as caught:
        pool.run(raise_odd)
    assert caught.value.original(0) is None
    with pytest.raises(RankFailedError, match="return_what_cannot_be_pickled"):
        pool.run(return_what_cannot_be_pickled)


@pytest.mark.ranks4
def test_four_ranks(pool4: Pool) -> None:
    assert [total.item() for *_, total in pool4.run(add_up, 0)] == [6.0] * 4
