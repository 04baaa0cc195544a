"""What is drawn of the steps: nothing that matters is lost, however many there are."""

import math
import re
from itertools import pairwise

import pytest
from msgspec.structs import replace

from halfstep._tools.record.run import Step
from halfstep._tools.report.page_curves import COLUMNS, curves, kept, smoothed
from halfstep._tools.report.summarize import tracks_of


def step(number, optimizer="AdamW", reason=None, scale=1024.0, norm=1.0, loss=2.0):
    return Step(number, number / 2, optimizer, reason is None, reason, scale, scale, norm, loss)


def panel(drawn, key):
    return next(panel for panel in drawn.panels if panel.key == key)


def test_nothing_is_drawn_without_steps():
    assert curves({"": ()}) is None


def test_one_step_can_be_drawn():
    drawn = curves({"": [step(1)]})
    assert [panel.key for panel in drawn.panels] == ["loss", "scale", "norm"]
    assert all(panel.paths[0].path for panel in drawn.panels)


def test_extremes_ends_and_non_finite_values_of_a_column_are_kept():
    values = [5.0, 1.0, 3.0, math.nan, math.nan, 9.0, None, -math.inf, math.inf, 4.0]
    assert kept([0] * len(values), values) == [0, 1, 3, 5, 7, 8, 9]


@pytest.mark.slow
def test_a_hundred_thousand_steps_become_few_points_and_the_peak_stays():
    num = 100_000
    steps = [step(n, loss=900.0 if n == 54_321 else 2.0 + (n % 7) / 10) for n in range(1, num + 1)]
    drawn = curves({"": steps})
    told = drawn.data["tracks"][0]
    assert len(told["step"]) < 6 * COLUMNS
    assert told["loss"][told["step"].index(54_321)] == 900
    assert len(panel(drawn, "loss").paths[0].path) < 30_000


def test_every_skip_is_in_a_mark():
    steps = [step(n, reason="overflow" if n % 3 == 0 else None) for n in range(1, 30_001)]
    (lane,) = curves({"": steps}).lanes
    assert lane.num == 10_000
    assert len(lane.marks) <= COLUMNS
    counted = [int(mark.title.split(" steps")[0].replace(",", "")) for mark in lane.marks]
    assert sum(counted) == 10_000


def test_each_reason_has_its_shape():
    reasons = ["overflow", "loss", "non-finite down to min_scale", "norm"]
    steps = [step(n, reason=reason) for n, reason in enumerate(reasons, start=1)]
    lanes = curves({"": steps}).lanes
    assert [lane.reason for lane in lanes] == reasons
    assert len({lane.shape for lane in lanes}) == 4
    assert lanes[1].marks[0].title == "step 2: skipped: loss"


def test_the_scale_has_an_axis_of_powers_of_two():
    scales = [2.0**e for e in (16, 17, 18, 24)]
    drawn = curves({"": [step(n, scale=scale) for n, scale in enumerate(scales, start=1)]})
    labels = [label for _, label in panel(drawn, "scale").ticks]
    assert labels == ["2^16", "2^18", "2^20", "2^22", "2^24"]
    places = [at for at, _ in panel(drawn, "scale").ticks]
    distances = [a - b for a, b in pairwise(places)]
    assert distances == pytest.approx([distances[0]] * 4, abs=0.02)


@pytest.mark.parametrize(
    ("losses", "axis"), [((2.0, 3.0), ""), ((2.0, 3000.0), "logarithmic"), ((-1.0, 3000.0), "")]
)
def test_a_loss_that_spans_a_lot_has_a_logarithmic_axis(losses, axis):
    drawn = curves({"": [step(n, loss=loss) for n, loss in enumerate(losses, start=1)]})
    assert panel(drawn, "loss").axis == axis
    assert panel(drawn, "loss").ticks


def test_values_that_are_not_finite_are_marked_and_interrupt_the_curve():
    losses = [2.0, math.nan, 2.0, math.inf, 2.0]
    loss = panel(curves({"": [step(n, loss=x) for n, x in enumerate(losses, 1)]}), "loss")
    assert [mark.title for mark in loss.nan] == ["step 2: loss is NaN"]
    assert [mark.title for mark in loss.inf] == ["step 4: loss is inf"]
    assert loss.paths[0].path.count("M") == 3


def test_only_non_finite_losses_can_be_drawn():
    loss = panel(curves({"": [step(1, loss=math.nan), step(2, loss=math.nan)]}), "loss")
    assert len(loss.nan) == 2


def test_what_was_not_measured_has_no_diagram():
    drawn = curves({"": [step(1, scale=None, norm=None)]})
    assert [panel.key for panel in drawn.panels] == ["loss"]


def test_optimizers_have_their_own_curves():
    steps = [step(n, name) for n in (1, 2) for name in ("SGD", "AdamW")]
    steps += [replace(step(n, "AdamW"), number=2) for n in (1, 2)]
    assert [track.name for track in tracks_of("", steps)] == ["SGD", "AdamW", "AdamW 2"]
    drawn = curves({"": steps})
    assert drawn.names == ["SGD", "AdamW", "AdamW 2"]
    assert len(panel(drawn, "norm").paths) == 3


def test_optimizers_of_one_class_that_step_in_turn_have_their_own_curves():
    steps = [replace(step(n, loss=float(n)), number=2 - n % 2) for n in range(1, 9)]
    assert [track.name for track in tracks_of("", steps)] == ["AdamW", "AdamW 2"]
    loss = panel(curves({"": steps}), "loss")
    assert len(loss.paths) == 2


def test_two_runs_share_one_axis():
    drawn = curves({"a": [step(1), step(10)], "b": [step(1), step(20, reason="norm")]})
    assert drawn.names == ["a", "b"]
    assert (drawn.data["first"], drawn.data["last"]) == (1, 20)
    assert [lane.name for lane in drawn.lanes] == ["b"]


def test_the_tooltip_is_told_the_exact_scale():
    drawn = curves({"": [step(1, scale=65536.0 * 3, loss=1.234567)]})
    told = drawn.data["tracks"][0]
    assert (told["scale"], told["loss"]) == ([196608], [1.235])


@pytest.mark.parametrize(("lost", "is_drawn"), [(0.5, True), (0.01, True), (0.001, False)])
def test_lost_updates_have_an_axis_of_shares(lost, is_drawn):
    steps = [
        replace(step(n), share_lost_updates=lost if n % 10 == 0 else None) for n in range(1, 101)
    ]
    panels = {panel.key: panel for panel in curves({"": steps}).panels}
    assert ("share_lost_updates" in panels) == is_drawn
    if is_drawn:
        labels = [label for _, label in panels["share_lost_updates"].ticks]
        assert labels[0] == "0 %"
        assert labels[-1] == "100 %"


def test_the_scale_goes_in_stairs():
    scales = [1024.0, 1024.0, 4096.0]
    drawn = curves({"": [step(n, scale=scale) for n, scale in enumerate(scales, start=1)]})
    (path,) = panel(drawn, "scale").paths
    moves = re.findall(r"-?\d+", path.path.partition("l0 0")[2])
    assert path.kind == "line"
    assert all("0" in pair for pair in zip(moves[::2], moves[1::2], strict=True))


def test_a_long_loss_has_its_mean_over_the_raw_one():
    steps = [step(n, loss=2.0 + n % 2) for n in range(1, 101)]
    loss = panel(curves({"": steps}), "loss")
    assert ([path.kind for path in loss.paths], loss.mean_of) == (["raw", "line"], 20)
    short = panel(curves({"": steps[:50]}), "loss")
    assert ([path.kind for path in short.paths], short.mean_of) == (["line"], None)


def test_a_mean_leaves_out_what_is_not_finite():
    assert smoothed([1.0, 3.0, math.nan, None, 5.0], 2)[:2] == [1.0, 2.0]
    assert smoothed([1.0, 3.0, math.nan, None, 5.0], 2)[4] == 4.0


def test_what_only_samples_have_is_drawn_as_dots():
    steps = [step(n, norm=1.5 if n % 10 == 0 else None) for n in range(1, 41)]
    (path,) = panel(curves({"": steps}), "norm").paths
    assert (path.kind, path.path.count("M"), path.path.count("l0 0")) == ("dots", 4, 4)
