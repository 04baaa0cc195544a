"""The numbers of tensors: headroom, what underflows, and at which scales none would."""

import math

import pytest
import torch
from tests.report import records
from tests.report.records import counted, sample, tensor

from halfstep._common.formats import FORMATS
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import Measured, PolicySeen, Sample
from halfstep._tools.report.layers import largest_scale, power_below, sampled, smallest_scale
from halfstep._tools.report.summarize import summarize

GRADIENT = "parameter_gradient"


def summary_of(folder, *events, dtype="float16"):
    """Return what comes of a step and these events, under a policy unless dtype is None."""
    policies = [] if dtype is None else [records.policy(dtype)]
    first = [records.header(), *policies, records.step(1)]
    return summarize(read_run(records.write(folder, [*first, *events])))


def judged(measured, lower="fp16"):
    """Return a tensor of a sample, at a scale of 1, with the lower precision in force."""
    policy = PolicySeen(1, "cpu", FORMATS[lower].dtype_name, "standard")
    (tensor,) = sampled(Sample(1, 1.0, (measured,)), [policy])
    return tensor


def gradient(histogram, **values):
    return tensor(GRADIENT, "fc.weight", counted(histogram, **values))


def test_samples_add_up(tmp_path):
    few = gradient({-22: 5, 0: 15}, zeros=10, flushed=5)
    many = gradient({-22: 30, 3: 20}, zeros=20, flushed=10, nan=1, inf=2)
    (layer,) = summary_of(tmp_path, sample(1, [few]), sample(5, [many])).layers
    assert (layer.num_samples, layer.size, layer.measured) == (2, 73, 103)
    assert (layer.zeros, layer.nan, layer.inf, layer.non_finite_step) == (30, 1, 2, 5)
    assert (layer.amax, layer.amin) == (0.75 * 8, 0.75 * 2**-22)
    assert layer.histogram == {-22: 35, 0: 15, 3: 20}
    assert layer.underflow["e4m3"] == 35
    assert layer.flushed == layer.lost == 15
    assert layer.share_lost == 15 / 103
    assert (layer.share_lost_worst, layer.share_lost_step) == (5 / 30, 1)
    assert layer.headroom == math.log2(65504 / 6)
    assert layer.headroom_step == 5


def test_headroom_is_the_worst_and_may_be_zero_or_less(tmp_path):
    amax = [8.0, 65504.0, 2.0**17, 1.0]
    rows = [sample(n, [gradient({1: 1}, amax=x)]) for n, x in enumerate(amax[:2], start=1)]
    (layer,) = summary_of(tmp_path / "a", *rows).layers
    assert (layer.headroom, layer.headroom_step) == (0.0, 2)
    rows = [sample(n, [gradient({1: 1}, amax=x)]) for n, x in enumerate(amax, start=1)]
    (layer,) = summary_of(tmp_path / "b", *rows).layers
    assert (layer.headroom, layer.headroom_step) == (math.log2(65504 / 2**17), 3)


@pytest.mark.parametrize(
    ("dtype", "lower", "format"),
    [
        ("float32", "fp16", "fp16"),
        ("float32", "bf16", "bf16"),
        ("float64", "bf16", "bf16"),
        ("float16", "bf16", "fp16"),
        ("bfloat16", "fp16", "bf16"),
        ("float8_e4m3fn", "fp16", "e4m3"),
        ("float8_e5m2", "fp16", "e5m2"),
    ],
)
def test_tensors_are_judged_by_the_format_they_are_in(dtype, lower, format):
    statistics = counted({-30: 1, 2: 3})
    fit = judged(Measured.of("output", "fc", dtype, statistics), lower)
    assert fit.format.name == format
    assert fit.headroom == statistics.headroom(FORMATS[format])
    assert fit.lost == statistics.underflow[format]


@pytest.mark.parametrize(
    ("dtype", "lower"), [("float16", "fp16"), ("bfloat16", "bf16"), ("float32", "fp16")]
)
def test_float32_is_judged_by_the_lower_precision_of_the_run(tmp_path, dtype, lower):
    summary = summary_of(tmp_path, sample(1, [gradient({-26: 1})]), dtype=dtype)
    assert (summary.lower, summary.layers[0].format) == (lower, lower)


def test_each_sample_is_judged_by_the_policy_of_its_step(tmp_path):
    flushed = gradient({0: 60}, zeros=40, flushed=40)
    events = [sample(1, [flushed]), records.policy("bfloat16", step=5), sample(9, [flushed])]
    (layer,) = summary_of(tmp_path, *events).layers
    # bfloat16 has flushed nothing
    assert (layer.lost, layer.share_lost_worst, layer.share_lost_step) == (40, 0.4, 1)


def test_zeros_that_underflow_has_made_are_lost_too(tmp_path):
    (layer,) = summary_of(tmp_path, sample(1, [gradient({0: 60}, zeros=40, flushed=30)])).layers
    assert (layer.lost, layer.share_lost, layer.flushed) == (30, 0.3, 30)


def test_what_fp16_would_lose_is_lost_only_where_no_policy_is_in_force(tmp_path):
    row = gradient({-30: 60, 0: 40})
    (without,) = summary_of(tmp_path / "a", sample(1, [row]), dtype=None).layers
    assert (without.lost, without.share_lost) == (60, 0.6)
    (held,) = summary_of(tmp_path / "b", sample(1, [row])).layers
    assert (held.lost, held.share_lost, held.share_lost_step) == (0, 0.0, None)
    assert held.underflow["fp16"] == 60


def test_in_bf16_no_zero_is_told_from_another(tmp_path):
    row = gradient({-20: 60}, zeros=40, flushed=40)
    gradients = summary_of(tmp_path, sample(1, [row], 1.0), dtype="bfloat16").gradients
    assert (gradients.lost, gradients.share_lost_at_best) == (0, 0.0)


def test_only_gradients_of_parameters_have_a_window(tmp_path):
    rows = [tensor(kind, "fc", counted({0: 1})) for kind in ("parameter", "output", GRADIENT)]
    layers = summary_of(tmp_path, sample(1, rows)).layers
    assert [layer.window is not None for layer in layers] == [False, False, True]


# --- windows --------------------------------------------------------------------------------------


@pytest.mark.parametrize("magnitude", [1.0, 0.75, 2.0**-25, 1.01 * 2.0**-25, 3e-11, 123.4])
def test_the_ends_of_a_window_are_those_of_casts(magnitude):
    statistics = counted({0: 1}, amin=magnitude, amax=magnitude)
    seen = judged(Measured.of(GRADIENT, "fc.weight", "float16", statistics))
    lower, upper = smallest_scale([seen]), largest_scale([seen], {})

    def cast(scale):
        return torch.tensor(magnitude * scale, dtype=torch.float64).half().item()

    assert cast(lower) > 0 == cast(lower / 2)
    assert cast(upper) < math.inf == cast(2 * upper)
    assert math.log2(lower).is_integer()
    assert math.log2(upper).is_integer()


def test_power_below():
    assert [power_below(x) for x in (8.0, 9.0, 1.0, 0.3)] == [4.0, 8.0, 0.5, 0.25]


def test_the_window_does_not_depend_on_the_scale_of_the_sample(tmp_path):
    one = summary_of(tmp_path / "1", sample(1, [gradient({-20: 1, 3: 1}, flushed=0)], 1.0))
    same = summary_of(tmp_path / "2", sample(1, [gradient({-10: 1, 13: 1})], 1024.0))
    assert one.layers[0].window.smallest == 2.0**-4
    assert one.layers[0].window == same.layers[0].window
    assert one.gradients.window == same.gradients.window


def test_12_percent_are_lost_and_32768_to_65536_would_lose_none(tmp_path):
    summary = summarize(read_run(records.underflowing(tmp_path)))
    head = next(layer for layer in summary.of_kind(GRADIENT) if layer.name == "head.weight")
    assert head.share_lost == 0.12
    window = summary.gradients.window
    assert (window.smallest, window.largest) == (32768.0, 65536.0)
    assert not window.is_at_least
    assert not window.is_empty
    assert (summary.gradients.best, summary.gradients.share_lost_at_best) == (32768.0, 0.0)


def test_a_scale_that_loses_nothing_is_the_best(tmp_path):
    gradients = summary_of(tmp_path, sample(1, [gradient({-10: 1, 3: 1})], 1024.0)).gradients
    assert gradients.window.smallest < gradients.best == 1024.0 < gradients.window.largest


def test_what_was_flushed_needs_more_than_the_scale_it_was_flushed_at(tmp_path):
    summary = summary_of(tmp_path, sample(1, [gradient({0: 9}, zeros=1, flushed=1)], 1024.0))
    window = summary.gradients.window
    assert (window.smallest, window.is_at_least) == (2048.0, True)
    assert summary.gradients.best == window.largest == 2.0**26


def test_what_was_flushed_is_known_once_a_larger_scale_has_shown_it(tmp_path):
    summary = summarize(read_run(records.flushing(tmp_path, (1024.0, 65536.0))))
    head = next(layer for layer in summary.of_kind(GRADIENT) if layer.name == "head.weight")
    assert head.share_lost == 0.06
    assert head.share_lost_worst == 0.12
    window = summary.gradients.window
    assert (window.smallest, window.largest) == (4096.0, 65536.0)
    assert not window.is_at_least
    assert not window.is_empty
    assert (summary.gradients.best, summary.gradients.share_lost_at_best) == (65536.0, 0.0)


@pytest.mark.parametrize(
    ("row", "scale"),
    [
        (gradient({-5: 9}, flushed=0), 1024.0),
        (gradient({-10: 9}, flushed=0), 512.0),
        (gradient({}, zeros=9), 65536.0),
    ],
    ids=["the same scale", "a smaller one", "a larger one, but all is zero"],
)
def test_other_samples_do_not_show_what_was_flushed(tmp_path, row, scale):
    flushed = gradient({0: 9}, zeros=1, flushed=1)
    rows = sample(1, [flushed], 1024.0), sample(2, [row], scale)
    assert summary_of(tmp_path, *rows).layers[0].window.is_at_least


def test_gradients_that_never_were_in_fp16_leave_the_window_as_it_is(tmp_path):
    own = gradient({-10: 1, 3: 1}, flushed=0)
    alone = summary_of(tmp_path / "1", sample(1, [own])).gradients
    # What is not tiny in another sample is of the same norm.
    norm = [records.norm_like(), counted({17: 9})]
    rows = [[own, tensor(GRADIENT, "norm.weight", each)] for each in norm]
    summary = summary_of(tmp_path / "2", *(sample(n, row) for n, row in enumerate(rows, start=1)))
    assert summary.gradients.window == alone.window
    assert (summary.gradients.lost, summary.gradients.share_lost_at_best) == (0, 0.0)
    fc, of_norm = summary.layers
    assert (of_norm.window.smallest, of_norm.window.largest) == (None, None)
    assert fc.window == alone.window


def test_what_was_flushed_stays_lost_at_no_larger_scale(tmp_path):
    row = gradient({16: 9}, zeros=1, flushed=1)
    gradients = summary_of(tmp_path, sample(1, [row], 1024.0)).gradients
    assert (gradients.best, gradients.share_lost_at_best) == (1024.0, 0.1)


def test_no_scale_holds_everything(tmp_path):
    wide = gradient({-34: 10, -28: 20, 14: 70})
    gradients = summary_of(tmp_path / "a", sample(1, [wide], 1.0), dtype=None).gradients
    assert gradients.window.is_empty
    assert gradients.best == gradients.window.largest == 4.0
    assert (gradients.share_lost, gradients.share_lost_at_best) == (0.3, 0.3)
    larger = gradient({-36: 10, -26: 20, 9: 70})
    gradients = summary_of(tmp_path / "b", sample(1, [larger], 1.0), dtype=None).gradients
    assert (gradients.share_lost, gradients.best, gradients.share_lost_at_best) == (0.3, 128.0, 0.1)


def test_an_overflow_bounds_the_window_and_a_bad_loss_does_not(tmp_path):
    row = gradient({0: 9}, inf=1)
    overflow = [records.skip(2, 64.0), sample(2, [row], 64.0)]
    assert summary_of(tmp_path / "a", *overflow).layers[0].window.largest == 32.0
    loss = [records.skip(2, 64.0, reason="loss"), sample(2, [row], 64.0)]
    assert summary_of(tmp_path / "b", *loss).layers[0].window.largest > 64.0


def test_a_step_that_overflowed_unsampled_bounds_the_window_of_all(tmp_path):
    summary = summary_of(tmp_path, sample(1, [gradient({0: 9})]), records.skip(2, 256.0))
    assert summary.gradients.window.largest == 128.0
    assert summary.layers[0].window.largest > 128.0


def test_gradients_inside_the_network_bound_the_window_of_all(tmp_path):
    inside = tensor("output_gradient", "fc", counted({14: 1}), "float16")
    wide = tensor("output_gradient", "loss", counted({30: 1}), "float32")
    rows = [gradient({0: 9}), inside, wide]
    gradients = summary_of(tmp_path, sample(1, rows, 1024.0)).gradients
    assert gradients.window.largest == 4096.0


def test_gradients_that_are_all_zero_say_nothing_of_scales(tmp_path):
    gradients = summary_of(tmp_path, sample(1, [gradient({}, zeros=5)])).gradients
    assert (gradients.window.smallest, gradients.window.largest) == (None, None)
    assert (gradients.best, gradients.share_lost_at_best) == (None, None)


def test_ranks_are_judged_together(tmp_path):
    alone = summarize(read_run(records.several_ranks(tmp_path / "1", 1)))
    summary = summarize(read_run(records.several_ranks(tmp_path / "3", 3)))
    assert summary.layers[0].measured == 3 * alone.layers[0].measured
    assert summary.layers[0].num_samples == alone.layers[0].num_samples
    assert summary.facts.ranks == (0, 1, 2)
