"""Usual steps: counted, and as those of the long road; what is unusual takes that one."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device import DEVICE

from halfstep._scaler import GradScaler, engine

pytestmark = pytest.mark.skipif(DEVICE != "cpu", reason="usual steps are those at a scale on a CPU")


def loop(cls: Any, kwargs: Any, num: int, bad: int = -1, clips: bool = False) -> list[Any]:
    """Return scale, growth tracker and parameters after each of ``num`` iterations."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **kwargs)
    scaler, seen = cls("cpu", growth_interval=7, init_scale=8.0), []
    for k in range(num):
        optimizer.zero_grad()
        scaler.scale(model(torch.randn(4, 3)).square().mean()).backward()
        if k == bad:
            model.weight.grad[0, 0] = math.inf
        if clips and cls is torch.amp.GradScaler:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        scaler.step(optimizer, **({"max_norm": 1e9} if clips and cls is GradScaler else {}))
        scaler.update()
        if k % 5 == 0 or k == num - 1:  # read now and then: reading folds what was counted
            state = scaler.state_dict()
            seen.append((state["scale"], state["_growth_tracker"]))
            seen += [param.detach().clone() for param in model.parameters()]
    return seen


@pytest.mark.parametrize("kwargs", [{"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("bad", [-1, 23])
def test_counted_steps_are_those_of_torch(kwargs: Any, clips: bool, bad: int) -> None:
    ours = loop(GradScaler, kwargs, 50, bad, clips)
    theirs = loop(torch.amp.GradScaler, kwargs, 50, bad, clips)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other) if torch.is_tensor(mine) else mine == other


class Setup:
    def __init__(self) -> None:
        self.params = [torch.nn.Parameter(torch.ones(2)) for _ in range(3)]
        self.optimizer = torch.optim.SGD(self.params[:2], lr=0.1)
        self.other = torch.optim.SGD(self.params[2:], lr=0.1)
        self.scaler = GradScaler("cpu")

    def iterate(self, *optimizers: torch.optim.Optimizer) -> None:
        self.scaler.scale(torch.stack(self.params).square().sum()).backward()
        for optimizer in optimizers or (self.optimizer,):
            self.scaler.step(optimizer)
        self.scaler.update()
        for param in self.params:
            param.grad = None


UNUSUAL: dict[str, Callable[[Setup], Any]] = {
    "two optimizers": lambda s: s.iterate(s.optimizer, s.other),
    "another parameter": lambda s: (
        s.optimizer.add_param_group({"params": [s.params[2]]}),
        s.iterate(),
    ),
    "growth is due": lambda s: (s.scaler.set_growth_interval(1), s.iterate()),
    "the scale is written": lambda s: (s.scaler._scale.fill_(64.0), s.iterate()),
    "a read flag": lambda s: (
        s.scaler.scale(torch.stack(s.params).sum()).backward(),
        s.scaler.step(s.optimizer),
        s.scaler._found_inf_per_device(s.optimizer),
        s.scaler.update(),
    ),
}


@pytest.mark.parametrize("case", ["usual", *UNUSUAL])
def test_what_is_unusual_is_not_counted(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Setup()
    for _ in range(6):
        made.iterate()
    counted, count = [], engine.Engine.count_usual
    monkeypatch.setattr(
        engine.Engine, "count_usual", lambda e: counted.append(count(e)) or counted[-1]
    )
    UNUSUAL.get(case, Setup.iterate)(made)
    assert counted == [case == "usual"]
    assert made.scaler.counts().taken == 7
    assert made.scaler.outcome(made.optimizer).taken
    made.iterate()
    made.iterate()  # by a new plan
    assert counted[-1] == (case != "growth is due")


def test_an_outcome_of_a_counted_step_is_read_late() -> None:
    made = Setup()
    for _ in range(9):
        made.iterate()
    first = made.scaler.outcome(made.optimizer)
    for _ in range(3):
        made.iterate()
    assert [entry.step for entry in made.scaler.history()] == list(range(1, 13))
    assert (first.taken, first.scale, first.scale_after) == (True, 65536.0, 65536.0)
