"""Loops as people write them: the loss by hand, steps left out, one or no optimizer.

Each is run with a watch and without one. The losses and the parameters are the same, bit for bit,
and the watch names the line that is marked with ``# bad`` and the step.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import DEVICE, seeded
from tests.training import mlp
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import halfstep
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.watch.watch import Watch

NUM_STEPS, BAD_STEP = 5, 4

Loop = Callable[["Run"], None]
LOOPS: list[tuple[Loop, str, str]] = []


class Run:
    """One run of a loop: a model, batches of which one is bad, and the losses."""

    def __init__(self) -> None:
        self.model = mlp(6, 8, 3)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.scaler = halfstep.GradScaler(init_scale=64.0, on_skips=lambda report: None)
        self.losses: list[float] = []
        self.batches = [(torch.randn(4, 6), torch.rand(4, 3) + 0.5) for _ in range(NUM_STEPS)]
        self.batches[BAD_STEP - 1][1][2, 1] = 0.0

    def note(self, loss: Tensor) -> None:
        self.losses.append(loss.detach().clone())

    def take(self, loss: Tensor) -> None:
        """Step without a scaler."""
        self.note(loss)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def take_scaled(self, loss: Tensor) -> None:
        self.note(loss)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def loop(op: str = "log", verdict: str = "maths") -> Callable[[Loop], Loop]:
    def add(function: Loop) -> Loop:
        LOOPS.append((function, op, verdict))
        return function

    return add


def log_ratio(out: Tensor, target: Tensor) -> Tensor:
    ratio = torch.log(target)  # bad
    return (out - ratio).square().mean()


@loop()
def by_hand(run: Run) -> None:
    for x, y in run.batches:
        out = run.model(x)
        ratio = torch.log(y)  # bad
        run.take((out - ratio).square().mean())


@loop()
def by_hand_scaled(run: Run) -> None:
    for x, y in run.batches:
        with halfstep.autocast(DEVICE, torch.bfloat16):
            out = run.model(x)
            ratio = torch.log(y)  # bad
            loss = (out - ratio).square().mean()
        run.take_scaled(loss)


@loop()
def in_a_function(run: Run) -> None:
    for x, y in run.batches:
        run.take(log_ratio(run.model(x), y))


@loop()
def left_out(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if not math.isfinite(loss.item()):
            continue
        run.take(loss)


@loop()
def left_out_by_a_question(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if torch.isnan(loss).any() or not torch.isfinite(loss):
            continue
        run.take(loss)


@loop()
def left_out_scaled(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if loss.isinf():
            run.optimizer.zero_grad()
            continue
        run.take_scaled(loss)


@loop()
def exits(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        value = loss.item()
        if not math.isfinite(value):
            sys.exit(1)
        run.take(loss)


@loop()
def breaks(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if loss != loss or float(loss.detach()) == math.inf:
            break
        run.take(loss)


@loop()
def raises(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        assert not torch.isinf(loss), "diverged"
        run.take(loss)


@loop()
def raises_without_a_look(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(run.model(x), y)
        if max(loss.detach().view(1).tolist()) == math.inf:
            raise FloatingPointError
        run.take(loss)


@loop()
def in_a_generator(run: Run) -> None:
    def losses() -> Iterator[Tensor]:
        for x, y in run.batches:
            yield log_ratio(run.model(x), y)

    for loss in losses():
        run.take(loss)


@loop()
def while_batches(run: Run) -> None:
    batches = iter(run.batches)
    while (batch := next(batches, None)) is not None:
        run.take(log_ratio(run.model(batch[0]), batch[1]))


@dataclasses.dataclass
class Output:
    logits: Tensor
    aux: Tensor


@loop()
def in_a_dataclass(run: Run) -> None:
    class Wrapped(nn.Module):
        def forward(self, x: Tensor) -> Output:
            return Output(run.model(x), torch.zeros(()))

    model = Wrapped()
    for x, y in run.batches:
        out = model(x)
        ratio = torch.log(y)  # bad
        run.take((out.logits - ratio).square().mean() + out.aux)


@loop()
def accumulated(run: Run) -> None:
    run.optimizer.zero_grad()
    for x, y in run.batches:
        for half in range(2):
            part = slice(2 * half, 2 * half + 2)
            loss = log_ratio(run.model(x[part]), y[part]) / 2
            run.note(loss)
            loss.backward()
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def with_a_closure(run: Run) -> None:
    for x, y in run.batches:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            run.optimizer.zero_grad()
            loss = log_ratio(run.model(x), y)
            run.note(loss)
            loss.backward()
            return loss

        run.optimizer.step(closure)


@loop()
def without_an_optimizer(run: Run) -> None:
    weight = torch.ones(6, 3, requires_grad=True)
    for x, y in run.batches:
        loss = log_ratio(x @ weight, y)
        run.note(loss)
        loss.backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad
            weight.grad = None


@loop()
def with_random_numbers(run: Run) -> None:
    for x, y in run.batches:
        noise = torch.randn_like(x)
        kept = F.dropout(x + noise, 0.2)
        run.take(log_ratio(run.model(kept), y))


@loop()
def with_a_generator_of_its_own(run: Run) -> None:
    generator = seeded(3)
    for x, y in run.batches:
        out = run.model(x + torch.randn(x.shape, generator=generator))
        run.take_scaled(log_ratio(out, y))


@loop()
def in_place(run: Run) -> None:
    for x, y in run.batches:
        target = torch.zeros_like(y)
        target[:] = y
        target.log_()  # bad
        run.take((run.model(x) - target).square().mean())


@loop()
def with_a_bank(run: Run) -> None:
    bank = torch.ones(8, 3)
    for index, (x, y) in enumerate(run.batches):
        out = run.model(x)
        similar = out @ bank.clone().T
        bank[index] = out.detach().mean(0)
        loss = similar.square().mean() + log_ratio(out, y)
        run.take(loss)


@loop()
def with_a_custom_function(run: Run) -> None:
    class Log(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x.log()  # bad

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            return grads[0] / ctx.saved_tensors[0]

    for x, y in run.batches:
        run.take((run.model(x) - Log.apply(y)).square().mean())


@loop("sqrt")
def bad_gradients(run: Run) -> None:
    for x, y in run.batches:
        out = run.model(x)
        distance = (out * y.gt(0)).square().sqrt()  # bad
        run.take(distance.mean())


@loop("sqrt")
def bad_gradients_scaled(run: Run) -> None:
    for x, y in run.batches:
        out = run.model(x)
        distance = (out * y.gt(0)).square().sqrt()  # bad
        run.take_scaled(distance.mean())


@loop()
def adversarial(run: Run) -> None:
    critic = nn.Linear(3, 1)
    other = torch.optim.SGD(critic.parameters(), lr=0.01)
    for x, y in run.batches:
        fake = run.model(x)
        other.zero_grad()
        loss = critic(fake.detach()).mean() - critic(y).mean()
        loss.backward()
        other.step()
        run.optimizer.zero_grad()
        loss = -critic(fake).mean() + torch.log(y).mean()  # bad
        run.note(loss)
        loss.backward()
        run.optimizer.step()


@loop("reciprocal")
def bad_gradients_by_hand(run: Run) -> None:
    for x, y in run.batches:
        loss = (run.model(x) * y.gt(0).all()).square().mean()
        run.note(loss)
        run.optimizer.zero_grad()
        loss.backward()
        gradients = [p.grad for p in run.model.parameters() if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        factor = 1.0 / norm  # bad
        for gradient in gradients:
            gradient.mul_(factor)
        run.optimizer.step()


@loop("mul", "data")  # the number itself is NaN
def bad_gradients_by_a_number(run: Run) -> None:
    for x, y in run.batches:
        loss = (run.model(x) * y.gt(0).all()).square().mean()
        run.note(loss)
        run.optimizer.zero_grad()
        loss.backward()
        norm = sum(p.grad.norm().item() for p in run.model.parameters() if p.grad is not None)
        for p in run.model.parameters():
            assert p.grad is not None
            p.grad.mul_(1.0 / norm if norm else math.nan)  # bad
        run.optimizer.step()


def backward_of_roots(run: Run, x: Tensor, y: Tensor) -> None:
    loss = (run.model(x) * y).square().sqrt().mean()  # bad
    run.note(loss)
    run.model.zero_grad()
    loss.backward()


@loop("sqrt")
def stepped_by_hand(run: Run) -> None:
    for x, y in run.batches:
        backward_of_roots(run, x, y)
        nn.utils.clip_grad_norm_(run.model.parameters(), 1.0)
        for p in run.model.parameters():
            p.data.add_(p.grad, alpha=-0.01)


@loop("sqrt")
def stepped_by_hand_without_data(run: Run) -> None:
    for x, y in run.batches:
        backward_of_roots(run, x, y)
        with torch.no_grad():
            for p in run.model.parameters():
                p -= 0.01 * p.grad


@loop("sqrt")
def stepped_by_hand_with_new_data(run: Run) -> None:
    for x, y in run.batches:
        for part in (slice(0, 2), slice(2, 4)):  # gradients are added up
            loss = (run.model(x[part]) * y[part]).square().sqrt().mean()  # bad
            loss.backward()
        run.note(loss)
        for p in run.model.parameters():
            p.data = p.data - 0.01 * p.grad
            p.grad = None


@loop("sqrt")
def stepped_by_hand_before_an_optimizer(run: Run) -> None:
    for x, y in run.batches:
        backward_of_roots(run, x, y)
        with torch.no_grad():
            for p in run.model.parameters():
                p.add_(0.001)  # as noise is
        run.optimizer.step()


@loop()
def truncated(run: Run) -> None:
    cell = nn.GRUCell(6, 3)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.01)
    state = torch.zeros(4, 3)
    for x, y in run.batches:
        state = state.detach()
        state = cell(x, state)
        loss = log_ratio(state, y)
        run.note(loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@loop()
def read_after_the_step(run: Run) -> None:
    for x, y in run.batches:
        out = run.model(x)
        other = (out.detach() - torch.log(y)).square().mean() + 0 * out.mean()  # bad
        run.take_scaled(out.square().mean())
        other.item()


@loop()
def functional(run: Run) -> None:
    params = dict(run.model.named_parameters())
    for x, y in run.batches:

        def loss_of(params: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
            return log_ratio(torch.func.functional_call(run.model, params, x), y)

        gradients, loss = torch.func.grad_and_value(loss_of)(params)
        for name, gradient in gradients.items():
            params[name].grad = gradient
        run.note(loss)
        run.optimizer.step()
        run.optimizer.zero_grad()


@loop()
def functional_by_hand(run: Run) -> None:
    params = {name: param.detach() for name, param in run.model.named_parameters()}
    for x, y in run.batches:

        def loss_of(params: dict[str, Tensor], x: Tensor = x, y: Tensor = y) -> Tensor:
            return log_ratio(torch.func.functional_call(run.model, params, x), y)

        gradients = torch.func.grad(loss_of)(params)
        params = {name: params[name] - 0.01 * gradients[name] for name in params}
        run.note(params["0.bias"])


@loop("div")
def one_of_three_views(run: Run) -> None:
    for x, y in run.batches:
        q, k, v = run.model(x).chunk(3, -1)
        ratio = k / y[:, 1:2]  # bad
        run.take((q * ratio).mean() + v.mean())


@loop("div")
def one_of_two_views_in_place(run: Run) -> None:
    for x, y in run.batches:
        hidden = run.model(x)
        left, right = hidden[:, :1], hidden[:, 1:2]
        right /= y[:, 1:2]  # bad
        run.take(left.square().mean() + right.mean())


@loop()
def left_out_before_a_checkpoint(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(checkpoint(run.model, x, use_reentrant=False), y)
        if loss.isinf():
            continue
        run.take(loss)


@loop()
def read_after_a_step_with_a_checkpoint(run: Run) -> None:
    for x, y in run.batches:
        loss = log_ratio(checkpoint(run.model, x, use_reentrant=False), y)
        run.take_scaled(loss)
        run.losses[-1] += loss.item()


@loop()
def left_out_before_autocast(run: Run) -> None:
    for x, y in run.batches:
        with halfstep.autocast(DEVICE, torch.float16):
            out = run.model(x)
        large = (out.float() * 1e4) @ torch.full((3, 3), 1e4)
        loss = (large * 1e-8 - torch.log(y)).square().mean()  # bad
        if loss.isinf():
            continue
        run.take(loss)


@loop()
def a_buffer_that_is_set(run: Run) -> None:
    class Centered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("center", torch.zeros(3))

        def forward(self, out: Tensor, y: Tensor) -> Tensor:
            ratio = torch.log(y - self.center * 0)  # bad
            self.center = 0.9 * self.center + 0.1 * ratio.mean(0)
            return (out - ratio).square().mean()

    loss_of = Centered()
    for x, y in run.batches:
        run.take(loss_of(run.model(x), y))
    run.losses += [loss_of.center.sum()]


@loop("sqrt")
def a_leaf_without_a_module(run: Run) -> None:
    leaf = torch.ones(3, requires_grad=True)
    run.optimizer = torch.optim.SGD([leaf], lr=1e-2)
    for _, y in run.batches:
        run.take(torch.sqrt(leaf * y).mean())  # bad
    run.losses += [leaf.detach()]


@loop()
def with_a_teacher(run: Run) -> None:
    teacher = copy.deepcopy(run.model).requires_grad_(requires_grad=False)
    for x, y in run.batches:
        out = run.model(x)
        run.take((out - teacher(x)).square().mean() + log_ratio(out, y))
        with torch.no_grad():
            for ours, other in zip(run.model.parameters(), teacher.parameters(), strict=True):
                other.lerp_(ours, 0.1)


# --- the test -------------------------------------------------------------------------------------


def lines_of(function: Loop) -> set[int]:
    """Return the marked lines of a loop and of the functions in this file that it may call."""
    found: set[int] = set()
    for each in (function, log_ratio, backward_of_roots):
        source, first = inspect.getsourcelines(each)
        found |= {first + i for i, text in enumerate(source) if text.rstrip().endswith("# bad")}
    return found


def bits(run: Run) -> list[list[float]]:
    values = [*run.losses, *(p.detach() for p in run.model.parameters())]
    return [value.reshape(-1).view(torch.int32).tolist() for value in values]


def run_of(function: Loop, told: list[tuple[Diagnosis, int]] | None) -> Run:
    run = Run()
    with suppress(SystemExit, AssertionError, FloatingPointError):
        if told is None:
            function(run)
        else:
            with Watch(tell=lambda *found: told.append(found)):
                function(run)
    return run


@pytest.mark.parametrize(
    ("function", "op", "verdict"), LOOPS, ids=[each.__name__ for each, *_ in LOOPS]
)
def test_the_line_and_the_step_are_named_and_nothing_changes(
    function: Loop, op: str, verdict: str
) -> None:
    told: list[tuple[Diagnosis, int]] = []
    watched = run_of(function, told)
    assert bits(watched) == bits(run_of(function, None))
    ((found, step),) = told  # and nothing of what the bad step has left
    bad = found.bad
    assert bad is not None, str(found)
    assert step == BAD_STEP, str(found)
    assert found.verdict == verdict
    assert op in (bad.op, bad.forward_op, bad.op.rstrip("_")), str(found)
    line = bad.line or bad.forward_line
    assert line is not None
    assert Path(line.file).name == "test_loops.py"
    assert (bad.forward_line or line).number in lines_of(function), str(found)


@pytest.mark.parametrize("function", [each for each, *_ in LOOPS], ids=lambda each: each.__name__)
def test_nothing_is_told_of_healthy_steps(function: Loop) -> None:
    told: list[object] = []
    run = Run()
    run.batches = [(x, y.clamp_min(0.5)) for x, y in run.batches]
    with Watch(tell=lambda *found: told.append(found)):
        function(run)
    assert not told
    assert run.losses


@pytest.mark.parametrize("bad", ["q", "k", "v"])
def test_of_views_of_one_tensor_the_bad_one_is_named(bad: str) -> None:
    run, told = Run(), list[Diagnosis]()
    with Watch(tell=lambda found, step: told.append(found)):
        qkv = torch.ones(4, 18)
        qkv[2, 6 * "qkv".index(bad)] = math.inf
        q, k, v = qkv.chunk(3, -1)
        run.take((run.model(q).mean(-1, keepdim=True) * k).mean() + run.model(v).mean())
    (found,) = told
    assert found.verdict == "data"
    assert found.tensor is not None
    assert found.tensor.startswith(f"{bad} in "), found.tensor


def test_a_batch_that_the_loop_makes_bad_is_told_with_the_line() -> None:
    run, told = Run(), list[Diagnosis]()
    with Watch(tell=lambda found, step: told.append(found)):
        for number in range(3):
            x = torch.ones(4, 6)
            if number == 1:
                x[0, 0] = math.nan
            run.take(run.model(x).square().mean())
    found = told[0]
    assert (found.verdict, (found.tensor or "")[:5]) == ("data", "x in ")
    assert any(note.endswith("x[0, 0] = math.nan") for note in found.notes)


def test_a_teacher_that_the_loop_makes_bad_is_told_with_the_line() -> None:
    run, told = Run(), list[Diagnosis]()
    teacher = copy.deepcopy(run.model).requires_grad_(False)
    with Watch(run.scaler, run.model, tell=lambda found, step: told.append(found)):
        for number, (x, _) in enumerate(run.batches):
            run.take_scaled((run.model(x) - teacher(x)).square().mean())
            share = 1 / torch.tensor(number - 1.0)
            for old, new in zip(teacher.parameters(), run.model.parameters(), strict=True):
                old.data.lerp_(new.detach(), share)
    found = told[0]
    assert found.verdict == "data"
    assert (found.tensor or "").startswith("teacher.0.bias in "), found.tensor
    assert any(note.endswith("old.data.lerp_(new.detach(), share)") for note in found.notes)


def test_no_model_stays_in_float32_after_a_replay_in_it() -> None:
    model, head, told = nn.Linear(4, 8).half(), nn.Linear(8, 2).half(), list[Diagnosis]()
    with Watch(model=model, tell=lambda found, step: told.append(found)):
        hidden = model(torch.ones(2, 4).half())
        loss = head(hidden / (hidden - hidden)).float().mean()
        loss.backward()
    parameters = [*model.parameters(), *head.parameters()]
    assert {param.dtype for param in parameters} == {torch.float16}
    assert all(p.grad is not None and p.grad.dtype is torch.float16 for p in parameters)
    assert told[0].verdict == "maths"
    assert told[0].cure is not None
    assert told[0].cure.is_finite, told[0]


def test_a_skip_of_dynamic_scaling_has_left_a_gradient_in_the_batch() -> None:
    run, told, num_bad = Run(), list[Diagnosis](), 0
    scaler = halfstep.GradScaler(init_scale=2.0**24, on_skips=lambda report: None)
    with Watch(tell=lambda found, step: told.append(found)):
        for x, _ in run.batches:
            with halfstep.autocast(DEVICE, torch.float16):
                out = run.model(x.requires_grad_())
            scaler.scale(out.float().square().sum()).backward()
            scaler.step(run.optimizer)
            scaler.update()
            num_bad += int(x.grad is not None and bool(x.grad.isnan().any()))
    assert num_bad
    assert not told
