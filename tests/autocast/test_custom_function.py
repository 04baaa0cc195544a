from collections import ChainMap
from types import MappingProxyType
from typing import Any, NamedTuple

import pytest
import torch
from tests.device import DEVICE
from torch import Tensor

from halfstep._autocast import Rule, autocast, custom_bwd, custom_fwd, preset
from halfstep.errors import CallOrderError

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LOW_SOFTMAX = preset("standard") | Rule("softmax", "lower")


def softmax_dtype() -> torch.dtype:
    return torch.softmax(torch.ones(2, dtype=BF16), 0).dtype


def product(fwd: Any, bwd: Any, seen: list[object]) -> type[torch.autograd.Function]:
    class Product(torch.autograd.Function):
        @staticmethod
        @fwd
        def forward(ctx: Any, a: Tensor, b: Tensor, extra: object = None) -> Tensor:
            seen.append(("forward", a.dtype, torch.is_autocast_enabled(DEVICE), softmax_dtype()))
            ctx.save_for_backward(a, b)
            return a.mm(b)

        @staticmethod
        @bwd
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
            seen.append(("backward", torch.is_autocast_enabled(DEVICE), softmax_dtype()))
            a, b = ctx.saved_tensors
            return grad.mm(b.t()).to(a.dtype), a.t().mm(grad).to(b.dtype), None

    return Product


@pytest.mark.parametrize("call", [True, False])
def test_backward_runs_under_the_autocast_and_policy_of_forward(call: bool) -> None:
    seen: list[object] = []
    function = (
        product(custom_fwd(device_type=DEVICE), custom_bwd(device_type=DEVICE), seen)
        if call
        else product(custom_fwd, custom_bwd, seen)
    )
    a = torch.randn(4, 4, requires_grad=True)
    with autocast(DEVICE, BF16, policy=LOW_SOFTMAX):
        out = function.apply(a, a)
    with autocast(DEVICE, FP16, policy="standard"):  # not what forward ran under
        out.float().sum().backward()

    assert out.dtype == BF16
    assert seen == [("forward", FP32, True, BF16), ("backward", True, BF16)]
    assert a.grad.dtype == FP32


def test_under_plain_autocast_backward_runs_under_plain_autocast() -> None:
    seen: list[object] = []
    function = product(custom_fwd(device_type=DEVICE), custom_bwd(device_type=DEVICE), seen)
    a = torch.randn(4, 4, requires_grad=True)
    with torch.autocast(DEVICE, BF16):
        out = function.apply(a, a)
    with autocast(DEVICE, BF16):
        out.float().sum().backward()

    assert seen == [("forward", FP32, True, BF16), ("backward", True, BF16)]


def test_inputs_are_cast_and_forward_runs_without_autocast() -> None:
    seen: list[object] = []
    function = product(
        custom_fwd(device_type=DEVICE, cast_inputs=FP32), custom_bwd(device_type=DEVICE), seen
    )
    a = torch.randn(4, 4, dtype=BF16, requires_grad=True)
    with autocast(DEVICE, BF16):
        out = function.apply(a, a, {"list": [torch.ones(1)]})
        out.sum().backward()

    assert out.dtype == FP32
    assert seen == [("forward", FP32, False, BF16), ("backward", False, BF16)]


def test_outside_autocast_nothing_is_cast() -> None:
    seen: list[object] = []
    function = product(
        custom_fwd(device_type=DEVICE, cast_inputs=FP32), custom_bwd(device_type=DEVICE), seen
    )
    a = torch.randn(4, 4, dtype=BF16, requires_grad=True)
    function.apply(a, a).sum().backward()

    assert seen == [("forward", BF16, False, BF16), ("backward", False, BF16)]


def taking(dtype: torch.dtype) -> tuple[Any, list[Any]]:
    """Return a function that casts its inputs, and what its forward gets after the first."""
    got: list[Any] = []

    class Take(torch.autograd.Function):
        @staticmethod
        @custom_fwd(device_type=DEVICE, cast_inputs=dtype)
        def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
            got.extend(rest)
            return x

        @staticmethod
        @custom_bwd(device_type=DEVICE)
        def backward(ctx: Any, grad: Tensor) -> Any:
            return grad, *[None] * len(got)

    return Take, got


class Pair(NamedTuple):
    low: Tensor
    wide: Tensor


def test_a_named_tuple_is_cast_too() -> None:
    function, got = taking(FP32)
    wide = torch.ones(1)
    with autocast(DEVICE, BF16):
        function.apply(torch.ones(1), Pair(torch.ones(1, dtype=BF16), wide))
    assert type(got[0]) is Pair
    assert got[0].low.dtype is FP32
    assert got[0].wide is wide


class Frozen(dict[str, Tensor]):
    def __setitem__(self, key: str, value: Tensor) -> None:
        raise TypeError("frozen")


@pytest.mark.parametrize("kind", [MappingProxyType, ChainMap, Frozen])
def test_a_mapping_that_is_no_plain_dict_is_cast_too(kind: Any) -> None:
    function, got = taking(FP32)
    given = kind({"low": torch.ones(1, dtype=BF16)})
    with autocast(DEVICE, BF16):
        function.apply(torch.ones(1), given, [given], {"inside": given})
    for cast in (got[0], got[1][0], got[2]["inside"]):
        assert cast["low"].dtype is FP32


def test_casting_of_inputs_goes_into_containers_and_spares_the_rest() -> None:
    function, got = taking(FP16)
    ints, double = torch.ones(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64)
    with autocast(DEVICE, BF16):
        out = function.apply(
            torch.ones(1, requires_grad=True), [ints, (double,)], {"k": torch.ones(1)}, "s"
        )

    assert out.dtype == FP16
    assert got[0][0] is ints
    assert got[0][1][0].dtype == torch.float64
    assert got[1]["k"].dtype == FP16
    assert got[2] == "s"


def test_torchs_decorator_on_backward_works_too() -> None:
    seen: list[object] = []
    function = product(
        custom_fwd(device_type=DEVICE), torch.amp.custom_bwd(device_type=DEVICE), seen
    )
    a = torch.randn(4, 4, requires_grad=True)
    with autocast(DEVICE, FP16):
        out = function.apply(a, a)
    assert out.grad_fn._dtype == FP16  # what torch.amp.custom_bwd goes by
    out.float().sum().backward()

    assert [entry[1] for entry in seen[1:]] == [True]  # type: ignore[index]


def test_torchs_decorator_on_forward_alone_is_an_error_that_says_so() -> None:
    function = product(torch.amp.custom_fwd(device_type=DEVICE), custom_bwd(device_type=DEVICE), [])
    a = torch.randn(4, 4, requires_grad=True)
    with autocast(DEVICE, BF16):
        out = function.apply(a, a)
    with pytest.raises(CallOrderError, match=r"halfstep\.custom_fwd"):
        out.float().sum().backward()
