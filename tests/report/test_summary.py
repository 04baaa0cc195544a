"""The numbers of a run: steps, skips, scale, loss, where skips began."""

import json
import math
from dataclasses import asdict
from itertools import pairwise

import pytest
from tests.report import records

from halfstep._tools.json import to_plain
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import PolicySeen
from halfstep._tools.report.summarize import summarize


def summary_of(folder):
    return summarize(read_run(folder))


def written(folder, events):
    return summary_of(records.write(folder, [records.header(), *events]))


def test_the_header_is_told(tmp_path):
    facts = summary_of(records.healthy(tmp_path)).facts
    header = facts.header
    assert (header.torch, header.machine, header.cores) == ("2.13.0+cpu", "AMD EPYC 7B13", 2)
    assert header.command == ("train.py", "--lr", "1e-3")
    assert (facts.seconds_per_step, facts.duration, header.every) == (0.5, 30.0, 10)
    assert (facts.state, facts.error, facts.ranks) == ("ended", None, (0,))


@pytest.mark.parametrize(
    ("write", "state", "error"),
    [
        (records.failed, "failed", "ValueError: the loss is NaN"),
        (records.killed, "no end", None),
        (records.only_header, "no end", None),
    ],
)
def test_how_it_ended(tmp_path, write, state, error):
    facts = summary_of(write(tmp_path)).facts
    assert (facts.state, facts.error) == (state, error)


def test_skips_are_counted_and_those_of_the_start_up_told_apart(tmp_path):
    steps = summary_of(records.with_skips(tmp_path)).steps
    assert (steps.num, steps.num_taken, steps.num_skipped) == (100, 95, 5)
    assert steps.share_skipped == 0.05
    assert steps.skipped == (1, 2, 41, 42, 80)
    assert steps.start_up == (1, 2)
    assert (steps.num_skipped_later, steps.share_skipped_later) == (3, 0.03)
    assert (steps.longest_in_a_row, steps.skipped_at_end) == (2, 0)
    assert steps.reasons == {"overflow": 5}


def test_reasons_are_counted_the_most_frequent_first(tmp_path):
    reasons = ["norm", "loss", "loss", "overflow", "loss", "norm"]
    skips = [records.skip(n, reason=reason) for n, reason in enumerate(reasons, start=1)]
    assert list(written(tmp_path, skips).steps.reasons.items()) == [
        ("loss", 3),
        ("norm", 2),
        ("overflow", 1),
    ]


def halving(numbers, first=65536.0):
    return [records.skip(n, first / 2**k) for k, n in enumerate(numbers)]


def test_skips_that_never_end_are_no_start_up(tmp_path):
    steps = written(tmp_path, halving(range(1, 13))).steps
    assert steps.start_up == ()
    assert (steps.num_skipped_later, steps.skipped_at_end, steps.longest_in_a_row) == (12, 12, 12)


def test_the_start_up_ends_after_ten_steps_that_are_taken(tmp_path):
    taken = [records.step(n) for n in range(2, 12)]
    assert written(tmp_path / "a", [records.skip(1, 8.0), *taken]).steps.start_up == (1,)
    late = [records.skip(12, 4.0), records.step(13)]
    assert written(tmp_path / "b", [records.skip(1, 8.0), *taken, *late]).steps.start_up == (1,)
    early = [records.skip(11, 4.0), records.step(12)]
    found = written(tmp_path / "c", [records.skip(1, 8.0), *taken[:-1], *early]).steps.start_up
    assert found == (1, 11)


def test_only_overflow_on_the_way_down_is_start_up(tmp_path):
    loss = written(tmp_path / "a", [records.skip(1, reason="loss"), records.step(2)])
    assert loss.steps.start_up == ()
    again = [records.skip(1, 8.0), records.step(2), records.skip(3, 16.0), records.step(4)]
    assert written(tmp_path / "b", again).steps.start_up == (1,)


def test_several_optimizers_share_an_iteration(tmp_path):
    events = [
        each for n in range(1, 21) for each in (records.step(n), records.step(n, optimizer="SGD"))
    ]
    events[31] = records.skip(16, optimizer="SGD")
    events[33] = records.skip(17, optimizer="SGD")
    steps = written(tmp_path, events).steps
    assert (steps.num, steps.num_skipped, steps.skipped) == (20, 2, (16, 17))
    assert steps.longest_in_a_row == 2


def test_the_scale(tmp_path):
    scale = summary_of(records.with_skips(tmp_path)).scale
    assert (scale.first, scale.last, scale.min, scale.max) == (65536.0, 2048.0, 2048.0, 65536.0)
    assert scale.overflowed_at == 4096.0
    assert scale.stuck == ()


def test_the_smallest_scale_is_none_before_a_trial(tmp_path):
    scales = [1024.0, 512.0, 1.0, 256.0, 256.0]
    steps = [
        records.step(n, scale=scale, scale_after=after, taken=after > scale or n > 3)
        for n, (scale, after) in enumerate(pairwise(scales), start=1)
    ]
    scale = written(tmp_path / "a", steps).scale
    assert (scale.first, scale.last, scale.min, scale.max) == (1024.0, 256.0, 256.0, 1024.0)
    dip = [records.step(n, scale=scale) for n, scale in enumerate((1024.0, 512.0, 1024.0), start=1)]
    assert written(tmp_path / "c", dip).scale.min == 512.0  # nothing was skipped before it
    others = [records.step(n, scale=64.0, optimizer="SGD") for n in (1, 2, 3)]
    both = [event for pair in zip(dip, others, strict=True) for event in pair]
    assert written(tmp_path / "d", both).scale.min == 64.0
    stays = records.step(4, scale=1.0, scale_after=1.0)
    scale = written(tmp_path / "b", [*steps[:2], records.step(3, scale=1.0), stays]).scale
    assert (scale.before_last, scale.last, scale.min) == (1.0, 1.0, 1.0)


def test_no_scale_helped(tmp_path):
    bad = records.skip(2, 1.0, reason="non-finite at any scale")
    scale = written(tmp_path, [records.step(1), bad]).scale
    assert (scale.stuck, scale.overflowed_at) == ((2,), None)


def test_a_run_without_a_scaler_has_no_scale(tmp_path):
    summary = summary_of(records.bf16(tmp_path))
    assert (summary.scale, summary.has_scaler, summary.lower) == (None, False, "bf16")


def test_a_loss_that_became_nan(tmp_path):
    loss = summary_of(records.failed(tmp_path)).loss
    assert (loss.first_non_finite, loss.num_non_finite) == (7, 3)
    assert math.isnan(loss.last)
    assert (loss.first, loss.max, loss.min) == (4.0, 4.0, 2 + 2 / 6)
    assert loss.recent == pytest.approx(sum(2 + 2 / n for n in range(1, 7)) / 6)


def test_the_norm_is_that_of_steps_that_were_taken(tmp_path):
    norm = summary_of(records.with_skips(tmp_path)).norm
    assert (norm.max, norm.first_non_finite) == (1.25, None)


def test_what_nobody_measured_is_none(tmp_path):
    summary = written(tmp_path, [records.step(1, loss=None, norm=None)])
    assert (summary.loss, summary.norm, summary.gradients) == (None, None, None)


def test_where_skips_began(tmp_path):
    first, other = summary_of(records.with_skips(tmp_path)).origins
    assert (first.module, first.num, first.steps) == ("blocks.1.attn", 3, (41, 42, 80))
    assert first.parameters == ("blocks.1.attn.weight",)
    assert (other.module, other.steps) == (None, (1, 2))


def test_ranks_that_saw_the_same_skip_count_once(tmp_path):
    for rank in range(2):
        events = [records.header(rank=rank), records.skip(1), records.culprits(1, "head")]
        records.write(tmp_path, events, rank)
    (origin,) = summary_of(tmp_path).origins
    assert origin.num == 1


def test_policies_are_told_when_they_change(tmp_path):
    policies = [records.policy(step=n, text=t) for n, t in ((1, "a"), (5, "a"), (9, "b"))]
    summary = written(tmp_path, [records.step(1), *policies])
    assert summary.policies == (
        PolicySeen(1, "cpu", "float16", "a"),
        PolicySeen(9, "cpu", "float16", "b"),
    )


def test_notes_of_recorders_are_told_once(tmp_path):
    notes = [records.note(3, "compiled"), records.note(8, "compiled")]
    summary = written(tmp_path, [records.step(9), *notes])
    assert [(note.step, note.text) for note in summary.notes] == [(3, "compiled")]


def test_a_run_with_only_a_header(tmp_path):
    summary = summary_of(records.only_header(tmp_path))
    assert (summary.steps.num, summary.steps.share_skipped, summary.layers) == (0, 0.0, ())


def test_a_summary_is_the_same_twice_and_plain(tmp_path):
    run = read_run(records.with_skips(tmp_path))
    summary = summarize(run)
    assert summary == summarize(run)
    json.dumps(to_plain(asdict(summary)), allow_nan=False)


@pytest.mark.slow
def test_every_layer_of_a_large_run_is_told_with_all_its_samples(tmp_path):
    summary = summary_of(records.huge(tmp_path, num_steps=28, num_layers=200))
    assert len(summary.layers) == 200
    one_round = sum(records.bell(-8 + shift, 2).measured for shift in range(7))
    assert {(layer.num_samples, layer.measured) for layer in summary.layers} == {
        (28, 4 * one_round)
    }


def restarted(folder, num_starts, first_scale):
    """Write starts of a run that each skip three steps, then take twenty."""
    for n in range(num_starts):
        scale = first_scale(n)
        skips = [records.skip(i + 1, scale=scale / 2**i) for i in range(3)]
        taken = [records.step(4 + i, scale=scale / 8, scale_after=scale / 8) for i in range(20)]
        start = records.header(started=f"2026-01-01T{n:02}:00:00+00:00")
        records.write(folder, [start, *skips, *taken])
    return summary_of(folder).steps


def test_each_start_with_a_new_scaler_has_a_start_up_of_its_own(tmp_path):
    steps = restarted(tmp_path, 20, lambda n: 65536.0)
    assert (steps.num_skipped, len(steps.start_up), steps.num_skipped_later) == (60, 60, 0)
    assert (steps.later, steps.after_growth, steps.longest_in_a_row) == ((), (), 0)


def test_a_start_with_the_old_scaler_has_none(tmp_path):
    steps = restarted(tmp_path, 3, lambda n: 65536.0 / 8**n)
    assert (len(steps.start_up), steps.num_skipped_later) == (3, 6)
