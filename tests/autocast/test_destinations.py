"""Ops in place under autocast: what is written takes the dtype of what is written to."""

import itertools
from collections.abc import Callable

import pytest
import torch
from tests.device import DEVICE, seeded
from torch import Tensor

from halfstep._autocast import Policy, Rule, autocast, preset
from halfstep._autocast.rule import HALVES

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROWS = torch.tensor([0, 1])
PLACES = torch.tensor([[0, 1], [1, 0]])
MASK = torch.tensor([[True], [True], [False]])


def set_items(index: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    def write(x: Tensor, source: Tensor) -> Tensor:
        x[index] = source
        return x

    return write


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "x[index] = ...": set_items(ROWS),
    "x[mask] = ...": set_items(MASK[:, 0]),
    "index_put_": lambda x, s: x.index_put_((ROWS,), s, accumulate=True),
    "index_add_": lambda x, s: x.index_add_(0, ROWS, s),
    "index_copy_": lambda x, s: x.index_copy_(0, ROWS, s),
    "index_reduce_": lambda x, s: x.index_reduce_(0, ROWS, s, "mean"),
    "masked_scatter_": lambda x, s: x.masked_scatter_(MASK, s),
    "put_": lambda x, s: x.put_(ROWS, s[0]),
    "scatter_": lambda x, s: x.scatter_(0, PLACES, s),
    "scatter_, reduce": lambda x, s: x.scatter_(0, PLACES, s, reduce="multiply"),
    "scatter_add_": lambda x, s: x.scatter_add_(0, PLACES, s),
    "scatter_reduce_": lambda x, s: x.scatter_reduce_(0, PLACES, s, "amax"),
    "lerp_": lambda x, s: x[:2].lerp_(s, 0.25),
    "addmm_": lambda x, s: x[:2].addmm_(s, s),
    "addmv_": lambda x, s: x[:2, 0].addmv_(s, s[0]),
    "addr_": lambda x, s: x[:2].addr_(s[0], s[1]),
    "addbmm_": lambda x, s: x[:2].addbmm_(s[None], s[None]),
    "baddbmm_": lambda x, s: x[None, :2].baddbmm_(s[None], s[None]),
}
ANEW: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index_put": lambda x, s: x.index_put((ROWS,), s),
    "index_add": lambda x, s: x.index_add(0, ROWS, s),
    "index_copy": lambda x, s: x.index_copy(0, ROWS, s),
    "index_reduce": lambda x, s: x.index_reduce(0, ROWS, s, "mean"),
    "masked_scatter": lambda x, s: x.masked_scatter(MASK, s),
    "scatter": lambda x, s: x.scatter(0, PLACES, s),
    "scatter_add": lambda x, s: x.scatter_add(0, PLACES, s),
    "scatter_reduce": lambda x, s: x.scatter_reduce(0, PLACES, s, "sum"),
}
# These add in float32 and round the sum once. PyTorch's index_add_ and scatter_add_ do on a CPU.
ADDING = ("index_put_", "index_reduce_", "scatter_, reduce", "addbmm_")
MIXES = list(itertools.product(FLOATS, FLOATS))


def tensors(to: torch.dtype, of: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = seeded(0)
    x, source = torch.randn(3, 2, generator=generator), torch.randn(2, 2, generator=generator)
    return x.to(to), source.to(of)


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("op", IN_PLACE)
@pytest.mark.parametrize("lower", [torch.bfloat16, torch.float16])
def test_the_destination_decides(op: str, lower: torch.dtype) -> None:
    for to, of in MIXES:
        x, source = tensors(to, of)
        wide = torch.float32 if op in ADDING and to in HALVES else to
        by_hand = x.to(wide, copy=True)
        expected = IN_PLACE[op](by_hand, source.to(wide)).to(to)
        with autocast(DEVICE, lower):
            result = IN_PLACE[op](x, source)
        assert result.dtype is to
        assert torch.equal(result, expected)
        assert torch.equal(x, by_hand.to(to))


@pytest.mark.filterwarnings("ignore:index_reduce", "ignore:The reduce argument")
@pytest.mark.parametrize("op", ANEW)
def test_not_in_place_the_widest_decides(op: str) -> None:
    for to, of in MIXES:
        x, source = tensors(to, of)
        wide = torch.promote_types(to, of)
        with autocast(DEVICE, torch.bfloat16):
            assert torch.equal(ANEW[op](x, source), ANEW[op](x.to(wide), source.to(wide)))


def test_what_is_written_is_differentiated_and_compiled() -> None:
    linear = torch.nn.Linear(2, 2)

    def loss(x: Tensor) -> Tensor:
        x = x * 2
        x[ROWS] = linear(x[ROWS])
        return x.square().sum()

    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True)
    grads = []
    for function in (loss, compiled):
        x = torch.ones(3, 2, requires_grad=True)
        with autocast(DEVICE, torch.bfloat16):
            function(x).backward()
        grads.append((x.grad, *(p.grad for p in linear.parameters())))
        linear.zero_grad()
    assert all(map(torch.equal, *grads))
    assert grads[0][1].count_nonzero() == 4


def test_integers_stay_integers() -> None:
    x = torch.zeros(3, dtype=torch.int64)
    with autocast(DEVICE, torch.bfloat16):
        x[ROWS] = torch.ones(2, dtype=torch.int64)
        x.index_add_(0, ROWS, torch.ones(2, dtype=torch.int64))
    assert x.tolist() == [2, 2, 0]


def test_no_other_rule_casts_what_is_written_to() -> None:
    policy = preset("standard") | "index_*:lower"
    assert policy.action("index_put_.default", "cpu", torch.bfloat16) == "destination"
    assert policy.action("index_put.default", "cpu", torch.bfloat16) == "lower"
    assert (policy | "index_*_:leave").action(
        "index_put_.default", "cpu", torch.bfloat16
    ) == "leave"
    assert Policy.parse("fp32; put_:destination").rules == (Rule("put_", "destination"),)
    for wrong in ("exp_:fp32", "index_put_:promote", "exp:destination", "exp.out:fp32"):
        with pytest.raises(ValueError, match="'destination' is the action for ops in place"):
            Policy.parse(f"standard; {wrong}")


def test_other_half_precisions_are_promoted_too() -> None:
    """PyTorch's own promotion refuses them."""
    halves = torch.ones(2, dtype=torch.float16), torch.ones(2, dtype=torch.float16)
    with autocast(DEVICE, torch.bfloat16):
        assert torch.dot(*halves).dtype is torch.float16
        assert torch.dot(halves[0], torch.ones(2, dtype=torch.bfloat16)).dtype is torch.float32
