"""The stores of master weights against float32 weights, over all bits."""

import math
import struct
from itertools import combinations

import pytest
import torch
from torch import Tensor

from halfstep._master_weights import stores
from halfstep._master_weights.stores import (
    KEEPING,
    NOTHING,
    PIECE,
    STORES,
    Float32,
    Kahan,
    Split,
    Stochastic,
    Store,
)

BF16, FP16 = torch.bfloat16, torch.float16
SPECIAL = [
    *(0.0, -0.0, math.inf, -math.inf, math.nan, 3.4e38, -3.4e38, 1e-45, -1e-45, 1.0, -1.0),
    *(3.3895313892515355e38, 65504.0, 65519.9, 65520.0, 2.0**-24, 2.0**-25, 6.1e-5, 5.9e-8),
]


def weights(count: int = 1 << 20) -> Tensor:
    """Return float32 numbers of all magnitudes, and the special ones."""
    bits = torch.randint(-(2**31), 2**31, (count,), dtype=torch.int64).to(torch.int32)
    ties = (bits[:1000] & ~0xFFFF) | 0x8000
    return (
        torch.cat([bits, ties])
        .view(torch.float32)
        .clone()
        .index_copy_(0, torch.arange(len(SPECIAL)), torch.tensor(SPECIAL))
    )


def all_numbers(dtype: torch.dtype) -> Tensor:
    """Return all 65,536 numbers of a dtype."""
    return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)


def narrowed(store: Store, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    param = torch.zeros(weight.shape, dtype=dtype)
    kept = store.empty(param)
    store.narrow_(weight.clone(), param, NOTHING if kept is None else kept, "")
    return param, kept


def widened(store: Store, param: Tensor, kept: Tensor | None) -> Tensor:
    kept = NOTHING if kept is None else kept.clone()
    return store.widen(param.clone(), kept, torch.empty(param.shape)).clone()


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same bits, any NaN being as good as another."""
    is_nan = one.isnan()
    kind = torch.int32 if one.dtype is torch.float32 else torch.int16
    return torch.equal(is_nan, other.isnan()) and torch.equal(
        one.view(kind)[~is_nan], other.view(kind)[~is_nan]
    )


def halves(number: float) -> tuple[int, int]:
    """Return the bits of bfloat16, ties away from zero, and what is left: the slow reference."""
    (bits,) = struct.unpack("<I", struct.pack("<f", number))
    upper = (bits + 0x8000) >> 16
    return upper, bits - (upper << 16)


def test_split_is_exact() -> None:
    """Over numbers of all magnitudes, in more than one piece."""
    weight = weights()
    assert weight.numel() > 2 * PIECE
    param, kept = narrowed(Split(), weight, BF16)
    assert kept is not None
    assert kept.dtype is torch.int16
    assert same_bits(widened(Split(), param, kept), weight)


def test_split_against_the_bits() -> None:
    weight = weights(5000)
    param, kept = narrowed(Split(), weight, BF16)
    assert kept is not None
    for number, upper, left in zip(
        weight.tolist(), param.view(torch.int16).tolist(), kept.tolist(), strict=True
    ):
        if not math.isnan(number):
            assert halves(number) == (upper & 0xFFFF, left)


def test_split_rounds_as_pytorch_but_for_ties() -> None:
    weight = weights()
    param, _ = narrowed(Split(), weight, BF16)
    is_tie = (weight.view(torch.int32) & 0xFFFF) == 0x8000
    assert same_bits(param[~is_tie], weight[~is_tie].to(BF16))


@pytest.mark.parametrize("bits", [0x7FFFFFFF, -1, 0x7FFF8000, 0x7F800001])
def test_no_nan_is_rounded_to_a_number(bits: int) -> None:
    """A CUDA device makes 0x7FFFFFFF; with half a unit added it would be -0."""
    weight = torch.tensor([bits], dtype=torch.int32).view(torch.float32)
    for kind in STORES.values():
        param, kept = narrowed(kind(), weight, BF16)
        assert param.isnan().all()
        assert widened(kind(), param, kept).isnan().all()


@pytest.mark.parametrize(
    ("store", "dtype"), [(store, dtype) for store in KEEPING for dtype in store.dtypes]
)
def test_a_weight_rounds_to_whatever_is_in_the_parameter(store: Store, dtype: torch.dtype) -> None:
    """All numbers of the dtype, written over weights of any other."""
    for seed in range(3):
        torch.manual_seed(seed)
        numbers = all_numbers(dtype)
        weight = torch.randn(numbers.shape) * 10.0 ** torch.randint(-40, 38, numbers.shape)
        _, kept = narrowed(store, weight, dtype)
        found = widened(store, numbers, kept)
        if isinstance(store, Kahan):  # but for halves, which may round to the next number
            found = numbers.float() + 0.99 * (found - numbers.float()).nan_to_num()
        again, _ = narrowed(store, found, dtype)
        assert same_bits(again, numbers) or torch.equal(again.nan_to_num(), numbers.nan_to_num())
        assert torch.equal(found.isnan(), numbers.isnan())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_float32_keeps_the_weight(dtype: torch.dtype) -> None:
    weight = weights()
    param, kept = narrowed(Float32(), weight, dtype)
    assert same_bits(param, weight.to(dtype))
    assert same_bits(widened(Float32(), param, kept), weight)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kahan_keeps_about_twice_the_digits(dtype: torch.dtype) -> None:
    weight = torch.randn(100_000)
    param, kept = narrowed(Kahan(), weight, dtype)
    error = (widened(Kahan(), param, kept) - weight).abs()
    assert (error <= torch.finfo(dtype).eps ** 2 * weight.abs() + 2.0**-24).all()
    assert (param == weight.to(dtype)).all()


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kahan_leaves_a_parameter_whose_weight_has_not_changed(dtype: torch.dtype) -> None:
    """A rest that is rounded up to half a unit must not lead to the next number."""
    param, kept = narrowed(Kahan(), weights(), dtype)
    again, _ = narrowed(Kahan(), widened(Kahan(), param, kept), dtype)
    torch.testing.assert_close(param, again, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@pytest.mark.parametrize(
    "number", [1.001, -1.001, 0.3, 3.14e-5, -5.9e-5, 2e-8, -7.3e-8, 60001.0, 1.9999]
)
def test_chance_is_right_on_average(dtype: torch.dtype, number: float) -> None:
    """Each is one of the two numbers around, each with its chance."""
    weight = torch.full((200_000,), number)
    param, kept = narrowed(Stochastic(3), weight, dtype)
    assert kept is None
    found = param.double().unique()
    assert 1 <= len(found) <= 2
    below, above = found.min().item(), found.max().item()
    exact = weight[0].double().item()
    assert below <= exact <= above
    nearest = weight[0].to(dtype).item()
    assert nearest in (below, above)
    spread = max(above - below, 1e-30)
    assert abs(param.double().mean().item() - exact) < 5 * spread / 200_000**0.5


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_chance_is_that_of_every_distance(dtype: torch.dtype) -> None:
    """All distances from the number below, each as often; and the bits of neighbours differ."""
    lost = 16 if dtype is BF16 else 13
    distances = torch.arange(1 << lost, dtype=torch.int32)
    weight = (distances + 0x3F800000).view(torch.float32).repeat((1 << 22) >> lost)
    param, _ = narrowed(Stochastic(5), weight, dtype)
    up = (param > 1.0).view(-1, 1 << lost).double().mean(0)
    for lane in range(4):  # four numbers are drawn at a time
        shares = up[lane::4].view(64, -1).mean(1)
        expected = (torch.arange(64) + 0.5) / 64
        assert (shares - expected).abs().max() < 0.02
    half = torch.full((1 << 18,), 1.0 + torch.finfo(dtype).eps / 2)
    ups = (narrowed(Stochastic(6), half, dtype)[0] > 1.0).double().view(-1, 4).T - 0.5
    assert ((4 * ups @ ups.T / ups.shape[1]) - torch.eye(4)).abs().max() < 0.02


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_chance_leaves_what_the_dtype_has(dtype: torch.dtype) -> None:
    numbers = all_numbers(dtype)
    param, _ = narrowed(Stochastic(), numbers.float(), dtype)
    assert same_bits(param, numbers)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_chance_keeps_finite_weights_finite(dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    weight = torch.tensor([3.4e38, -3.4e38, largest * 1.0001, math.inf, -math.inf, math.nan])
    for seed in range(50):
        together, _ = narrowed(Stochastic(seed), weight, dtype)
        alone = [narrowed(Stochastic(seed), each, dtype)[0] for each in weight.split(1)]
        for param in (together, torch.cat(alone)):
            assert param[:3].tolist() == [largest, -largest, largest]
            assert param[3:5].tolist() == [math.inf, -math.inf]
            assert param[5].isnan()


def test_bits_of_chance_depend_on_seed_step_and_shard() -> None:
    weight = torch.randn(1000)

    def drawn(seed: int, step: int, shard: str) -> torch.Tensor:
        store, param = Stochastic(), torch.zeros(1000, dtype=BF16)
        store.begin(seed, step)
        store.narrow_(weight, param, NOTHING, shard)
        return param

    found = [
        drawn(seed, step, shard)
        for seed in (0, 2**64 - 1)
        for step in (0, 1)
        for shard in ("", "x=0", "x=1")
    ]
    for one, other in combinations(found, 2):
        assert not torch.equal(one, other)
    assert torch.equal(drawn(0, 1, "x=0"), found[4])


def test_chance_goes_on_within_a_step() -> None:
    weight, store = torch.randn(1000), Stochastic(7)
    first, second = (narrowed(store, weight, BF16)[0] for _ in range(2))
    assert not torch.equal(first, second)
    store.begin(7, 0)
    assert torch.equal(narrowed(store, weight, BF16)[0], first)


@pytest.mark.parametrize("kind", STORES.values(), ids=STORES)
@pytest.mark.parametrize("is_special", [False, True])
def test_looking_for_special_numbers_changes_nothing(
    kind: type[Store], is_special: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is left out where a look finds none is done on devices, which are not looked at."""
    weight = weights(1 << 18) if is_special else torch.randn(3 * PIECE // 2)
    for dtype in kind.dtypes:
        found = []
        for looks in (True, False):
            with monkeypatch.context() as patch:
                if not looks:
                    for name in ("_may_hold_nan", "_may_exceed", "_may_differ"):
                        patch.setattr(stores, name, lambda *_: True)
                store = kind()
                param, kept = narrowed(store, weight, dtype)
                param[::7] *= 2  # somebody writes to it
                found.append((param, widened(store, param, kept)))
        for one, other in zip(*found, strict=True):
            assert same_bits(one, other)


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_kahan_drops_the_rest_of_another_number(dtype: torch.dtype) -> None:
    """Against a sum one by one."""
    weight = torch.cat([weights(2000), torch.randn(2000)])
    param, kept = narrowed(Kahan(), weight, dtype)
    assert kept is not None
    assert kept.isfinite().all()
    param[::3] = all_numbers(dtype)[torch.randint(1 << 16, param[::3].shape)]
    found = widened(Kahan(), param, kept)
    for number, rest, weight in zip(param.float(), kept.float(), found, strict=True):
        is_rest = (number + 0.99 * rest).to(dtype) == number.to(dtype)
        expected = number + (rest if is_rest else 0.0)
        assert same_bits(weight, expected)


@pytest.mark.parametrize("store", [kind() for kind in STORES.values()], ids=STORES)
def test_a_weight_is_not_changed_by_rounding_it(store: Store) -> None:
    """The optimizer may have kept hold of it."""
    weight = weights(1000).nan_to_num(nan=1.0)
    before, param = weight.clone(), torch.zeros(weight.shape, dtype=BF16)
    store.narrow_(weight, param, store.empty(param), "")
    assert same_bits(weight, before)
