"""Every way of writing to a weight that we know, against a cast made by hand.

In and between contexts, with gradient, without and in inference mode, trained and frozen: no result
may be that of the weight as it was. One exception: inside one context, what torch.autocast does not
see of a weight that requires a gradient need not be seen (UNSEEN).
"""

import ctypes
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tests.device import DEVICE
from torch import Tensor, nn

from halfstep._autocast import autocast, weight_cache

BF16 = torch.bfloat16
X = torch.ones(1, 2)
NEW = torch.full((2, 2), 3.0)
Write = Callable[[nn.Linear], object]


@pytest.fixture(autouse=True)
def small_weights_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_cache, "SMALL", 0)


# --- ways to write --------------------------------------------------------------------------------


class WritesThroughData(torch.optim.Optimizer):
    """As optimizers were written before there was torch.no_grad."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                param.data.sub_(param.grad.data)


def by_optimizer(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Write:
    def write(layer: nn.Linear) -> None:
        layer.weight.requires_grad_(True)
        layer.weight.grad = torch.full((2, 2), -2.0)
        make([layer.weight]).step()

    return write


def in_place(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight.fill_(3)


def add_to_data(layer: nn.Linear) -> None:
    layer.weight.data += 2


def slice_of_data(layer: nn.Linear) -> None:
    layer.weight.data[:] = 3


def slice_without_gradient(layer: nn.Linear) -> None:
    with torch.no_grad():
        layer.weight[0] = 3
        layer.weight[1] = 3


def rows_of_data(layer: nn.Linear) -> None:
    for row in layer.weight:
        row.data.fill_(3)


def replaced_twice(layer: nn.Linear) -> None:
    layer.weight.data = layer.weight.data + 1
    layer.weight.data = layer.weight.data + 1


def soft_update(layer: nn.Linear) -> None:
    source = nn.Parameter(torch.full((2, 2), 5.0))
    for target in layer.parameters():
        target.data.copy_(0.5 * source.data + 0.5 * target.data)


def as_bytes(layer: nn.Linear) -> None:
    layer.weight.untyped_storage()[:] = 0
    layer.weight.detach().view(-1).data.add_(3)


def through_a_flat_alias(layer: nn.Linear) -> None:
    flat = torch.empty(0)
    flat.set_(layer.weight.untyped_storage(), 0, (4,))
    flat.fill_(3)


def by_a_fused_op(layer: nn.Linear) -> None:
    with torch.no_grad():
        torch._fused_sgd_(
            [layer.weight],
            [torch.full((2, 2), -2.0)],
            [],
            weight_decay=0.0,
            momentum=0.0,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=True,
        )


def write_to_data(x: Tensor) -> None:
    x.data.fill_(3.0)


def by_a_hook_of_the_backward_pass(layer: nn.Linear) -> None:
    layer.weight.requires_grad_(True)
    with torch.inference_mode(False), torch.enable_grad():
        y = (layer.weight * 2).sum()
        y.register_hook(lambda grad: write_to_data(layer.weight))
        torch.autograd.grad(y, [layer.weight])


def through_dlpack_of_itself(layer: nn.Linear) -> None:
    weight = layer.weight if not layer.weight.requires_grad else layer.weight.detach()
    torch.from_dlpack(weight).fill_(3)


def keeping_the_version(layer: nn.Linear) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(layer.weight):
        layer.weight.detach().data.fill_(3)


def through_a_pointer(layer: nn.Linear) -> None:
    new = NEW.clone()
    ctypes.memmove(layer.weight.data_ptr(), new.data_ptr(), new.nbytes)


def by_a_replaced_parameter(layer: nn.Linear) -> None:
    layer.weight = nn.Parameter(NEW.clone(), requires_grad=layer.weight.requires_grad)


def by_swapping(layer: nn.Linear) -> None:
    torch.utils.swap_tensors(
        layer.weight, nn.Parameter(NEW.clone(), requires_grad=layer.weight.requires_grad)
    )


def by_moving(layer: nn.Linear) -> None:
    layer.double()
    layer.weight.data.fill_(3)
    layer.float()


def unfused(optimizer: type[torch.optim.Optimizer], **options: Any) -> Write:
    return by_optimizer(lambda params: optimizer(params, **options))


WRITES: dict[str, Write] = {
    "in place": in_place,
    "a slice": slice_without_gradient,
    "nn.init": lambda layer: nn.init.constant_(layer.weight, 3),
    "load_state_dict": lambda layer: layer.load_state_dict({"weight": NEW}),
    "load_state_dict, assign": lambda layer: layer.load_state_dict(
        {"weight": NEW.clone()}, assign=True
    ),
    "vector_to_parameters": lambda layer: nn.utils.vector_to_parameters(
        NEW.flatten(), layer.parameters()
    ),
    "data =": lambda layer: setattr(layer.weight, "data", NEW.clone()),
    "data = twice": replaced_twice,
    "another parameter": by_a_replaced_parameter,
    "swap_tensors": by_swapping,
    "double, float": by_moving,
    "SGD": unfused(torch.optim.SGD, lr=1.0, foreach=False),
    "SGD foreach": unfused(torch.optim.SGD, lr=1.0, foreach=True),
    "SGD fused": unfused(torch.optim.SGD, lr=1.0, fused=True),
    "Adam fused": unfused(torch.optim.Adam, lr=2.0, eps=0, fused=True),
    "optimizer through data": by_optimizer(WritesThroughData),
    "a fused op": by_a_fused_op,
    "data": lambda layer: layer.weight.data.fill_(3),
    "data +=": add_to_data,
    "data[:] =": slice_of_data,
    "data.copy_": lambda layer: layer.weight.data.copy_(NEW),
    "data.clamp_": lambda layer: layer.weight.data.clamp_(3),
    "soft update": soft_update,
    "foreach on data": lambda layer: torch._foreach_add_([layer.weight.data], 2.0),
    "detach().data": lambda layer: layer.weight.detach().data.fill_(3),
    "torch.detach(w).data": lambda layer: torch.detach(layer.weight).data.fill_(3),
    "view.data": lambda layer: layer.weight.view(-1).data.fill_(3),
    "t().data": lambda layer: torch.t(layer.weight).data.fill_(3),
    "rows.data": rows_of_data,
    "unbind.data": lambda layer: [row.data.fill_(3) for row in layer.weight.unbind()],
    "as_strided.data": lambda layer: torch.as_strided(layer.weight, (4,), (1,)).data.fill_(3),
    "keeping the version": keeping_the_version,
    "numpy": lambda layer: layer.weight.detach().numpy().fill(3),
    "data.numpy": lambda layer: layer.weight.data.numpy().fill(3),
    "np.asarray": lambda layer: np.asarray(layer.weight.detach()).fill(3),
    "dlpack": lambda layer: torch.from_dlpack(layer.weight.detach()).fill_(3),
    "dlpack of itself": through_dlpack_of_itself,
    "a hook": by_a_hook_of_the_backward_pass,
    "storage.copy_": lambda layer: layer.weight.untyped_storage().copy_(
        NEW.clone().untyped_storage()
    ),
    "storage bytes": as_bytes,
    "set_ of its storage": through_a_flat_alias,
    "a pointer": through_a_pointer,
    "compiled": lambda layer: torch.compile(in_place, backend="aot_eager")(layer),
    "compiled data": lambda layer: torch.compile(
        lambda: layer.weight.data.fill_(3), backend="aot_eager"
    )(),
}
UNSEEN = set(WRITES) - {
    *("in place", "a slice", "nn.init", "load_state_dict", "load_state_dict, assign"),
    *("vector_to_parameters", "data =", "data = twice", "another parameter", "swap_tensors"),
    *("double, float", "SGD", "SGD foreach", "SGD fused", "Adam fused", "optimizer through data"),
    *("compiled",),
}
"""Not seen inside one context: writes that no version counts, to memory of the same owner."""


# --- the matrix -----------------------------------------------------------------------------------

MODES = {"grad": nullcontext, "no_grad": torch.no_grad, "inference": torch.inference_mode}


def layer_of_ones(frozen: bool) -> nn.Linear:
    layer = nn.Linear(2, 2, bias=False)
    nn.init.constant_(layer.weight, 1)
    return layer.requires_grad_(not frozen)


def is_stale(layer: nn.Linear, write: Write, context: Callable[[], Any], inside: bool) -> bool:
    """Return whether a weight that was 1 and is used as 3 from a write on is seen as it was."""
    results = []
    with context() if inside else nullcontext():
        for change in (lambda _: None, write):
            change(layer)
            for _ in range(3):
                with nullcontext() if inside else context():
                    results.append(layer(X).tolist())
    by_hand = F.linear(X.to(BF16), layer.weight.detach().to(BF16))
    assert by_hand.tolist() == [[6, 6]]
    assert results[:3] == [[[2, 2]]] * 3
    return results[3:] != [[[6, 6]]] * 3


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated")
@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", WRITES)
def test_no_cast_is_stale(name: str, mode: str, frozen: bool) -> None:
    write = WRITES[name]
    for inside in (False, True):
        layer = layer_of_ones(frozen)
        with MODES[mode]():
            stale = is_stale(layer, write, lambda: autocast(DEVICE, BF16), inside)
        if stale:
            assert (inside, frozen) == (True, False)
            assert name in UNSEEN
            if DEVICE == "cpu":  # torch.autocast lowers nothing on the simulated device
                layer = layer_of_ones(frozen)
                with MODES[mode]():
                    assert is_stale(layer, write, lambda: torch.autocast(DEVICE, BF16), inside)


def in_place_of(weight: Tensor) -> None:
    with torch.no_grad():
        weight.fill_(3)


def copied_to(storage: torch.UntypedStorage) -> None:
    storage.copy_(NEW.clone().untyped_storage())


# What shares the memory of a weight, and how to write to it.
ALIASES: dict[str, tuple[Callable[[nn.Linear], Any], Callable[[Any], object]]] = {
    "data": (lambda layer: layer.weight.data, in_place_of),
    "view": (lambda layer: layer.weight.detach().view(-1), lambda flat: flat.data.fill_(3)),
    "array": (lambda layer: layer.weight.detach().numpy(), lambda array: array.fill(3)),
    "dlpack": (lambda layer: torch.from_dlpack(layer.weight.detach()), in_place_of),
    "parameter": (lambda layer: nn.Parameter(layer.weight.data), in_place_of),
    "storage": (lambda layer: layer.weight.untyped_storage(), copied_to),
}


@pytest.mark.parametrize("alias", ALIASES)
@pytest.mark.parametrize("taken_early", [True, False])
def test_no_cast_is_stale_after_a_write_through_an_alias(alias: str, taken_early: bool) -> None:
    take, write = ALIASES[alias]
    layer = layer_of_ones(frozen=False)
    memory = take(layer) if taken_early else None
    with autocast(DEVICE, BF16):
        for _ in range(3):
            assert layer(X).tolist() == [[2, 2]]
        if not taken_early:
            memory = take(layer)
        write(memory)
        for _ in range(3):
            assert layer(X).tolist() == [[6, 6]]


def test_a_tensor_that_is_an_array_is_never_kept() -> None:
    array = np.ones((2, 2), dtype=np.float32)
    layer = nn.Linear(2, 2, bias=False)
    layer.weight.data = torch.from_numpy(array)
    with autocast(DEVICE, BF16):
        for value in (1, 2, 3):
            array[:] = value
            for _ in range(3):
                assert layer(X).tolist() == [[2 * value, 2 * value]]
