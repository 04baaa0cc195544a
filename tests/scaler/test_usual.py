"""Usual steps: as those of torch.amp, and of the long road, which what is unusual takes."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device import DEVICE

from halfstep._scaler import GradScaler, engine, step
from halfstep._scaler.ranks import REDUCED
from halfstep.errors import CallOrderError

NUM_ITERATIONS, EVENT = 36, 17
"""Long enough for measures that arrive late, and for the scale to grow twice on each side."""


def loop(cls: Any, kwargs: Any, event: str, clips: str) -> list[Any]:
    """Return scale, growth tracker and parameters after some iterations."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, **kwargs)
    scaler, seen, is_ours = cls(DEVICE, growth_interval=7, init_scale=8.0), [], cls is GradScaler
    for k in range(NUM_ITERATIONS):
        now = event if k == EVENT else ""
        optimizer.zero_grad()
        loss = model(torch.randn(4, 3).to(DEVICE)).square().mean()
        scaler.scale(loss * math.inf if now == "inf loss" else loss).backward()
        if now == "inf":
            model.weight.grad[0, 0] = math.inf
        if now == "written scale":
            scaler._scale.data.fill_(2.0)  # bumps no version, and the loss was multiplied by 64
        if clips.startswith("unscale_") or (clips and not is_ours):
            scaler.unscale_(optimizer)
        if clips == "unscale_" or (clips and not is_ours):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        if now == "NaN after unscale_":
            model.weight.grad[0, 0] = math.nan
        if now == "replaced after unscale_":
            model.bias.grad = torch.full_like(model.bias, math.inf)
        scaler.step(optimizer, **({"max_norm": 1e9} if clips == "step" and is_ours else {}))
        scaler.update()
        if k % 5 == 0:  # now and then: reading folds what was counted
            state = scaler.state_dict()
            seen.append((state["scale"], state["_growth_tracker"]))
            seen += [param.detach().clone() for param in model.parameters()]
    return [*seen, *map(repr, scaler.history() if is_ours else ())]


def assert_equal(ours: list[Any], theirs: list[Any]) -> None:
    for mine, other in zip(ours, theirs, strict=False):  # torch.amp has no history
        assert torch.equal(mine, other) if torch.is_tensor(mine) else mine == other


KINDS = [{"foreach": False}, {"fused": True}]


@pytest.mark.parametrize("kwargs", KINDS)
@pytest.mark.parametrize("clips", ["", "step", "unscale_"])
@pytest.mark.parametrize("event", ["", "inf", "written scale"])
def test_usual_steps_are_those_of_torch(kwargs: Any, clips: str, event: str) -> None:
    assert_equal(*(loop(cls, kwargs, event, clips) for cls in (GradScaler, torch.amp.GradScaler)))


@pytest.mark.parametrize("kwargs", KINDS)
@pytest.mark.parametrize("clips", ["unscale_", "unscale_ alone"])
@pytest.mark.parametrize("event", ["inf", "NaN after unscale_", "replaced after unscale_"])
def test_usual_steps_are_those_of_the_long_road(
    kwargs: Any, event: str, clips: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_plan = loop(GradScaler, kwargs, event, clips)
    monkeypatch.setattr(step, "_gather_usual", lambda *_: None)
    by_hand = loop(GradScaler, kwargs, event, clips)
    assert_equal(by_plan, by_hand)
    assert sum("taken=False" in line for line in by_plan[-NUM_ITERATIONS:]) == 1


@pytest.mark.parametrize("kwargs", KINDS)
def test_a_loss_of_one_rank_does_not_move_the_scale(
    kwargs: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under DistributedDataParallel, whose ranks share gradients and not losses."""
    monkeypatch.setattr(step, "has_process_group", lambda: True)
    monkeypatch.setattr(engine.Engine, "ranks_of", lambda *_: REDUCED)
    by_plan = loop(GradScaler, kwargs, "inf loss", "")
    monkeypatch.setattr(step, "_gather_usual", lambda *_: None)
    assert_equal(by_plan, loop(GradScaler, kwargs, "inf loss", ""))
    assert "Reason.OVERFLOW" in by_plan[EVENT - NUM_ITERATIONS]


def adversaries(cls: Any, kwargs: Any, event: str) -> list[Any]:
    """Return what :func:`loop` does, of two networks that are stepped in each iteration."""
    torch.manual_seed(0)
    critic, maker = (torch.nn.Linear(3, 3).to(DEVICE) for _ in range(2))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, **kwargs) for m in (critic, maker)]
    scaler, seen = cls(DEVICE, growth_interval=7, init_scale=8.0), []
    late = torch.optim.SGD(critic.parameters(), lr=0.01)
    for k in range(NUM_ITERATIONS):
        now, noise = event if k == EVENT else "", torch.randn(4, 3).to(DEVICE)
        for each in optimizers:
            each.zero_grad(set_to_none=False)
        scaler.scale(critic(noise).square().mean()).backward()
        if now == "inf in the first":
            critic.weight.grad[0, 0] = math.inf
        if now == "unscale_ of both":
            scaler.unscale_(optimizers[0])
        scaler.step(optimizers[0])
        if now == "a late optimizer":  # which shares gradients, after a pass has added to them
            optimizers[0].zero_grad(set_to_none=False)
        scaler.scale(critic(maker(noise)).square().mean()).backward()
        if now == "inf in the second":
            maker.weight.grad[0, 0] = math.inf
        if now == "unscale_ of both":
            scaler.unscale_(optimizers[1])
        scaler.step(optimizers[1])
        if now == "a late optimizer":
            scaler.step(late)
        scaler.update()
        if k % 5 == 0:
            seen += [scaler.get_scale(), scaler._get_growth_tracker()]
            seen += [p.detach().clone() for m in (critic, maker) for p in m.parameters()]
    return [*seen, *map(repr, scaler.history() if cls is GradScaler else ())]


@pytest.mark.parametrize("kwargs", KINDS)
@pytest.mark.parametrize(
    "event",
    ["", "inf in the first", "inf in the second", "unscale_ of both", "a late optimizer"],
)
def test_usual_steps_of_two_optimizers(
    kwargs: Any, event: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted, end = [], engine.Engine.end_usual
    monkeypatch.setattr(engine.Engine, "end_usual", lambda e: counted.append(end(e)) or counted[-1])
    by_plan = adversaries(GradScaler, kwargs, event)
    device_moves = "fused" in kwargs and DEVICE != "cpu"  # the gradients of the critic may wait
    assert counted[EVENT] == (event in ("", "unscale_ of both")) or device_moves
    monkeypatch.setattr(step, "_gather_usual", lambda *_: None)
    assert_equal(by_plan, adversaries(GradScaler, kwargs, event))
    assert_equal(by_plan, adversaries(torch.amp.GradScaler, kwargs, event))


class Setup:
    def __init__(self, is_fused: bool = False) -> None:
        self.params = [torch.nn.Parameter(torch.ones(2, device=DEVICE)) for _ in range(3)]
        self.optimizer = torch.optim.SGD(self.params[:2], lr=0.1, fused=is_fused)
        self.other = torch.optim.SGD(self.params[2:], lr=0.1)
        self.scaler, self.flags = GradScaler(DEVICE), dict[torch.device, torch.Tensor]()
        for _ in range(12):  # what the first steps measure arrives late on a slow device
            self.iterate()

    def iterate(self, *optimizers: torch.optim.Optimizer) -> None:
        self.scaler.scale(torch.stack(self.params).square().sum()).backward()
        for optimizer in optimizers or (self.optimizer,):
            self.scaler.step(optimizer)
        self.scaler.update()
        for param in self.params:
            param.grad = None


UNUSUAL: dict[str, Callable[[Setup], Any]] = {
    "two optimizers": lambda s: s.iterate(s.optimizer, s.other),
    "another parameter": lambda s: s.iterate(
        s.optimizer.add_param_group({"params": [s.params[2]]}) or s.optimizer
    ),
    "growth is due": lambda s: (s.scaler.set_growth_interval(1), s.iterate()),
    "the scale is written": lambda s: (s.scaler._scale.fill_(64.0), s.iterate()),
    "a read flag": lambda s: (
        s.scaler.scale(torch.stack(s.params).sum()).backward(),
        s.scaler.step(s.optimizer),
        s.flags.update(s.scaler._found_inf_per_device(s.optimizer)),
        s.scaler.update(),
    ),
}


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.parametrize("case", ["usual", *UNUSUAL])
def test_what_is_unusual_is_not_counted(
    case: str, is_fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Setup(is_fused)
    counted, end = [], engine.Engine.end_usual
    monkeypatch.setattr(engine.Engine, "end_usual", lambda e: counted.append(end(e)) or counted[-1])
    UNUSUAL.get(case, Setup.iterate)(made)
    device_moves = is_fused and DEVICE != "cpu"
    assert counted == [case == "usual" or (case == "growth is due" and device_moves)]
    assert made.scaler.counts().taken == 13
    assert made.scaler.outcome(made.optimizer).taken
    made.iterate()
    made.iterate()  # by a new plan
    # Where the device moves the scale, gradients of a second optimizer may be unused.
    assert counted[-1] == (case != ("two optimizers" if device_moves else "growth is due"))
    made.params[0].data.fill_(math.inf)
    made.iterate()  # which writes to no flag that others have
    assert made.scaler.outcome(made.optimizer).skipped > any(made.flags.values())


class ByItself(torch.optim.SGD):
    """Handles the scale, and says so in the class; its groups have ``fused: None``."""

    _step_supports_amp_scaling = True

    def step(self, closure: Any = None) -> None:
        if not self.found_inf:
            for param in self.param_groups[0]["params"]:
                param.data -= param.grad / self.grad_scale


def test_a_class_that_handles_the_scale_takes_usual_steps() -> None:
    made = Setup()
    made.optimizer = ByItself(made.params[:2], lr=0.1)
    for _ in range(12):
        made.iterate()
    before = made.params[0].detach().clone()
    made.scaler.scale(torch.stack(made.params).sum()).backward()
    made.scaler.step(made.optimizer)
    assert made.scaler._engine.usual
    made.scaler.update()
    assert made.params[0].equal(before - 1.0)


@pytest.mark.parametrize("scale", [1024.0, 1000.0])
def test_a_fused_step_divides_by_itself_only_where_a_check_would_not_divide_alike(
    scale: float,
) -> None:
    results = []
    for cls in (GradScaler, torch.amp.GradScaler):
        p, given = torch.nn.Parameter(torch.tensor([0.1, 0.7])), []
        optimizer = torch.optim.SGD([p], 0.25, fused=True)
        whole = optimizer.step
        optimizer.step = lambda: given.append(hasattr(optimizer, "grad_scale")) or whole()  # noqa: B023
        scaler = cls("cpu", init_scale=scale)
        for factor in (0.3, 0.7, 1.1, 1.3, 1.7, math.inf):
            optimizer.zero_grad()
            scaler.scale((p * factor).sum()).backward()
            p.grad[1] = scale / 3  # finite beside the inf
            scaler.step(optimizer)
            scaler.update()
        results.append((p.detach(), p.grad))
        if cls is GradScaler:
            assert given[-2:] == [scale == 1000.0, True]  # a skipped step is the optimizer's
    assert_equal(*results)


def test_what_sees_a_fused_step_finds_scale_and_flag_and_one_that_is_set_serves_once() -> None:
    results = []
    for cls in (GradScaler, torch.amp.GradScaler):
        p, seen = torch.nn.Parameter(torch.tensor([0.1, 0.7])), []
        optimizer, scaler = torch.optim.SGD([p], 0.25, fused=True), cls("cpu", init_scale=1024.0)
        for k in range(7):
            optimizer.zero_grad()
            scaler.scale((p * p).sum()).backward()
            if k == 4:
                optimizer.grad_scale = torch.tensor(4.0)
            if k == 5:
                optimizer.register_step_post_hook(lambda o, *_: seen.append(o.found_inf.item()))  # noqa: B023
            scaler.step(optimizer)
            scaler.update()
        results.append((p.detach(), seen))
        assert seen == [0.0, 0.0]
    assert torch.equal(results[0][0], results[1][0])


def test_groups_that_are_fused_no_more_have_their_gradients_divided() -> None:
    made = Setup(is_fused=True)
    made.optimizer.param_groups[0]["fused"] = False  # as loading a state does
    before = made.params[0].detach().clone()
    for num in (1, 2):  # by the long road, and by a new plan
        made.scaler.scale(torch.stack(made.params).sum()).backward()
        made.scaler.step(made.optimizer)
        # On a device, updates of the fused steps are still under way.
        assert bool(made.scaler._engine.usual) == (num == 2 and DEVICE == "cpu")
        made.scaler.update()
        made.optimizer.zero_grad()
        torch.testing.assert_close(made.params[0], before - 0.1 * num)


def test_an_outcome_of_a_counted_step_is_read_late() -> None:
    made = Setup()
    first = made.scaler.outcome(made.optimizer)
    for _ in range(3):
        made.iterate()
    assert [entry.step for entry in made.scaler.history()] == list(range(1, 16))
    assert (first.taken, first.scale, first.scale_after) == (True, 65536.0, 65536.0)


def test_a_shared_gradient_written_after_a_usual_step_is_checked_again() -> None:
    made = Setup()
    other = torch.optim.SGD(made.params[:1], lr=0.1)
    made.scaler.scale(torch.stack(made.params).square().sum()).backward()
    made.scaler.step(made.optimizer)
    made.params[0].grad.fill_(math.inf)
    made.scaler.step(other)
    assert made.scaler.outcome(other).skipped
    assert made.params[0].isfinite().all()


def test_gradients_from_after_a_usual_step_are_unused() -> None:
    made = Setup()
    for _ in range(12):
        made.iterate(made.optimizer, made.other)
    for optimizer, value in ((made.optimizer, 1.0), (made.other, math.inf)):
        made.optimizer.zero_grad()
        made.scaler.scale(torch.stack(made.params).square().sum()).backward()
        made.params[2].grad *= value
        made.scaler.step(optimizer)
    made.scaler.update()  # the scale backs off
    made.scaler.scale(torch.stack(made.params).square().sum()).backward()
    with pytest.raises(CallOrderError, match="one GradScaler for each cadence"):
        made.scaler.step(made.optimizer)


def test_a_backward_pass_after_a_usual_unscale_is_refused() -> None:
    made = Setup()
    made.scaler.scale(torch.stack(made.params).square().sum()).backward()
    made.scaler.unscale_(made.optimizer)
    made.scaler.scale(torch.stack(made.params).square().sum()).backward()
    with pytest.raises(CallOrderError, match="came after its gradients were unscaled"):
        made.scaler.step(made.optimizer)
