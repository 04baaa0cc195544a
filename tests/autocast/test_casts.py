import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE

from halfstep._autocast import autocast
from halfstep._autocast.casts import ToPromote, cast, widest

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def test_casting_goes_into_lists_and_leaves_the_rest() -> None:
    ints = torch.ones(2, dtype=torch.int64)
    value = [torch.ones(2), (ints, None, "text", torch.ones(1))]
    floats, (same, none, text, nested) = cast(value, "cpu", BF16)

    assert floats.dtype == nested.dtype == BF16
    assert same is ints
    assert (none, text) == (None, "text")
    assert cast(torch.ones(2), "cuda", BF16).dtype == FP32  # on another device


def test_float64_is_told() -> None:
    with pytest.raises(ToPromote):
        cast([torch.ones(2), (torch.ones(2, dtype=FP64),)], "cpu", BF16)
    assert cast(torch.ones(2, dtype=FP64), "cuda", BF16).dtype == FP64  # on another device


def test_the_widest_dtype() -> None:
    def tensors(*dtypes: torch.dtype) -> list[torch.Tensor]:
        return [torch.ones(1, dtype=dtype) for dtype in dtypes]

    assert widest(tensors(BF16, torch.int64), "cpu") == BF16
    assert widest([*tensors(BF16), tensors(FP16)], "cpu") == FP32
    assert widest(tensors(FP64, BF16), "cpu") == FP64
    assert widest([*tensors(BF16), torch.ones(1, device="meta")], "cpu") == BF16
    assert widest([1, None, *tensors(torch.int64)], "cpu") is None
    number = torch.tensor(2.0, dtype=FP64)
    assert widest([*tensors(BF16), number], "cpu") == BF16
    assert widest([number], "cpu") == FP64
    assert cast(number, "cpu", BF16) is number


@pytest.mark.usefixtures("both_kernels")
def test_an_error_of_the_op_is_the_only_one() -> None:
    with autocast(DEVICE, BF16), pytest.raises(RuntimeError) as raised:
        F.linear(torch.ones(4, 8, dtype=FP64), torch.ones(16, 32))
    assert raised.value.__context__ is None
