"""Optimizers with attributes that are called as those of a container, and are none."""

import math

import pytest
import torch
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
    scaler = GradScaler("cpu")
    scaler.scale(weight.sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert weight.tolist() == [0.0, 0.0]


def test_a_registry_of_a_class_is_no_container() -> None:
    good, bad = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    first, second = Registered([good], lr=1.0), Registered([bad], lr=1.0)
    scaler = GradScaler("cpu")
    scaler.scale(good.sum() + bad.sum()).backward()
    assert bad.grad is not None
    bad.grad.fill_(math.inf)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert good.tolist() == [0.0, 0.0]
    assert bad.tolist() == [1.0, 1.0]
