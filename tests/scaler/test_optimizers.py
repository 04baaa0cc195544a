"""Optimizers of unusual shapes: attributes of a container that are none, unusual groups."""

import dataclasses
import gc
import math
import weakref
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from torch import nn

from halfstep import GradScaler


class Raises(torch.optim.SGD):
    @property
    def optimizers(self) -> list[object]:
        raise RuntimeError("not built yet")


class Registered(torch.optim.SGD):
    """All of them are in a list of the class."""

    optimizers: list[torch.optim.Optimizer] = []  # noqa: RUF012

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.optimizers.append(self)


@pytest.mark.parametrize("fused", [False, True])
def test_a_property_that_raises_holds_nothing(fused: bool) -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Raises([weight], lr=1.0, fused=fused)
    scaler = GradScaler(DEVICE)
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]


def test_a_registry_of_a_class_is_no_container() -> None:
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second = Registered([good], lr=1.0), Registered([bad], lr=1.0)
    scaler = GradScaler(DEVICE)
    scaler.scale(good.sum() + bad.sum()).backward()
    bad.grad.fill_(math.inf)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert good.tolist() == [0.0, 0.0]
    assert bad.tolist() == [1.0, 1.0]


# --- unusual groups and classes -------------------------------------------------------------------


class Plain:
    """An optimizer that is no ``torch.optim.Optimizer``."""

    __slots__ = ("__weakref__", "param", "param_groups")

    def __init__(self, param: nn.Parameter, groups: Any) -> None:
        self.param, self.param_groups = param, groups

    @torch.no_grad()
    def step(self) -> None:
        assert self.param.grad is not None
        self.param -= self.param.grad


@dataclasses.dataclass
class Data:
    """Not hashable."""

    param: nn.Parameter
    param_groups: Any

    step = Plain.step


UNUSUAL = {
    "slots": lambda p: Plain(p, [{"params": [p]}]),
    "data class": lambda p: Data(p, [{"params": [p]}]),
    "None among the parameters": lambda p: Plain(p, [{"params": [None, p]}]),
    "a group of None": lambda p: Plain(p, [{"params": [None]}, {"params": [p]}]),
    "an empty group": lambda p: Plain(p, [{"params": []}, {"params": [p]}]),
    "views": lambda p: Plain(p, {0: {"params": {"w": p}.values()}}.values()),
    "tuples": lambda p: Plain(p, ({"params": (p,)},)),
}


@pytest.mark.parametrize("make", UNUSUAL.values(), ids=UNUSUAL)
@pytest.mark.parametrize("value", [1.0, math.inf])
def test_an_unusual_optimizer(make: Any, value: float) -> None:
    found = []
    for scaler in (torch.amp.GradScaler(DEVICE, init_scale=8.0), GradScaler(init_scale=8.0)):
        param = nn.Parameter(torch.ones(2))
        optimizer = make(param)
        scaler.scale(param.sum() * value).backward()
        try:
            scaler.step(optimizer)
            scaler.update()
        except AssertionError:
            assert not isinstance(scaler, GradScaler)
            continue
        found.append((param.tolist(), scaler.get_scale() if value == 1.0 else None))
    assert found[-1][0] == ([0.0, 0.0] if value == 1.0 else [1.0, 1.0])
    assert found[0] == found[-1]
    assert isinstance(scaler, GradScaler)
    assert scaler.outcome(optimizer).taken == (value == 1.0)


@pytest.mark.parametrize("value", ["weight", ("weight", nn.Parameter(torch.ones(1)))])
def test_a_group_of_something_else(value: Any) -> None:
    param, scaler = nn.Parameter(torch.ones(2)), GradScaler()
    scaler.scale(param.sum()).backward()
    what = rf"Plain: its param_groups hold a {type(value).__name__}"
    with pytest.raises(TypeError, match=what):
        scaler.step(Plain(param, [{"params": [param, value]}]))  # type: ignore[arg-type]


def test_optimizers_are_not_kept_alive() -> None:
    param, scaler = nn.Parameter(torch.ones(2)), GradScaler()
    optimizer = Data(param, [{"params": [param]}])
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)  # type: ignore[arg-type]
    scaler.update()
    gone = weakref.ref(optimizer)
    del optimizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("supports", [True, 1])
def test_support_of_the_scale_is_a_truth_value(supports: Any) -> None:
    class Divides(torch.optim.SGD):
        _step_supports_amp_scaling = supports

        def step(self) -> None:  # type: ignore[override]
            self.seen = self.grad_scale.item(), self.found_inf.item()  # type: ignore[attr-defined]

    param, scaler = nn.Parameter(torch.ones(2)), GradScaler(init_scale=8.0)
    optimizer = Divides([param])
    scaler.scale(param.sum()).backward()
    scaler.step(optimizer)
    assert optimizer.seen == (8.0, 0.0)
