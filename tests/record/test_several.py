"""Records of two real ranks, of which one goes bad, and what the report says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.ranks import pool as pools
from tests.ranks.pool import Pool, RankFailedError
from tests.record import several

from halfstep._tools.record.read import read_run
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.text import sentences

pytestmark = pytest.mark.slow


def said(folder: Path) -> str:
    return "\n".join(sentence.text for sentence in sentences(summarize(read_run(folder))))


def test_inf_in_a_shard_of_rank_1(pool: Pool, tmp_path: Path) -> None:
    pool.run(several.record_training, str(tmp_path), "fsdp")
    run = read_run(tmp_path)
    (skipped,) = run.skipped
    assert (skipped.step, skipped.rank, skipped.reason) == (several.BAD, 1, "overflow")
    assert [(c.rank, c.parameters) for c in run.culprits] == [(1, ("0.weight",))]
    (origin,) = summarize(run).origins
    assert (origin.module, origin.ranks, origin.steps) == ("0", (1,), (several.BAD,))
    found = said(tmp_path)
    assert "step 12); inf or NaN came first in the gradients of `0` on rank 1 (inf or " in found
    # Each rank has measured what it holds, and together that is the model, each part once.
    sizes = {t.name: t.size for t in run.samples[0].tensors if t.kind == "parameter"}
    assert sizes["0.weight"] == 16


def test_a_loss_that_only_the_last_stage_has(pool: Pool, tmp_path: Path) -> None:
    pool.run(several.record_training, str(tmp_path), "pipeline")
    for rank in range(2):  # a stage without a loss has each step once
        lines = (tmp_path / f"rank{rank}.jsonl").read_text().splitlines()
        steps = [event for event in map(json.loads, lines) if event["event"] == "step"]
        assert [step["step"] for step in steps] == [*range(1, several.NUM_STEPS + 1)]
        assert [step["step"] for step in steps if not step["taken"]] == [several.BAD]
    run = read_run(tmp_path)
    good = [step for step in run.steps if step.step != several.BAD]
    assert [step.loss for step in good] == pytest.approx([1 / step.step for step in good])
    assert [step.step for step in run.steps if step.bad_losses == (1,)] == [several.BAD]
    assert [model.rank for model in run.models] == [None, 1]
    text = said(tmp_path)
    assert "The loss became inf or NaN at step 12 on rank 1" in text
    (beginning,) = summarize(run).origins
    assert beginning.ranks == (1,)  # though the gradients of both stages are NaN


def test_a_rank_that_raised_is_named(pool: Pool, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pools, "GRACE", 0.5)  # the other waits for it until it is killed
    with pytest.raises(RankFailedError):
        pool.run(several.record_training, str(tmp_path), "dies")
    text = said(tmp_path)
    assert "with an error on rank 1: `ValueError: rank 1 has had enough`" in text


def test_a_rank_that_was_killed_is_named(pool: Pool, tmp_path: Path) -> None:
    pool.run(several.record_training, str(tmp_path), "fsdp")
    file = tmp_path / "rank1.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:-1]))
    assert "The record stops on rank 1 after" in said(tmp_path)


def test_a_norm_that_lies_on_several_ranks_is_left_alone(pool: Pool, tmp_path: Path) -> None:
    assert pool.run(several.clip_with_pytorch, str(tmp_path)) == [16.0, 16.0]
    for rank in range(2):
        assert len(read_run(tmp_path / str(rank)).steps) == 3
