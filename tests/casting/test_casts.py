import weakref

import pytest
import torch
from torch import nn

from halfstep.casting import autocast
from halfstep.casting.casts import WeightCache, cast, widest
from halfstep.casting.kernels import only_our_kernels

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def test_a_weight_is_cast_once() -> None:
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))

    assert cache.cast(weight, BF16) is cache.cast(weight, BF16)
    assert cache.cast(weight, BF16).dtype == BF16


def test_what_decides_that_a_cast_is_another() -> None:
    cache, weight = WeightCache(), nn.Parameter(torch.ones(2))
    first = cache.cast(weight, BF16)

    assert cache.cast(weight, FP16).dtype == FP16
    with torch.no_grad():
        without_gradient = cache.cast(weight, BF16)
        assert without_gradient is not first
        assert not without_gradient.requires_grad
        weight.add_(1)
    assert cache.cast(weight, BF16).tolist() == [2, 2]  # fact A13: not the old weight


def test_a_new_weight_at_the_address_of_an_old_one_is_cast_anew() -> None:
    cache = WeightCache()
    with torch.no_grad():  # with a gradient the cast itself keeps its weight alive
        for value in range(50):
            weight = nn.Parameter(torch.full((2,), float(value)))
            assert cache.cast(weight, BF16).tolist() == [value, value]
            alive = weakref.ref(weight)
            del weight
            assert alive() is None


def test_a_weight_made_in_inference_mode_has_no_version_and_is_not_kept() -> None:
    cache = WeightCache()
    with torch.inference_mode():
        weight = nn.Parameter(torch.ones(2))
        assert cache.cast(weight, BF16).dtype == BF16


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2),  # no gradient
        lambda: nn.Parameter(torch.ones(2)) * 1,  # no leaf
        lambda: nn.Parameter(torch.ones(2, dtype=FP16)),
        lambda: torch.ones(2, 2)[0].requires_grad_(),  # a view
    ],
)
def test_only_weights_are_kept(make: object) -> None:
    cache, tensor = WeightCache(), make()  # type: ignore[operator]

    assert cache.cast(tensor, BF16) is not cache.cast(tensor, BF16)


def test_nothing_is_kept_when_the_cache_is_switched_off() -> None:
    weight = nn.Parameter(torch.ones(2))
    with autocast("cpu", cache_enabled=False):
        cache = WeightCache()
        assert cache.cast(weight, BF16) is not cache.cast(weight, BF16)


def test_contexts_share_casts_until_the_outermost_ends() -> None:
    weight, seen = nn.Parameter(torch.ones(2, 2)), []
    with only_our_kernels():
        context = autocast("cpu", BF16, policy="torch")

    def product() -> None:
        out = torch.mm(torch.ones(2, 2), weight)
        assert out.grad_fn is not None
        seen.append(out.grad_fn.next_functions[1][0])

    with context:
        product()
        with context:
            product()
    with context:
        product()

    assert seen[0] is seen[1]
    assert seen[0] is not seen[2]


def test_casting_goes_into_lists_and_leaves_the_rest() -> None:
    ints = torch.ones(2, dtype=torch.int64)
    value = [torch.ones(2), (ints, None, "text", torch.ones(1)), torch.ones(2, dtype=FP64)]
    floats, (same, none, text, nested), double = cast(value, "cpu", BF16)

    assert floats.dtype == nested.dtype == BF16
    assert same is ints
    assert (none, text) == (None, "text")
    assert double.dtype == FP64
    assert cast(torch.ones(2), "cuda", BF16).dtype == FP32  # on another device


def test_the_widest_dtype() -> None:
    def tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
        return [torch.ones(1, dtype=dtype) for dtype in dtypes]

    assert widest(tensors(BF16, torch.int64), "cpu") == BF16
    assert widest([*tensors(BF16), tensors(FP16)], "cpu") == FP32
    assert widest(tensors(FP64, BF16), "cpu") == FP64
    assert widest([*tensors(BF16), torch.ones(1, device="meta")], "cpu") == BF16
    assert widest([1, None, *tensors(torch.int64)], "cpu") is None
