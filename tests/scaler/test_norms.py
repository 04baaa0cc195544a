"""The one-read reductions against a loop over the entries in float64."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.device import DEVICE, seeded
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep._gradients import gradients as norms
from halfstep._gradients.gradients import ROW, SMALL, largest_magnitudes, sums_of_squares

Reduction = Callable[[Sequence[Tensor]], Tensor]

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
BOTH = [sums_of_squares, largest_magnitudes]
LARGEST = torch.finfo(torch.float64).max
PIECE = ROW * ROW
STRADDLING = 2 * PIECE + 3 * ROW + 5


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def reference(tensor: Tensor) -> tuple[float, float]:
    """The sum of squares and the largest magnitude, entry by entry."""
    total = largest = 0.0
    for entry in tensor.double().flatten().tolist():
        total += entry * entry
        largest = math.nan if math.isnan(entry) else max(abs(entry), largest)
        if not math.isfinite(entry):
            return abs(entry), math.nan if tensor.isnan().any() else math.inf
    return min(total, LARGEST), largest


def assert_right(tensors: list[Tensor], sums: Tensor, magnitudes: Tensor) -> None:
    assert sums.dtype == torch.float64
    assert sums.shape == magnitudes.shape == (len(tensors),)
    results = zip(tensors, sums.tolist(), magnitudes.tolist(), strict=True)
    for tensor, total, largest in results:
        want, want_largest = reference(tensor)
        assert largest == pytest.approx(want_largest, rel=0, abs=0, nan_ok=True)
        assert math.isfinite(total) == math.isfinite(want)
        if math.isfinite(want):
            underflow = 1e-37 * tensor.numel()
            assert total == pytest.approx(want, rel=2e-5, abs=underflow)


def bits(tensor: Tensor) -> list[int]:
    ints = {8: torch.int64, 4: torch.int32, 2: torch.int16}[tensor.itemsize]
    return tensor.contiguous().view(ints).flatten().tolist()


ENTRIES = st.one_of(
    st.floats(-8, 8, width=16),
    st.sampled_from([1e-45, 5e-324, 1e-30, 65504.0, 1e19, 1e30, -3e38, 1e160, -1e300]),
    st.sampled_from([math.inf, -math.inf, math.nan]),
)
SHAPES = [(), (0,), (1,), (7,), (2, 3), (3, 2), (6,), (2, 0, 3), (2, 3, 2, 2)]


def transposed(entries: Tensor) -> Tensor:
    return entries.permute(list(reversed(range(entries.dim()))))


def with_gaps(entries: Tensor) -> Tensor:
    return torch.stack([entries, torch.full_like(entries, math.nan)], dim=-1)[..., 0]


def expanded(entries: Tensor) -> Tensor:
    return entries.unsqueeze(-1).expand(*entries.shape, 3)


def channels_last(entries: Tensor) -> Tensor:
    return entries.contiguous(memory_format=torch.channels_last) if entries.dim() == 4 else entries


@st.composite
def tensor(draw: st.DrawFn) -> Tensor:
    shape = draw(st.sampled_from(SHAPES))
    size = math.prod(shape)
    entries = draw(st.lists(ENTRIES, min_size=size, max_size=size))
    dense = torch.tensor(entries, dtype=torch.float64).reshape(shape)
    layouts = [Tensor.contiguous, transposed, with_gaps, expanded, channels_last]
    return draw(st.sampled_from(layouts))(dense.to(draw(st.sampled_from(DTYPES))))


@pytest.mark.slow
@settings(max_examples=150)
@given(st.lists(tensor(), min_size=1, max_size=12), st.sampled_from([(0, 2), (0, 5), (SMALL, ROW)]))
def test_against_the_loop(tensors: list[Tensor], sizes: tuple[int, int]) -> None:
    """As rows, and by the kernel alone."""
    before = [bits(each) for each in tensors]
    with patch.multiple(norms, SMALL=sizes[0], ROW=sizes[1]):
        assert_right(tensors, sums_of_squares(tensors), largest_magnitudes(tensors))
    assert [bits(each) for each in tensors] == before


def test_one_result_for_each_in_their_order() -> None:
    """Equal ones, odd ones between them, and large ones."""
    tensors, size = [], 2600
    for k in range(202):
        tensors.append(torch.full((size,), float(k), dtype=DTYPES[k % 2]))
        if k % 30 == 0:
            tensors.append(torch.full((k + 1, 3), float(k)))
            tensors.append(torch.full((SMALL + k,), float(k), dtype=torch.bfloat16))
    sums = torch.stack([each.double().square().sum() for each in tensors])
    magnitudes = torch.stack([each.flatten()[0].double() for each in tensors])

    torch.testing.assert_close(sums_of_squares(tensors), sums, rtol=1e-5, atol=0)
    assert torch.equal(largest_magnitudes(tensors), magnitudes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_of_one_dtype(dtype: torch.dtype) -> None:
    tensors = [torch.ones(1, dtype=dtype), torch.ones(2, 2, dtype=dtype)]

    assert sums_of_squares(tensors).tolist() == [1.0, 4.0]
    assert sums_of_squares(tensors).dtype == torch.float64
    magnitudes = largest_magnitudes(tensors)
    assert magnitudes.tolist() == [1.0, 1.0]
    assert magnitudes.dtype == torch.promote_types(dtype, torch.float32)


def test_equal_shapes_of_different_dtypes() -> None:
    third = torch.full((5,), 1 / 3, dtype=torch.float64)
    for dtypes in itertools.permutations(DTYPES):
        tensors = [third.to(dtype) for dtype in dtypes]
        assert_right(tensors, sums_of_squares(tensors), largest_magnitudes(tensors))
        assert largest_magnitudes(tensors).dtype == torch.float64


EDGES = [
    *(0, 1, 2 * PIECE + 3 * ROW - 1, 2 * PIECE + 3 * ROW, STRADDLING - 1),
    *(edge + side for edge in (ROW, SMALL, PIECE, 2 * PIECE) for side in (-1, 0, 1)),
]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_entry_counts_once_at_the_edges_of_pieces(dtype: torch.dtype) -> None:
    flat = torch.zeros(STRADDLING, dtype=dtype)
    for edge in EDGES:
        flat[edge] = -1.0
        assert sums_of_squares([flat]).tolist() == [1.0]
        assert largest_magnitudes([flat]).tolist() == [1.0]
        flat[edge] = 0.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_bad_entry_is_found_at_the_edges_of_pieces(dtype: torch.dtype, bad: float) -> None:
    flat = torch.ones(STRADDLING, dtype=dtype)
    for edge in EDGES:
        flat[edge] = bad
        assert not sums_of_squares([flat]).isfinite()
        torch.testing.assert_close(
            largest_magnitudes([flat]).item(), abs(bad), equal_nan=True, rtol=0, atol=0
        )
        flat[edge] = 1.0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [ROW, SMALL, 3_000_001])
@pytest.mark.parametrize("spread", ["around zero", "positive", "equal", "one expanded"])
def test_precision(dtype: torch.dtype, size: int, spread: str) -> None:
    entries = {
        "around zero": torch.randn(size, generator=seeded(0)),
        "positive": torch.rand(size, generator=seeded(0)) + 0.5,
        # Rounded the same way each time: the worst case of one long sum.
        "equal": torch.full((size,), 0.3),
        "one expanded": torch.tensor(0.3).expand(size),
    }[spread].to(dtype)
    alone, *together = sums_of_squares([entries] + [entries[: SMALL - 1]] * 2).sqrt()

    torch.testing.assert_close(alone, entries.double().norm(), rtol=1e-5, atol=0)
    for norm in together:
        torch.testing.assert_close(norm, entries[: SMALL - 1].double().norm(), rtol=1e-5, atol=0)


def test_precision_of_64_million_entries() -> None:
    entry = torch.tensor(0.3)
    norm = sums_of_squares([entry.expand(1 << 26)]).sqrt().item()
    assert norm == pytest.approx(entry.item() * 2**13, rel=1e-5)


@pytest.mark.parametrize(
    ("dtype", "entry"),
    [(torch.float32, 3e38), (torch.bfloat16, 3e38), (torch.float64, 1e200), (torch.float64, 1e300)],
)
@pytest.mark.parametrize("size", [3, SMALL + 1, STRADDLING])
def test_squares_that_overflow_are_not_inf(dtype: torch.dtype, entry: float, size: int) -> None:
    flat = torch.ones(size, dtype=dtype)
    flat[0] = flat[-1] = entry
    exact = LARGEST if entry > 1e150 else 2 * flat[-1].item() ** 2

    sums = sums_of_squares([torch.ones(2), flat, torch.tensor([math.inf])])
    one, large, inf = sums.tolist()
    assert (one, inf) == (pytest.approx(2.0), math.inf)
    assert large == pytest.approx(exact, rel=1e-12)


class Seen(TorchDispatchMode):
    """Notes every op, and the bytes of the memory that it took for its result."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[str] = []
        self.num_bytes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
        result = func(*args, **(kwargs or {}))
        self.ops.append(func.name())
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() not in known:
            self.num_bytes.append(result.untyped_storage().nbytes())
        return result


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("entry", [1.0, 3e38])
def test_large_gradients_are_not_copied(dtype: torch.dtype, entry: float) -> None:
    flat = torch.full((4 * PIECE,), min(entry, torch.finfo(dtype).max), dtype=dtype)
    square = flat.view(2048, -1)
    images = flat.view(4, 4, 512, -1).permute(0, 3, 1, 2)  # channels last
    tensors = [flat, flat, square, square.t(), images]
    with Seen() as seen:
        sums_of_squares(tensors)
    assert max(seen.num_bytes) <= 8 * PIECE  # one piece in float64


@pytest.mark.parametrize("reduction", BOTH)
@pytest.mark.parametrize(
    "context",
    [
        torch.no_grad,
        torch.inference_mode,
        lambda: torch.autocast(DEVICE, torch.bfloat16),
        lambda: halfstep.autocast(DEVICE, torch.bfloat16),
    ],
)
def test_what_surrounds_the_call_changes_nothing(reduction, context):
    tensors = [torch.randn(3, requires_grad=True) for _ in range(2)]
    tensors += [torch.randn(SMALL + 1), torch.randn(3).half()]
    want = reduction(tensors)
    with context():
        assert torch.equal(reduction(tensors), want)
        assert torch.equal(reduction([each.clone() for each in tensors]), want)


@pytest.mark.parametrize("reduction", BOTH)
def test_threads_do_not_disturb_each_other(reduction: Reduction) -> None:
    def fill(value: int) -> bool:
        size = PIECE // 4
        tensors = [torch.full((size,), value).bfloat16(), *torch.full((9, 50), float(value))]
        first = reduction(tensors)
        return all(torch.equal(reduction(tensors), first) for _ in range(20))

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(fill, range(1, 9)))


def test_small_gradients_take_one_kernel() -> None:
    tensors = list(torch.ones(4096, 16, 16))
    with Seen() as seen:
        sums_of_squares(tensors)
    assert "aten::_foreach_norm.Scalar" in seen.ops
    assert len(seen.ops) < 5
