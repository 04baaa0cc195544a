"""The undo log: a diagnosis leaves the training bit for bit as it was."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from tests.device import DEVICE, seeded
from tests.scaler.containers import Parts
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep._tools.replay.undo import UndoLog

pytestmark = pytest.mark.slow


class Net(nn.Module):
    """Batch norm, dropout, a buffer that it replaces, a list that it appends to, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(16, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.calls, self.outputs = 0, []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.drop(self.norm(self.first(x)).relu())
        out = self.last(hidden) * (1 + 0.1 * random.random())
        self.calls += 1
        self.seen = self.seen + out.detach().float().mean(0)
        self.outputs.append(out)
        return out


class Training:
    """Training loop in progress, with all the state that could change."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.model, self.x = Net(), torch.randn(4, 8)
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 1)
        self.scaler = halfstep.GradScaler(init_scale=256.0)
        self.generator = seeded(3)
        self.num_skipped = 0
        for _ in range(2):
            self.step()

    def step(self) -> torch.Tensor:
        self.optimizer.zero_grad()
        noise = torch.randn(self.x.shape, generator=self.generator) * 0.01
        with halfstep.autocast(DEVICE, torch.float16):
            loss = F.cross_entropy(self.model(self.x + noise), torch.arange(4))
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.schedule.step()
        with torch.no_grad():
            for mean, p in zip(self.average, self.model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        return loss.detach()

    def state(self) -> dict[str, Any]:
        params = list(self.model.parameters())
        adam = [self.optimizer.state[p] for p in params]
        return {
            "parameters": [p.detach().clone() for p in params],
            "versions": [p._version for p in params],
            "gradients": [None if p.grad is None else p.grad.clone() for p in params],
            "gradient objects": [id(p.grad) for p in params],
            "buffers": [b.clone() for b in self.model.buffers()],
            "buffer objects": [id(b) for b in self.model.buffers()],
            "adam": [{k: v.clone() for k, v in state.items()} for state in adam],
            "lr": [group["lr"] for group in self.optimizer.param_groups],
            "schedule": {k: str(v) for k, v in self.schedule.state_dict().items()},
            "scaler": str(self.scaler.state_dict()),
            "history": len(self.scaler.history()),
            "average": [mean.clone() for mean in self.average],
            "torch random": torch.get_rng_state(),
            "python random": random.getstate(),
            "generator": self.generator.get_state(),
            "calls": self.model.calls,
            "outputs": [id(out) for out in self.model.outputs],
            "training": [m.training for m in self.model.modules()],
            "classes": [type(m) for m in self.model.modules()],
        }


def assert_same_bits(one: Any, other: Any, path: str = "") -> None:
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor):
        flat = [each.reshape(-1).view(torch.uint8) for each in (one, other)]
        assert torch.equal(*flat), path
    elif isinstance(one, dict):
        assert one.keys() == other.keys(), path
        for key in one:
            assert_same_bits(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, list):
        assert len(one) == len(other), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same_bits(a, b, f"{path}/{index}")
    else:
        assert one == other, path


def break_forward(training: Training) -> None:
    with torch.no_grad():
        training.model.first.weight.mul_(1e6)


def break_batch(training: Training) -> None:
    training.x[1, 2] = float("nan")


def scale_too_much(training: Training) -> None:
    training.scaler.update(new_scale=2.0**40)


@pytest.mark.parametrize(
    ("damage", "verdict"),
    [
        (lambda _: None, "none"),
        (break_forward, "range"),
        (break_batch, "data"),
        (scale_too_much, "scale"),
    ],
)
def test_a_diagnosis_changes_nothing(damage: Callable[[Training], None], verdict: str) -> None:
    training = Training()
    damage(training)
    before = training.state()
    found = halfstep.diagnose(training.step, model=training.model)
    assert_same_bits(training.state(), before)
    assert found.verdict == verdict, str(found)


def test_training_goes_on_as_if_there_had_been_no_diagnosis() -> None:
    plain = Training()
    losses = [plain.step() for _ in range(3)]
    diagnosed = Training()
    again = []
    for _ in range(3):
        halfstep.diagnose(diagnosed.step)  # the model is found by itself
        again.append(diagnosed.step())
    assert_same_bits(again, losses)
    assert_same_bits(
        [p.detach().clone() for p in diagnosed.model.parameters()],
        [p.detach().clone() for p in plain.model.parameters()],
    )


def test_a_step_that_raises_or_is_interrupted_is_undone() -> None:
    training = Training()
    before = training.state()

    def interrupted() -> None:
        training.step()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        halfstep.diagnose(interrupted)
    assert_same_bits(training.state(), before)

    def failing() -> None:
        training.step()
        raise RuntimeError("of the user")

    with pytest.raises(RuntimeError, match="of the user"):
        halfstep.diagnose(failing)
    assert_same_bits(training.state(), before)
    assert training.step().isfinite()


def test_accumulated_gradients_are_kept() -> None:
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    model(x).sum().backward()
    gradients = [p.grad for p in model.parameters()]
    before = [grad.clone() for grad in gradients if grad is not None]

    def step() -> None:
        (model(x) * float("inf")).sum().backward()

    assert halfstep.diagnose(step).verdict != "none"
    assert [id(p.grad) for p in model.parameters()] == [id(grad) for grad in gradients]
    assert_same_bits([p.grad.clone() for p in model.parameters() if p.grad is not None], before)


def test_a_graph_from_before_can_still_be_used() -> None:
    weight = torch.ones(3, requires_grad=True)
    running = torch.zeros(3)
    product = weight * running  # autograd has saved `running`, and observer at its version
    model = nn.Linear(3, 3)

    def step() -> None:
        running.add_(1)
        model(running).sum().backward()

    halfstep.diagnose(step)
    product.sum().backward()
    assert torch.equal(running, torch.zeros(3))


def test_checkpointing_and_hooks_of_the_user_see_the_same() -> None:
    block, x = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)), torch.randn(2, 4)
    seen: list[float] = []
    block[0].register_forward_hook(lambda m, a, out: seen.append(out.sum().item()))

    def step() -> None:
        checkpoint(block, x, use_reentrant=False).sum().backward()

    torch.manual_seed(1)
    step()
    first = list(seen)
    seen.clear()
    torch.manual_seed(1)
    halfstep.diagnose(step)
    assert seen[: len(first)] == first
    assert all(p.grad is not None for p in block.parameters())


def test_undo_keeps_memory_and_not_only_the_view_that_was_written_to() -> None:
    whole = torch.arange(12.0).view(3, 4)
    undo = UndoLog()
    undo.note_write(whole[1])
    whole[1] = 7
    whole.t()[0] = 9
    undo.restore()
    assert torch.equal(whole, torch.arange(12.0).view(3, 4))


def test_objects_that_the_function_reaches_are_kept_before_they_are_called() -> None:
    class Trainer:
        def __init__(self) -> None:
            self.model, self.other = nn.Linear(4, 4), nn.Linear(4, 4).eval()
            self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
            self.x = torch.randn(2, 4)

        def step(self, x: torch.Tensor) -> None:
            for param in self.model.parameters():
                param.grad = None
            self.other.train()
            self.optimizer.param_groups[0]["lr"] *= 0.5
            self.optimizer.state[self.model.weight]["seen"] = 1
            self.other(self.model(x)).sum().backward()

    trainer = Trainer()
    trainer.model(trainer.x).sum().backward()
    gradients = [param.grad for param in trainer.model.parameters()]
    for step in (lambda: trainer.step(trainer.x), partial(trainer.step, trainer.x)):
        halfstep.diagnose(step)
        assert [id(p.grad) for p in trainer.model.parameters()] == [id(g) for g in gradients]
        assert not trainer.other.training
        assert trainer.optimizer.param_groups[0]["lr"] == 0.1
        assert not trainer.optimizer.state


def test_modules_keep_their_class_when_the_step_first_enters_rules_for_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    x = torch.ones(2, 4)

    def step() -> None:
        with halfstep.autocast(DEVICE, torch.bfloat16, policy="standard; @0:fp32", module=model):
            model(x).mean().backward()

    halfstep.diagnose(step, model=model)
    assert [type(module) for module in model] == [nn.Linear, nn.Linear]
    step()  # as the training goes on
    assert model[0].weight.grad is not None


class WithoutGroups(torch.optim.Optimizer):
    """A container that does not call ``Optimizer.__init__``: neither groups nor state."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self.optimizers = optimizers

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for optimizer in self.optimizers:
            optimizer.step()


@pytest.mark.parametrize("kind", [Parts, WithoutGroups])
def test_optimizers_in_a_container_stay_as_they_were(kind: Any) -> None:
    weights = [nn.Parameter(torch.ones(2)) for _ in range(2)]
    optimizers = [torch.optim.SGD([weight], lr=0.1, momentum=0.9) for weight in weights]
    container, scaler = kind(optimizers), halfstep.GradScaler(init_scale=8.0)

    def step() -> None:
        scaler.scale(sum(weight.sum() for weight in weights).log()).backward()
        scaler.step(container)
        scaler.update()

    step()
    momentum = optimizers[1].state[weights[1]]["momentum_buffer"]
    before = weights[0].detach().clone(), momentum.clone()
    with torch.no_grad():
        weights[1].fill_(-10.0)
    assert halfstep.diagnose(step).verdict != "none"
    assert torch.equal(weights[0], before[0])
    assert optimizers[1].state[weights[1]]["momentum_buffer"] is momentum
    assert torch.equal(momentum, before[1])


def test_a_call_that_is_tried_with_edits_writes_to_nothing() -> None:
    weight, x, out = torch.ones(3, requires_grad=True), torch.zeros(3), torch.full((3,), 7.0)

    def step() -> None:
        with torch.no_grad():
            torch.log(x, out=out)
        (weight * out).sum().backward()

    found = halfstep.diagnose(step)
    assert (found.bad and found.bad.op, found.cure and found.cure.is_finite) == ("log", True)
    assert out.tolist() == [7.0] * 3


@pytest.mark.parametrize("is_scaled", [False, True])
def test_a_step_with_a_bad_loss_comes_to_its_end(is_scaled: bool) -> None:
    model, scaler = nn.Linear(3, 1), halfstep.GradScaler(init_scale=8.0, enabled=is_scaled)
    open_flags: list[str] = []

    def step() -> None:
        handle = model.weight.register_hook(lambda gradient: gradient)
        open_flags.append("profiling")
        scaler.scale(torch.log(model(torch.ones(2, 3)).mean() * 0)).backward()
        open_flags.remove("profiling")
        handle.remove()

    found = halfstep.diagnose(step, model=model)
    assert found.verdict == "maths"
    assert not open_flags
    assert not model.weight._backward_hooks


def test_an_edit_that_does_not_fit_does_not_end_a_step() -> None:
    model, open_flags = nn.Linear(3, 3), list[str]()

    def step() -> None:
        open_flags.append("profiling")
        total = model(torch.ones(2, 3))
        for value in (total * 0, torch.zeros(2, 3, dtype=torch.complex64)):
            total = total + torch.log(value).real  # which clamps real numbers alone
        total.mean().backward()
        open_flags.remove("profiling")

    assert halfstep.diagnose(step, model=model).verdict == "maths"
    assert not open_flags
