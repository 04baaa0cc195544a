"""Two ranks, one of which goes bad: neither waits for the other, and the bad one is diagnosed."""

from __future__ import annotations

import pytest
from tests.diagnose.sharded import on_request, watched, with_agreement, without_scaler
from tests.ranks.pool import Pool, RankFailedError

from halfstep._tools.diagnose.diagnose import INNOCENT
from halfstep.errors import RanksError

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("kind", ["fsdp", "tp", "ddp", "talking"])
def test_an_overflow_in_the_forward_pass_of_one_rank(kind: str, pool: Pool) -> None:
    (zero, notes), (one, _) = pool.run(watched, kind, "forward")
    assert one == [("range", "mul", "forward", True)]
    assert zero == (one if kind == "tp" else [])
    if kind == "fsdp":
        assert INNOCENT in notes
    if kind == "tp":
        assert any("the parameters of the model are DTensors" in note for note in notes)


@pytest.mark.parametrize("kind", ["fsdp", "tp", "ddp"])
def test_an_overflow_in_the_backward_pass_of_one_rank(kind: str, pool: Pool) -> None:
    (zero, notes), (one, _) = pool.run(watched, kind, "backward")
    assert [(verdict, op, phase) for verdict, op, phase, _ in one] == [
        ("scale", "_to_copy", "backward")
    ]
    assert zero == (one if kind == "tp" else [])
    if kind != "tp":
        assert INNOCENT in notes


@pytest.mark.parametrize("kind", ["fsdp", "tp", "ddp", "talking"])
def test_a_rank_that_traces_alone_waits_for_nobody(kind: str, pool: Pool) -> None:
    assert pool.run(without_scaler, kind)[1]


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("fsdp", "the model is sharded by FSDP, and a replay by one rank would wait"),
        ("tp", "the parameters of the model are DTensors"),
        ("talking", "c10d::allreduce_ is called in it"),
    ],
)
def test_a_step_that_needs_all_ranks_is_not_replayed(kind: str, why: str, pool: Pool) -> None:
    with pytest.raises(RankFailedError) as caught:
        pool.run(on_request, kind)
    for rank in range(2):
        error = caught.value.original(rank)
        assert isinstance(error, RanksError)
        assert f"this step cannot be replayed: {why}" in str(error)
        assert "`with halfstep.diagnose(scaler):`" in str(error)


def test_the_scaler_of_a_replay_decides_alone(pool: Pool) -> None:
    """The ranks replay a different number of times."""
    assert pool.run(with_agreement) == [("none", 128.0), ("range", 128.0)]  # after one backoff
