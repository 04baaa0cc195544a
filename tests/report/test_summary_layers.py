"""The numbers of tensors: headroom, what underflows, and at which scales none would."""

import math

import pytest
import torch
from tests.report import records
from tests.report.records import counted

import halfstep
from halfstep._common.formats import FORMATS
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import Measured, PolicySeen, Sample
from halfstep._tools.report.layers import largest_scale, power_below, sampled, smallest_scale
from halfstep._tools.report.summarize import summarize

GRADIENT = "parameter_gradient"


def judged(measured, lower="fp16"):
    """Return a tensor of a sample, at a scale of 1, with the lower precision in force."""
    policy = PolicySeen(1, "cpu", FORMATS[lower].dtype_name, "standard")
    (tensor,) = sampled(Sample(1, 1.0, (measured,)), [policy])
    return tensor


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


def test_ranks_are_judged_together(tmp_path):
    alone = summarize(read_run(records.several_ranks(tmp_path / "1", 1)))
    summary = summarize(read_run(records.several_ranks(tmp_path / "3", 3)))
    assert summary.layers[0].measured == 3 * alone.layers[0].measured
    assert summary.layers[0].num_samples == alone.layers[0].num_samples
    assert summary.facts.ranks == (0, 1, 2)


def test_numbers_of_float64_beyond_float32_are_finite(tmp_path):
    weight = torch.nn.Parameter(torch.tensor([1e60, -2e60], dtype=torch.float64))
    with halfstep.record(tmp_path, model=torch.nn.ParameterList([weight])):
        (weight * 1e60).sum().backward()
        torch.optim.SGD([weight], lr=0.0).step()
    (found,) = (summary := summarize(read_run(tmp_path))).of_kind("parameter")
    numbers = summary.loss.last, summary.norm.last, found.amax, found.inf
    assert numbers == pytest.approx((-1e120, 2**0.5 * 1e60, 2e60, 0))
