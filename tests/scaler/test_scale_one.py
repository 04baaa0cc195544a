"""The scaler as a guard: scale 1, steps that are not finite, and norms far above the median."""

import math
import statistics
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.training import fused_or_not, one_parameter, take_step

from halfstep._scaler import GradScaler, Static
from halfstep._scaler.earlier_norms import NormLimit


def is_taken(scaler: GradScaler, param: Any, optimizer: Any, norm: float) -> bool:
    take_step(scaler, optimizer, (param * torch.tensor([norm, 0.0, 0.0, 0.0])).sum())
    return scaler.outcome(optimizer).taken


@fused_or_not
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scale_one_changes_no_gradient_and_skips_what_is_not_finite(
    fused: bool, dtype: torch.dtype
) -> None:
    param, optimizer = one_parameter(torch.zeros(4, dtype=dtype), fused=fused)
    scaler = GradScaler(init_scale=1.0, rule=Static(), on_skips=lambda report: None)
    loss = (param * torch.tensor([1.0, 1e-30, 3e38, -2.0], dtype=dtype)).sum()
    scaled = scaler.scale(loss)
    scaled.backward()
    expected = param.grad.clone()
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(param, -expected)
    before = param.detach().clone()
    for bad in (math.nan, math.inf):
        assert not is_taken(scaler, param, optimizer, bad)
    assert torch.equal(param, before)
    assert scaler.get_scale() == 1.0


@fused_or_not
def test_a_norm_far_above_the_median_is_skipped(fused: bool) -> None:
    param, optimizer = one_parameter(torch.zeros(4), fused=fused)
    scaler = GradScaler(init_scale=16.0)
    scaler.set_norm_limit(10.0, window=6)
    assert [is_taken(scaler, param, optimizer, n) for n in (1.0, 2.0, 1e6)] == [True] * 3
    assert [is_taken(scaler, param, optimizer, n) for n in (15.0, 16.0, 18.0)] == [True, True, True]
    # The median of an even number is the lower one: 15 of 1, 2, 15, 16, 18, 1e6.
    before = param.detach().clone()
    assert not is_taken(scaler, param, optimizer, 151.0)
    assert str(scaler.outcome(optimizer).reason) == "norm"
    assert scaler.outcome(optimizer).norm == pytest.approx(151.0)
    assert torch.equal(param, before)
    assert scaler.get_scale() == 16.0
    assert is_taken(scaler, param, optimizer, 149.0)
    assert not is_taken(scaler, param, optimizer, math.inf)
    assert scaler.counts().skipped == 2


@fused_or_not
def test_switched_off_and_on(fused: bool) -> None:
    param, optimizer = one_parameter(torch.zeros(4), fused=fused)
    scaler = GradScaler(init_scale=16.0)
    scaler.set_norm_limit(2.0, window=2)
    assert [is_taken(scaler, param, optimizer, n) for n in (1.0, 1.0, 9.0)] == [True, True, False]
    scaler.set_norm_limit(None)
    assert is_taken(scaler, param, optimizer, 9.0)
    scaler.set_norm_limit(2.0, window=2)
    assert is_taken(scaler, param, optimizer, 99.0)  # what was seen before is forgotten


def test_each_optimizer_has_norms_of_its_own() -> None:
    pairs = [one_parameter(torch.zeros(4)) for _ in range(2)]
    scaler = GradScaler(init_scale=16.0)
    scaler.set_norm_limit(2.0, window=2)
    for _ in range(3):
        assert is_taken(scaler, *pairs[0], 1.0)
        assert is_taken(scaler, *pairs[1], 100.0)
    assert not is_taken(scaler, *pairs[0], 100.0)


def test_a_run_of_outliers_is_told() -> None:
    param, optimizer = one_parameter(torch.zeros(4))
    reports: list[Any] = []
    scaler = GradScaler(max_consecutive_skips=3, on_skips=reports.append)
    scaler.set_norm_limit(2.0, window=2)
    for norm in (1.0, 1.0, 9.0, 9.0, 9.0):
        is_taken(scaler, param, optimizer, norm)
    (report,) = reports
    assert str(report.reason) == "norm"
    assert "raise the limit (set_norm_limit)" in str(report)
    assert report.culprits == ()


@settings(max_examples=50)
@given(
    st.lists(st.floats(0.0, 1e6, width=32) | st.sampled_from([math.inf, math.nan]), max_size=30),
    st.integers(2, 7),
    st.integers(0, 30),
)
def test_against_a_list(norms: list[float], window: int, saved_after: int) -> None:
    limit = NormLimit(3.0, window)
    seen: list[float] = []
    for number, norm in enumerate(norms):
        if number == saved_after:
            saved, limit = limit.to_list(), NormLimit(3.0, window)
            limit.load(saved)
        last = seen[-window:]
        enough = 2 * len(last) >= window
        expected = enough and math.isfinite(norm) and norm > 3.0 * statistics.median_low(last)
        # The product is rounded to float32 on the device.
        near = enough and math.isclose(norm, 3.0 * statistics.median_low(last), rel_tol=1e-6)
        got = bool(limit.is_exceeded(torch.tensor(norm)))
        assert got == expected or near
        if math.isfinite(norm) and not got:
            seen.append(norm)


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        ((1.0,), ValueError, "times_median is 1.0: it must be > 1"),
        ((math.inf,), ValueError, "times_median is inf"),
        (("2",), TypeError, "times_median is '2'"),
        ((2.0, 1), ValueError, "window is 1"),
        ((2.0, 2.5), TypeError, "window is 2.5"),
    ],
)
@pytest.mark.parametrize("enabled", [True, False])
def test_wrong_numbers(args: Any, error: type[Exception], words: str, enabled: bool) -> None:
    scaler = GradScaler(enabled=enabled)
    with pytest.raises(error, match=words):
        scaler.set_norm_limit(*args)
