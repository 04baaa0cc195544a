"""One cause, one headline: what followed from it stands behind it, and brings no cure."""

import math

import pytest
from tests.report import records
from tests.report.records import counted, diagnosis, sample, skip, step, tensor
from tests.report.test_sentences import ADVICE, codes, said, said_of, the_one

from halfstep._tools.cli import main


def nan_from(first, *extra):
    """Return the events of a loss that stays NaN from a step on, and poisons the weights."""
    nan = counted({}, nan=9)
    rows = [tensor("output", "head", nan, "float16"), tensor("parameter", "head.weight", nan)]
    steps = [step(n, loss=math.nan, norm=math.nan) for n in range(first, 101)]
    return [*steps, sample(50, rows), *extra]


def test_a_nan_is_one_problem_and_the_rest_followed(tmp_path):
    found = said(tmp_path, *nan_from(20, diagnosis(20)))
    assert [sentence.follows for sentence in found] == [False, True, True, True]
    assert found[0].text.startswith("Step 20 went bad in `linear`")
    assert [sentence.cure for sentence in found if sentence.follows] == [(), (), ()]
    weights = the_one(found, "The weights of")
    assert "first sampled at step 50" in weights.text
    assert weights.text.endswith("restore a checkpoint from before step 20.")


def test_an_output_that_comes_close_to_overflow_afterwards_followed(tmp_path):
    rows = [tensor("output", "head", counted({16: 8}, nan=2), "float16")]
    bad = [step(n, loss=math.nan) for n in range(20, 101)]
    after = the_one(said(tmp_path / "a", *bad, sample(50, rows), diagnosis(20)), "came within")
    assert (after.follows, after.cure) == (True, ())
    before = the_one(said(tmp_path / "b", sample(10, rows), *bad, diagnosis(20)), "came within")
    assert not before.follows


def test_without_a_diagnosis_the_loss_is_the_headline(tmp_path):
    first, *others = said(tmp_path, *nan_from(20))
    assert first.text.startswith("The loss became NaN at step 20")
    assert codes(first) == [ADVICE]
    assert all(sentence.follows and not sentence.cure for sentence in others)


def test_the_output_that_overflowed_is_part_of_the_headline(tmp_path):
    rows = [tensor("output", "embed", counted({15: 8}, inf=2), "float16")]
    events = [step(n, loss=math.nan) for n in range(31, 101)]
    first, outputs = said(tmp_path, *events, sample(40, rows))
    assert "The outputs of `embed` overflowed: keep that module in float32" in first.text
    assert (
        outputs.text
        == "The outputs of `embed` contained 2 inf in 4 samples together, first sampled at step 40."
    )
    assert outputs.follows


@pytest.mark.parametrize(("loss", "follows"), [(math.nan, True), (1.0, False)])
def test_an_output_that_overflowed_before_a_bad_loss_is_named_there(tmp_path, loss, follows):
    rows = [tensor("output", "embed", counted({15: 8}, inf=2), "float16")]
    found = said(tmp_path, sample(10, rows), step(100, loss=loss))
    assert the_one(found, "first sampled at step 10").follows == follows
    assert "keep that module in float32" in found[0].text or not follows
    assert found[0].cure


def test_skips_of_a_bad_loss_follow_it_and_others_do_not(tmp_path):
    bad = {"reason": "loss", "loss": math.nan}
    same = said(tmp_path / "a", *(skip(n, **bad) for n in (50, 60)))
    assert the_one(same, "2 of 100 steps").follows
    later = said(tmp_path / "b", skip(50, **bad), *map(skip, range(60, 66)))
    skips = the_one(later, "7 of 100 steps")
    assert (skips.follows, later[0].severity) == (True, "warning")
    others = said(tmp_path / "c", step(50, loss=math.inf), *map(skip, range(60, 66)))
    assert not the_one(others, "6 of 100 steps").follows


def test_a_headline_is_as_bad_as_the_worst_that_followed(tmp_path):
    bad = [skip(n, reason="loss", loss=math.nan) for n in range(50, 70)]
    loss, skips = said(tmp_path, *bad)
    assert loss.text.startswith("The loss became NaN at step 50")
    assert (loss.severity, skips.follows) == ("bad", True)


def test_a_bad_weight_that_a_later_diagnosis_finds_followed(tmp_path):
    again = diagnosis(60, verdict="data", tensor="head.weight", cure=None)
    found = said(tmp_path, *nan_from(20, diagnosis(20), again))
    assert the_one(found, "`head.weight` was already bad").follows
    assert not found[0].follows


WRITERS = [getattr(records, name) for name in (
    "healthy", "with_skips", "underflowing", "flushing", "failed", "diagnosed", "killed", "bf16",
    "losing_updates", "several_ranks", "hostile",
)]  # fmt: skip


@pytest.mark.parametrize("write", WRITERS)
def test_no_cure_where_the_verdict_is_good_and_none_twice(tmp_path, write):
    found = said_of(write(tmp_path))
    cures = [sentence.cure for sentence in found if sentence.cure]
    assert len(set(cures)) == len(cures)
    assert all(
        each.severity in ("bad", "warning") and not each.follows for each in found if each.cure
    )
    assert any(not sentence.follows for sentence in found)


# --- one number, wherever it is told --------------------------------------------------------------


def growing(folder):
    """Write a run of two optimizers that skips at the start, after growth, and once besides."""

    def both(make, number, scale):
        return [make(number, scale=scale), make(number, scale=scale, optimizer="SGD")]

    events = [*both(skip, 1, 4096.0), *both(skip, 2, 2048.0)]
    for number in range(3, 101):
        scale = {40: 2048.0, 41: 2048.0, 80: 1024.0}.get(number, 1024.0 if number < 80 else 512.0)
        make = skip if number in (41, 80) else step
        events += [
            event if make is skip else event | {"scale_after": scale}
            for event in both(make, number, scale)
        ]
    return records.write(
        folder, [records.header(), records.policy(), *events, records.end(9.0, 200)]
    )


def test_skips_are_counted_in_one_way_everywhere(tmp_path, capsys):
    from tests.report.markup import page_of

    page = page_of(growing(tmp_path))
    steps = page.summary.steps
    counted = (steps.num_skipped, steps.num_start_up, steps.num_after_growth)
    assert (*counted, steps.num_skipped_later) == (8, 4, 2, 2)
    kinds = "6 by dynamic scaling (4 at the start and 2 after the scale had grown)"
    (tile,) = (t for t in page.tree.one("dl", class_="tiles").all("div") if "Skipped" in t.text)
    assert [data.text for data in tile.all("data")] == ["8", "4 %", "4", "2", "2"]
    for options in ([], ["--md"]):
        main(["report", str(tmp_path), *options])
        assert kinds in capsys.readouterr().out
    assert f"8 (4 %), {kinds} and 2 others" in _key_row(tmp_path, capsys)


def _key_row(folder, capsys):
    main(["report", str(folder), "--md"])
    return next(line for line in capsys.readouterr().out.splitlines() if "| skipped |" in line)


def test_a_record_has_one_share_of_underflow_per_layer(tmp_path, capsys):
    from tests.report.markup import page_of

    page = page_of(records.flushing(tmp_path, (1024.0, 65536.0)))
    (worst,) = [x for x in page.summary.layers if x.name == "head.weight"]
    assert (worst.share_lost, worst.share_lost_worst) == (0.06, 0.12)
    for options in ([], ["--md"]):
        main(["report", str(tmp_path), *options])
        told = capsys.readouterr().out
        assert "6 % of the gradient entries of `head.weight`" in told
        assert "12 %" not in told
    row = next(r for r in page.tree.all("tr") if r.attributes.get("id") == "layer-20")
    assert "6 %" in row.text
    assert "12 %" not in row.text
