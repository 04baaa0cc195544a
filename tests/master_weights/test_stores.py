"""The stores of master weights against float32 weights, over all bits."""

import math
import struct

import pytest
import torch
from torch import Tensor

from halfstep._master_weights import exchange
from halfstep._master_weights.exchange import PIECE, STORES, Float32, Split, Store, new_memory

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


def narrowed(store: Store, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    param = torch.zeros(weight.shape, dtype=dtype)
    kept = store.empty(param)
    store.narrow_(weight.clone(), param, kept)
    return param, kept


def widened(store: Store, param: Tensor, kept: Tensor) -> Tensor:
    return store.widen(param.clone(), kept.clone(), new_memory).clone()


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
    assert kept.dtype is torch.int16
    assert same_bits(widened(Split(), param, kept), weight)


def test_split_against_the_bits() -> None:
    weight = weights(5000)
    param, kept = narrowed(Split(), weight, BF16)
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
    for store in STORES.values():
        param, kept = narrowed(store, weight, BF16)
        assert param.isnan().all()
        assert widened(store, param, kept).isnan().all()


@pytest.mark.parametrize(
    ("store", "dtype"), [(store, dtype) for store in STORES.values() for dtype in store.dtypes]
)
def test_a_weight_rounds_to_whatever_is_in_the_parameter(store: Store, dtype: torch.dtype) -> None:
    """All numbers of the dtype, written over weights of any other."""
    for seed in range(3):
        torch.manual_seed(seed)
        numbers = all_numbers(dtype)
        weight = torch.randn(numbers.shape) * 10.0 ** torch.randint(-40, 38, numbers.shape)
        _, kept = narrowed(store, weight, dtype)
        found = widened(store, numbers, kept)
        again, _ = narrowed(store, found, dtype)
        assert same_bits(again, numbers) or torch.equal(again.nan_to_num(), numbers.nan_to_num())
        assert torch.equal(found.isnan(), numbers.isnan())


@pytest.mark.parametrize("dtype", [BF16, FP16])
def test_float32_keeps_the_weight(dtype: torch.dtype) -> None:
    weight = weights()
    param, kept = narrowed(Float32(), weight, dtype)
    assert same_bits(param, weight.to(dtype))
    assert same_bits(widened(Float32(), param, kept), weight)


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
@pytest.mark.parametrize("is_special", [False, True])
def test_looking_for_special_numbers_changes_nothing(store, is_special, monkeypatch):
    """What is left out where a look finds none is done on devices, which are not looked at."""
    weight = weights(1 << 18) if is_special else torch.randn(3 * PIECE // 2)
    for dtype in store.dtypes:
        found = []
        for looks in (True, False):
            with monkeypatch.context() as patch:
                if not looks:
                    for name in ("_may_hold_nan", "_may_differ"):
                        patch.setattr(exchange, name, lambda *_: True)
                param, kept = narrowed(store, weight, dtype)
                param[::7] *= 2  # somebody writes to it
                found.append((param, widened(store, param, kept)))
        for one, other in zip(*found, strict=True):
            assert same_bits(one, other)


@pytest.mark.parametrize("store", STORES.values(), ids=STORES)
def test_a_weight_is_not_changed_by_rounding_it(store: Store) -> None:
    """The optimizer may have kept hold of it."""
    weight = weights(1000).nan_to_num(nan=1.0)
    before, param = weight.clone(), torch.zeros(weight.shape, dtype=BF16)
    store.narrow_(weight, param, store.empty(param))
    assert same_bits(weight, before)
