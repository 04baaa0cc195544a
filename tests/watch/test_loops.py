"""Loops as people write them: the loss by hand, steps left out, one or no optimizer.

Each is run with a watch and without one. The losses and the parameters are the same, bit for bit,
and the watch names the line that is marked with ``# bad`` and the step. Each loop is a function in
a file of ``corpus/loops``, after a line ``# expect:`` with the verdict and the op.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.device import DEVICE, share
from tests.training import mlp
from torch import Tensor, nn

import halfstep
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.watch.watch import Watch

NUM_STEPS, BAD_STEP = 5, 4

Loop = Callable[["Run"], None]
CORPUS = Path(__file__).parent / "corpus" / "loops"


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


def log_ratio(out: Tensor, target: Tensor) -> Tensor:
    ratio = torch.log(target)  # bad
    return (out - ratio).square().mean()


@dataclasses.dataclass
class Output:
    logits: Tensor
    aux: Tensor


def backward_of_roots(run: Run, x: Tensor, y: Tensor) -> None:
    loss = (run.model(x) * y).square().sqrt().mean()  # bad
    run.note(loss)
    run.model.zero_grad()
    loss.backward()


# --- the test -------------------------------------------------------------------------------------


def read(file: Path) -> Loop:
    """Return the loop of a file, which reads the names of this module."""
    names = dict(globals())
    exec(compile(file.read_text(), str(file), "exec"), names)
    loop: Loop = names[file.stem]
    return loop


LOOPS = {file.stem: file for file in sorted(CORPUS.glob("*.py"))}


def lines_of(file: Path) -> set[tuple[str, int]]:
    """Return the marked lines of a loop and of the functions in this file that it may call."""
    return {
        (each.name, number)
        for each in (file, Path(__file__))
        for number, line in enumerate(each.read_text().splitlines(), start=1)
        if line.endswith("# bad")
    }


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


@pytest.mark.parametrize("name", share(LOOPS, one_in=3))
def test_the_line_and_the_step_are_named_and_nothing_changes(name: str) -> None:
    file, told = LOOPS[name], list[tuple[Diagnosis, int]]()
    verdict, _, op = (
        file.read_text().partition("\n")[0].removeprefix("# expect: ").partition(" of ")
    )
    watched = run_of(read(file), told)
    assert bits(watched) == bits(run_of(read(file), None))
    ((found, step),) = told  # and nothing of what the bad step has left
    bad = found.bad
    assert bad is not None, str(found)
    assert step == BAD_STEP, str(found)
    assert found.verdict == verdict
    assert op in (bad.op, bad.forward_op, bad.op.rstrip("_")), str(found)
    line = bad.forward_line or bad.line
    assert (Path(line.file).name, line.number) in lines_of(file), str(found)


@pytest.mark.parametrize("name", share(LOOPS, one_in=3))
def test_nothing_is_told_of_healthy_steps(name: str) -> None:
    told: list[object] = []
    run = Run()
    run.batches = [(x, y.clamp_min(0.5)) for x, y in run.batches]
    with Watch(tell=lambda *found: told.append(found)):
        read(LOOPS[name])(run)
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
    assert found.tensor.startswith(f"{bad} in "), found.tensor


def test_a_loss_that_is_read_before_another_model_is_called_leaves_nothing_out() -> None:
    run, told = Run(), list[tuple[Diagnosis, int]]()
    other = nn.Linear(6, 3)
    with Watch(tell=lambda *found: told.append(found)):
        for x, y in (*run.batches, (torch.full((4, 6), math.nan), torch.ones(4, 3))):
            first = (run.model(x) - y - 1).square().mean()
            first.item()
            run.take(first + other(x).square().mean())
    ((found, step),) = told
    assert (found.verdict, step) == ("data", NUM_STEPS + 1)
    assert not any("left this batch out" in note for note in found.notes)
    assert found.cure is not None
    assert "leave this batch out" in found.cure.text


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
    assert "x[0, 0] = math.nan\n" in found.cure.text


@pytest.mark.parametrize(
    ("is_held", "name"),
    [(False, "teacher.0.* in "), (True, r"0.weight of a model \(Sequential\) comes from it")],
)
def test_a_teacher_that_the_loop_makes_bad_is_told_with_the_line(is_held: bool, name: str) -> None:
    run, told = Run(), list[Diagnosis]()
    teacher = copy.deepcopy(run.model).requires_grad_(False)
    held = [teacher]
    if is_held:
        del teacher
    with Watch(run.scaler, run.model, tell=lambda found, step: told.append(found)):
        for number, (x, _) in enumerate(run.batches):
            run.take_scaled((run.model(x) - held[0](x)).square().mean())
            share = 1 / torch.tensor(number - 1.0)
            for old, new in zip(held[0].parameters(), run.model.parameters(), strict=True):
                old.data.lerp_(new.detach(), share)
    found = told[0]
    assert (found.verdict, found.bad.op) == ("maths", "reciprocal")
    assert re.search(f"the loop wrote to {name}.*: old.data.lerp_", found.happened)


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


def shares(counts: Tensor) -> tuple[Tensor, Tensor]:
    first = counts / counts.sum(1, keepdim=True)
    second = counts.square() / counts.square().sum(1, keepdim=True)
    return first, second


@pytest.mark.parametrize(
    "draw",
    [
        lambda p: torch.multinomial(p, 1)[:, 0],
        lambda p: torch.distributions.Categorical(p, validate_args=True).sample(),
    ],
    ids=["op", "check"],
)
def test_a_cure_is_finite_up_to_what_has_raised_the_error(draw: Callable[[Tensor], Tensor]) -> None:
    run, watch = Run(), Watch(tell=lambda *_: None)
    with suppress(RuntimeError, ValueError), watch:
        for step, (x, y) in enumerate(run.batches, start=1):
            first, second = shares(torch.zeros(4, 3) if step == BAD_STEP else y)
            out = run.model(x)
            taken = draw(out.softmax(1) * (1 + first) + second)
            run.take(nn.functional.cross_entropy(out, taken))
    (found,) = watch.found
    assert found.bad is not None
    assert found.cure is not None
    assert [each.text.split()[0] for each in found.cure.edits] == ["first", "second"]
    assert found.cure.is_finite


@pytest.mark.parametrize(
    "metric",
    [
        lambda out, y: (out.argmax(1) == y).sum() / (y > 5).sum(),
        lambda out, y: 1 / (out > 1e9).float().mean(),
        lambda out, y: torch.bincount(out.argmax(1), minlength=9) / torch.zeros(9),
    ],
    ids=["accuracy", "share", "counts"],
)
def test_a_metric_that_is_read_is_no_loss(metric: Callable[[Tensor, Tensor], Tensor]) -> None:
    run, watch = Run(), Watch(tell=lambda *_: None)
    with watch:
        for x, y in run.batches:
            out = run.model(x)
            run.take(nn.functional.cross_entropy(out, y.argmax(1)))
            assert not all(map(math.isfinite, metric(out, y.argmax(1)).flatten().tolist()))
    assert not watch.found


def test_a_score_that_could_be_a_loss_is_one() -> None:
    run, watch = Run(), Watch(tell=lambda *_: None)
    with watch:
        for step, (x, y) in enumerate(run.batches, start=1):
            loss = (run.model(x) * y).mean() / (step != BAD_STEP)
            if math.isfinite(loss.item()):
                run.take(loss)
    assert [found.verdict for found in watch.found] == ["maths"]
