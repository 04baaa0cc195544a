"""Rules for ops that a user has defined with torch.library."""

import pytest
import torch
from tests.device import DEVICE
from torch import Tensor

from halfstep._autocast import autocast

BF16 = torch.bfloat16
WIDE, NARROW = torch.ones(2), torch.ones(2, dtype=BF16)


@pytest.fixture(autouse=True, scope="module")
def library() -> None:
    """``halfstep_test::seen(a, b)`` returns ``a + b`` and so the dtypes it was given."""

    @torch.library.custom_op("halfstep_test::seen", mutates_args=())
    def seen(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    @seen.register_fake
    def _(a: Tensor, b: Tensor) -> Tensor:
        return a + b

    seen.register_autograd(lambda _, grad: (grad, grad))

    @torch.library.custom_op("halfstep_test::own", mutates_args=())
    def own(a: Tensor) -> Tensor:
        return a.clone()

    own.register_autocast("cpu", torch.float16)


def seen(a: Tensor, b: Tensor) -> torch.dtype:
    result: Tensor = torch.ops.halfstep_test.seen(a, b)
    return result.dtype


@pytest.mark.parametrize(
    ("rule", "narrow", "mixed"),
    [
        ("seen:lower", BF16, BF16),
        ("seen.default:fp32", torch.float32, torch.float32),
        ("seen:promote", BF16, torch.float32),
        ("se*:fp32", torch.float32, torch.float32),
        ("seen[fp16]:fp32", BF16, torch.float32),
    ],
)
def test_all_kinds_of_rules(rule: str, narrow: torch.dtype, mixed: torch.dtype) -> None:
    with autocast(DEVICE, BF16, policy=f"standard; halfstep_test::{rule}"):
        assert seen(NARROW, NARROW) is narrow
        assert seen(NARROW, WIDE) is mixed
    assert seen(NARROW, NARROW) is BF16


@pytest.mark.slow
def test_a_rule_is_differentiated_and_compiled() -> None:
    def loss(a: Tensor) -> Tensor:
        return torch.ops.halfstep_test.seen(a, a).float().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    for function in (loss, compiled):
        a = torch.ones(2, requires_grad=True)
        with autocast(DEVICE, BF16, policy="standard; halfstep_test::seen:lower"):
            function(a).backward()
        assert torch.equal(a.grad, torch.full((2,), 2.0))


def test_what_the_author_registered_holds_where_no_rule_does() -> None:
    def own() -> torch.dtype:
        return torch.ops.halfstep_test.own(WIDE).dtype

    with autocast(DEVICE, BF16, policy="standard; halfstep_test::own:lower"):
        assert own() is BF16
    with autocast(DEVICE, BF16):
        assert own() is torch.float16
    with torch.autocast(DEVICE, BF16):
        assert own() is torch.float16
    assert own() is torch.float32


def test_a_misspelt_op_is_refused() -> None:
    with pytest.raises(ValueError, match="no op 'halfstep_test::sen'; did you mean 'halfstep_te"):
        autocast(DEVICE, BF16, policy="standard; halfstep_test::sen:lower")
