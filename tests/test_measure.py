"""Statistics of tensors, against counting entry by entry."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from halfstep._common.formats import FORMATS
from halfstep._tools import measure as measure_module
from halfstep._tools.measure import measure
from halfstep._tools.statistics import Statistics, binned, merged


def reference(tensor: torch.Tensor) -> Statistics:
    """Count one entry after the other."""
    values = [abs(x) for x in tensor.float().flatten().tolist()]
    finite = [x for x in values if math.isfinite(x)]
    nonzero = [x for x in finite if x]
    histogram: dict[int, int] = {}
    for x in nonzero:
        exponent = next(e for e in range(-126, 129) if x <= 2.0**e)
        histogram[exponent] = histogram.get(exponent, 0) + 1
    first, counts = binned(histogram)
    return Statistics(
        size=len(values),
        measured=len(values),
        zeros=values.count(0.0),
        nan=sum(map(math.isnan, values)),
        inf=values.count(math.inf),
        amax=max(finite, default=0.0),
        amin=min(nonzero, default=None),
        first=first,
        histogram=counts,
        underflow={n: sum(x <= f.flushed_below for x in nonzero) for n, f in FORMATS.items()},
        overflow={n: sum(x > f.last_held for x in finite) for n, f in FORMATS.items()},
    )


EDGES = [
    edge * factor
    for format in FORMATS.values()
    for edge in (format.last_held, format.flushed_below, format.smallest_normal, format.largest)
    for factor in (1.0, 1 - 2.0**-23, 1 + 2.0**-23)
    if edge * factor < 3.4028235e38
]
NUMBERS = st.one_of(
    st.sampled_from([*EDGES, 0.0, -0.0, math.inf, -math.inf, math.nan, 2.0**-149, 3.4028234e38]),
    st.floats(width=32),
    st.integers(-149, 127).map(lambda e: 2.0**e),
)


@given(st.lists(NUMBERS, max_size=30))
@settings(max_examples=300)
def test_all_counts_are_those_of_counting(values: list[float]) -> None:
    tensor = torch.tensor(values, dtype=torch.float32)
    assert measure(tensor) == reference(tensor)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float8_e5m2])
def test_lower_precision(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    tensor = (torch.randn(40, 50) * torch.logspace(-8, 4, 50)).to(dtype)
    assert measure(tensor) == reference(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randn(6, 4).t(),
        torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.randn(7, 3).to_sparse(),
        torch.empty(0, 3),
        torch.tensor(-2.5),
        torch.ones(3).expand(4, 3),
    ],
    ids=["transposed", "channels_last", "sparse", "empty", "scalar", "expanded"],
)
def test_layouts(tensor: torch.Tensor) -> None:
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    assert measure(tensor) == reference(dense)


def test_complex_numbers_count_as_two() -> None:
    measured = measure(torch.tensor([3 + 4j, 0j]))
    assert (measured.size, measured.zeros, measured.amax) == (4, 2, 4.0)


@pytest.mark.parametrize("tensor", [torch.ones(3, dtype=torch.int64), torch.ones(3) > 0])
def test_what_has_no_floating_point_is_not_measured(tensor: torch.Tensor) -> None:
    assert measure(tensor) is None


def test_inside_vmap_nothing_is_measured() -> None:
    seen = []

    def look(x: torch.Tensor) -> torch.Tensor:
        seen.append(measure(x))
        return x

    torch.func.vmap(look)(torch.ones(2, 3))
    assert seen == [None]


# --- large tensors --------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(400, 300), (120_000,), (30, 400, 10), (300, 50, 3, 3)])
def test_a_large_tensor_is_sampled_and_its_amax_is_exact(shape, monkeypatch):
    torch.manual_seed(0)
    tensor = torch.randn(shape)
    tensor.view(-1)[-1] = -77.0  # in the last row, which the sample need not hold
    monkeypatch.setitem(measure_module.LARGE, "cpu", tensor.numel() + 1)
    whole = measure(tensor)  # elsewhere compared with counting
    monkeypatch.setitem(measure_module.LARGE, "cpu", 8192)
    found = measure(tensor)
    assert whole.measured == tensor.numel()
    assert found.amax == 77.0
    assert found.size == tensor.numel()
    assert 4096 <= found.measured <= 3 * 8192
    assert found.underflow["e4m3"] / found.measured == pytest.approx(
        whole.underflow["e4m3"] / tensor.numel(), abs=2e-3
    )
    assert sum(found.histogram) + found.zeros == found.measured


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_no_nan_and_no_inf_of_a_large_tensor_is_missed(bad, monkeypatch):
    monkeypatch.setitem(measure_module.LARGE, "cpu", 1024)
    tensor = torch.randn(100, 100)
    tensor[99, 1] = bad
    found = measure(tensor)
    assert found == reference(tensor)


@pytest.mark.parametrize("largest", [-77.0, -1e100])
def test_the_amax_of_a_large_tensor_in_float64_is_exact(largest, monkeypatch):
    monkeypatch.setitem(measure_module.LARGE, "cpu", 1024)
    tensor = torch.full((100, 100), 1e-3, dtype=torch.float64)
    tensor[99, 1] = largest
    found = measure(tensor)
    assert (found.amax, found.inf, found.nan) == (-largest, 0, 0)
    assert found.measured < tensor.numel()


# --- gradients ------------------------------------------------------------------------------------


def normal(scale):
    """Return a gradient of which a third is zero: pairs of channels that never meet."""
    torch.manual_seed(0)
    return torch.randn(200, 300) * scale * (torch.rand(200, 300) > 0.33)


def heavy_tailed(scale):
    """Return one whose rows and columns have scales of their own."""
    return normal(scale) * torch.randn(200, 1).exp() * torch.randn(300).exp()


def falling_to_zero(scale):
    """Return one whose entries are the less frequent the smaller they are."""
    return torch.hypot(gradient := normal(scale), torch.randn(200, 300) * scale * (gradient != 0))


def is_flushed(exact):
    return (exact.half() == 0) & (exact != 0)


@pytest.mark.parametrize("exact", [normal(1e-6), normal(1e-7), heavy_tailed(1e-6)])
def test_zeros_count_as_flushed_as_far_as_the_smallest_entries_say(exact) -> None:
    expected = int(is_flushed(exact).sum())
    for gradient in (exact.half(), exact.half().float(), exact.half().flatten()):
        found = measure(gradient, is_gradient=True)
        assert 0.6 * expected < found.flushed < expected
        assert found.lost() == found.flushed


@pytest.mark.parametrize("exact", [normal(1e-3), falling_to_zero(1e-5), falling_to_zero(1e-6)])
def test_zeros_beside_few_small_entries_have_other_causes(exact) -> None:
    assert measure(exact.half(), is_gradient=True).flushed < 30


@pytest.mark.parametrize("counts", [torch.poisson(torch.ones(200, 300)), normal(1).sign()])
def test_zeros_of_a_fixed_grid_have_not_underflowed(counts) -> None:
    """Counts, and a gradient in three levels, whose step happens to be the smallest subnormal."""
    assert measure((counts * 2.0**-24).half(), is_gradient=True).flushed == 0


def test_a_sum_of_float16_gradients_is_known_too() -> None:
    torch.manual_seed(0)
    parts = [(torch.randn(64, 32) * 1e-6).half().float() for _ in range(3)]
    parts[0][0, 0] = 3.0  # a sum that is no value of float16
    total = torch.stack(parts).sum(0)
    assert not torch.equal(total.half().float(), total)
    found = measure(total, is_gradient=True)
    assert 0 < found.flushed <= int((total == 0).sum())


def test_float32_and_bfloat16_gradients_have_flushed_nothing() -> None:
    torch.manual_seed(0)
    gradient = torch.randn(32, 20) * torch.randint(2, (32, 20))
    for tensor in (gradient * 1e-7, gradient.bfloat16(), gradient.bfloat16().float()):
        found = measure(tensor, is_gradient=True)
        assert found.flushed is None


def test_shares_are_of_the_entries_that_are_finite() -> None:
    gradient = torch.tensor([1e-9, 1.0] + [math.nan] * 5 + [math.inf])
    found = measure(gradient, is_gradient=True)
    assert found.share(found.lost()) == 0.5
    assert measure(torch.full((2,), math.nan)).share(0) == 0.0


# --- what follows from the histogram --------------------------------------------------------------


@given(st.lists(st.floats(2.0**-120, 2.0**100, width=32), min_size=1), st.integers(-20, 20))
@settings(max_examples=100)
def test_underflow_at_another_scale_is_exact_for_powers_of_two(values, power):
    tensor, fp16 = torch.tensor(values), FORMATS["fp16"]
    found = measure(tensor)
    expected = int((tensor.double() * 2.0**power <= fp16.flushed_below).sum())
    assert found.underflow_if(2.0**power, fp16) == expected


@given(st.lists(st.lists(NUMBERS, min_size=1, max_size=8), min_size=2, max_size=4))
@settings(max_examples=100)
def test_statistics_of_parts_add_up_exactly(parts: list[list[float]]) -> None:
    tensors = [torch.tensor(part, dtype=torch.float32) for part in parts]
    found = [measure(tensor) for tensor in tensors]
    assert merged(s for s in found if s) == reference(torch.cat(tensors))


def test_headroom_is_in_bits() -> None:
    found = measure(torch.tensor([65504.0 / 8]))
    assert found.headroom(FORMATS["fp16"]) == 3.0
