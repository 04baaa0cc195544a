"""The one-read reductions against a loop in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from halfstep.scaling import reductions
from halfstep.scaling.reductions import (
    BATCH,
    LARGEST,
    PIECE,
    ROW,
    SMALL,
    largest_magnitudes,
    sums_of_squares,
)

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def reference(tensor: torch.Tensor) -> tuple[float, float]:
    """Sum of squares and largest magnitude, entry by entry."""
    entries = tensor.double().flatten().tolist()
    if any(map(math.isnan, entries)):
        return math.nan, math.nan
    return math.fsum(entry * entry for entry in entries), max(map(abs, entries), default=0.0)


def assert_right(tensors: list[torch.Tensor]) -> None:
    sums, amaxes = sums_of_squares(tensors), largest_magnitudes(tensors)
    assert sums.shape == amaxes.shape == (len(tensors),)
    for tensor, got, amax in zip(tensors, sums.tolist(), amaxes.tolist(), strict=True):
        want, want_amax = reference(tensor)
        assert amax == want_amax or (math.isnan(amax) and math.isnan(want_amax))
        is_finite = bool(tensor.isfinite().all())
        assert math.isfinite(got) == is_finite
        if is_finite:
            # Below 1e-19 squares underflow in float32.
            tiny = 1e-38 * tensor.numel()
            assert got == pytest.approx(min(want, LARGEST), rel=2e-5, abs=tiny)


values = st.one_of(
    st.floats(width=16, allow_subnormal=True),
    st.sampled_from([math.inf, -math.inf, math.nan, 1e30, -3e38, 1e-30, 65504.0, 0.0]),
)


@st.composite
def tensor(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 5), max_size=3))
    dtype = draw(st.sampled_from(DTYPES))
    count = math.prod(shape)
    flat = torch.tensor(draw(st.lists(values, min_size=count, max_size=count)), dtype=dtype)
    dense = flat.reshape(shape)
    kind = draw(st.sampled_from(["plain", "transposed", "gaps", "expanded"]))
    if kind == "transposed":
        return dense.permute(list(reversed(range(len(shape)))))
    if kind == "gaps":
        return torch.stack([dense, torch.full_like(dense, math.nan)], -1)[..., 0]
    if kind == "expanded":
        return dense.unsqueeze(-1).expand(*shape, 3)
    return dense


@settings(deadline=None, max_examples=200)
@given(st.lists(tensor(), min_size=1, max_size=12))
def test_against_the_loop(tensors: list[torch.Tensor]) -> None:
    assert_right(tensors)


def test_many_of_one_size_between_odd_ones_keep_their_order() -> None:
    tensors = []
    for k in range(2 * BATCH // 1000 + 3):
        tensors.append(torch.full((1000,), float(k)))
        if k % 7 == 0:
            tensors.append(torch.full((k + 1,), float(k), dtype=torch.float64))
    want = [t.double().square().sum() for t in tensors]
    torch.testing.assert_close(sums_of_squares(tensors), torch.stack(want), rtol=1e-5, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_entry_is_found_wherever_it_is(dtype: torch.dtype, bad: float) -> None:
    size = 2 * PIECE + 3 * ROW + 5
    flat = torch.ones(size, dtype=dtype)
    edges = {0, 1, SMALL, ROW - 1, ROW, PIECE - 1, PIECE, 2 * PIECE, size - 6, size - 5, size - 1}
    for edge in edges:
        flat[edge] = bad
        assert not sums_of_squares([flat]).isfinite().any()
        assert not largest_magnitudes([flat]).isfinite().any()
        flat[edge] = 1.0
    assert sums_of_squares([flat]).item() == pytest.approx(size, rel=1e-9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [SMALL - 1, SMALL, SMALL + 1, 3_000_001])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_precision(dtype: torch.dtype, size: int, mean: float) -> None:
    torch.manual_seed(0)
    flat = (torch.rand(size) * 0.5 + mean).to(dtype)
    want = flat.double().square().sum().sqrt()
    torch.testing.assert_close(sums_of_squares([flat])[0].sqrt(), want, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("dtype", "entry"),
    [(torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float64, 1e200), (torch.float64, 1e300)],
)
@pytest.mark.parametrize("size", [3, SMALL + 1])
def test_squares_that_overflow_are_no_inf(dtype: torch.dtype, entry: float, size: int) -> None:
    flat = torch.zeros(size, dtype=dtype)
    flat[1] = entry
    got = sums_of_squares([torch.ones(2), flat])
    assert got[0].item() == pytest.approx(2.0)
    assert got[1].item() == pytest.approx(LARGEST if entry > 1e150 else flat[1].item() ** 2)


class NoReading(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def test_no_value_is_read_as_seen_from_outside() -> None:
    tensors = [torch.full((3,), math.inf), torch.full((SMALL + 1,), 3e38)]
    with NoReading():
        sums_of_squares(tensors)
        largest_magnitudes(tensors)


def test_large_gradients_are_not_copied() -> None:
    made = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            result = func(*args, **(kwargs or {}))
            inputs = {t.data_ptr() for t in args if isinstance(t, torch.Tensor)}
            if isinstance(result, torch.Tensor) and result.data_ptr() not in inputs:
                made.append(result.numel())
            return result

    size = 4 * PIECE
    for dtype in DTYPES:
        for shape in [(size,), (4, size // 4)]:
            flat = torch.ones(shape, dtype=dtype)
            with Sizes():
                reductions._sums_of_squares_cpu([flat, flat.t() if flat.dim() == 2 else flat])
    assert max(made) <= PIECE


@pytest.mark.parametrize("context", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_under_grad_modes(context: Any) -> None:
    with context():
        tensors = [torch.ones(3), torch.ones(2, 2)]
        assert sums_of_squares(tensors).tolist() == pytest.approx([3.0, 4.0])
        assert largest_magnitudes(tensors).tolist() == [1.0, 1.0]


def test_traces_in_full() -> None:
    tensors = [torch.ones(3), torch.ones(2, 2), torch.full((SMALL + 1,), 2.0).bfloat16()]
    compiled = torch.compile(
        lambda ts: (sums_of_squares(ts), largest_magnitudes(ts)),
        fullgraph=True,
        backend="aot_eager",
    )
    sums, amaxes = compiled(tensors)
    assert torch.equal(sums, sums_of_squares(tensors))
    assert torch.equal(amaxes, largest_magnitudes(tensors))
