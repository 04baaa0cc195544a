"""What a report says of loops that go wrong without an inf or NaN, and of some that do not."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from tests import forked
from tests.device import DEVICE
from tests.training import step_on
from torch import Tensor, nn

import halfstep
from halfstep._common.text import SEVERITIES
from halfstep._tools.record.read import read_run
from halfstep._tools.record.run import dtypes_text
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.summary import Summary
from halfstep._tools.report.text import sentences
from halfstep.errors import HalfstepWarning

X, Y = torch.randn(32, 8), torch.randn(32, 1)


class Loop:
    """A model, an optimizer, a batch; ``loss`` is that of one forward pass."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(8, 1)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-2)

    def loss(self) -> Tensor:
        self.optimizer.zero_grad()
        return (self.model(X) - Y).square().mean()


def recorded(folder: Path, step: Callable[[], object], num: int = 60) -> tuple[str, str, Summary]:
    """Return the severity and the text of the worst sentence about a loop, and the numbers."""
    with halfstep.record(folder):
        for _ in range(num):
            step()
    summary = summarize(read_run(folder))
    worst = min(sentences(summary), key=lambda each: SEVERITIES.index(each.severity))
    return worst.severity, worst.text, summary


def test_a_healthy_loop_and_an_optimizer_without_gradients(tmp_path: Path) -> None:
    loop = Loop()
    idle = torch.optim.SGD(nn.Linear(8, 1).parameters(), lr=1e-2)

    def step() -> None:
        step_on(loop.optimizer, loop.loss())
        idle.step()  # makes no steps

    severity, text, summary = recorded(tmp_path, step)
    assert (severity, summary.steps.num) == ("notice", 60)
    assert text.startswith("No product with gradients ran")


def test_gradients_that_are_zero_when_the_optimizer_steps(tmp_path: Path) -> None:
    loop = Loop()

    def step() -> None:
        loop.loss().backward()
        for param in loop.model.parameters():
            param.grad.zero_()
        loop.optimizer.step()

    severity, text, _ = recorded(tmp_path, step)
    assert severity == "bad"
    assert text.startswith("No weight moved")
    assert "when an optimizer stepped, these were zero" in text


def test_an_optimizer_of_other_tensors(tmp_path: Path) -> None:
    loop = Loop()
    other = torch.optim.SGD(nn.Linear(8, 1).parameters(), lr=1e-2)
    severity, text, summary = recorded(tmp_path, lambda: step_on(other, loop.loss()))
    assert (severity, summary.steps.num) == ("bad", 60)
    assert "no optimizer of the run steps these weights" in text


def test_a_step_past_the_scaler(tmp_path: Path) -> None:
    loop, scaler = Loop(), halfstep.GradScaler(DEVICE, init_scale=2.0**10)
    loop.optimizer.param_groups[0]["lr"] = 1e-6

    def step() -> None:
        scaler.scale(loop.loss()).backward()
        loop.optimizer.step()

    with pytest.warns(HalfstepWarning, match="past the scaler") as told:
        severity, text, summary = recorded(tmp_path, step)
    assert len(told) == 1
    assert (severity, summary.steps.num) == ("bad", 60)
    assert "loop.optimizer.step()" in text
    assert "multiplied by the scale (2^10)" in text


@pytest.mark.parametrize(("is_checked", "num_skipped"), [(True, 1), (False, 0)])
def test_a_step_by_hand_after_unscale_is_taken(is_checked, num_skipped, tmp_path) -> None:
    loop, scaler = Loop(), halfstep.GradScaler(DEVICE, init_scale=2.0**10)
    factors = iter([1.0, torch.inf, 1.0, 1.0])

    def step() -> None:
        scaler.scale(loop.loss() * next(factors)).backward()
        scaler.unscale_(loop.optimizer)
        if loop.model.weight.grad.isfinite().all() or not is_checked:
            loop.optimizer.step()
        scaler.update()

    _, text, summary = recorded(tmp_path, step, 4)
    assert (summary.steps.num, summary.steps.num_skipped) == (4, num_skipped)
    assert loop.model.weight.isfinite().all() == is_checked
    assert "past the scaler" not in text


@pytest.mark.parametrize("maximize", [True, False])
def test_a_loss_that_rises(maximize: bool, tmp_path: Path) -> None:
    loop = Loop()
    loop.optimizer.param_groups[0]["maximize"] = maximize
    severity, text, _ = recorded(tmp_path, lambda: step_on(loop.optimizer, loop.loss()))
    assert (severity == "warning") is maximize
    assert text.startswith("The loss rose") is maximize


@pytest.mark.parametrize("ends", [(0, -1), (0, 1, -1), (0, None)], ids=["all", "parts", "more"])
def test_clipping_does_not_make_an_overflow_suspicious(ends, tmp_path: Path) -> None:
    # unscale_, clip, step: the clip makes NaN of inf. Also in two parts, and with another's.
    other = nn.Parameter(torch.ones(1))
    loop, scaler = Loop(), halfstep.GradScaler(DEVICE, init_scale=2.0**20, growth_interval=10)

    def step() -> None:
        with halfstep.autocast(DEVICE, torch.float16):
            loss = 10 * loop.loss()
        scaler.scale(loss).backward()
        scaler.unscale_(loop.optimizer)
        other.grad = torch.ones(1)
        for begin, end in pairwise(ends):
            nn.utils.clip_grad_norm_([*loop.model.parameters(), other][begin:end], 1.0)
        scaler.step(loop.optimizer)
        scaler.update()

    severity, text, summary = recorded(tmp_path, step)
    assert summary.steps.num_skipped > 0
    assert severity == "good", text


LEFT_OUT = Path(__file__).parent / "corpus" / "left_out.py"


def test_steps_that_the_script_leaves_out_are_steps(tmp_path):
    """Each with its own loss: as a skip if its gradients were bad, and else by the script."""
    done = forked.python("-m", "halfstep", "run", "-o", "out", LEFT_OUT, cwd=tmp_path)
    ran = "no product with gradients ran in a lower precision (products: float32)"
    assert done.err == f"halfstep: 20 steps recorded, 5 skipped; {ran}: halfstep report out\n"
    steps = read_run(tmp_path / "out").steps
    assert max(step.loss for step in steps) == steps[0].loss  # none has been added up
    reasons = {step.step: step.reason for step in steps if not step.taken}
    by_script = dict.fromkeys((8, 9, 10), "left out by the script")
    assert reasons == {4: "overflow", 5: "overflow"} | by_script
    assert [step.scale for step in steps][-1] == 2.0**14
    told = forked.python("-m", "halfstep", "report", "out", cwd=tmp_path).out
    assert "The script left out 3 steps whose gradients were finite" in told


def test_gradients_that_go_bad_after_unscale_are_reported_at_that_step(tmp_path):
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = halfstep.GradScaler("cpu")
    with halfstep.record(tmp_path / "run", model=model):
        for step in range(1, 41):
            optimizer.zero_grad()
            scaler.scale(model(torch.ones(2, 4)).square().mean()).backward()
            scaler.unscale_(optimizer)
            if step == 30:
                model.bias.grad.div_(0.0)
            scaler.step(optimizer)
            scaler.update()
    run = read_run(tmp_path / "run")
    (skipped,) = run.skipped
    assert (skipped.step, skipped.reason) == (30, "non-finite after unscale_")
    told = " ".join(each.text for each in sentences(summarize(run)))
    assert "step 30" in told
    assert "In 1 step the gradients were finite when they were unscaled, and the script" in told


GUARDED = Path(__file__).parent / "corpus" / "guarded.py"


def test_steps_that_the_script_leaves_out_without_a_scaler(tmp_path):
    """Their losses are not added to those of later steps. The program's warning is told."""
    done = forked.python("-m", "halfstep", "run", "-o", "out", GUARDED, cwd=tmp_path)
    assert "UserWarning: Using a target size" in done.err
    assert "FutureWarning: this will go" in done.err
    assert "36 steps recorded, 0 skipped" in done.err
    steps = read_run(tmp_path / "out").steps
    assert len(steps) == 36
    assert all(step.loss < 5 for step in steps)
    told = forked.python("-m", "halfstep", "report", "out", cwd=tmp_path).out
    assert "cleared 4 times before step() of an optimizer (first before step 4)" in told
    assert "printed a UserWarning (guarded.py:14): Using a target size" in told
    assert told.lower().count("the program printed") == 1


@pytest.mark.parametrize("has_masters", [False, True])
@pytest.mark.parametrize("has_scaler", [False, True])
def test_the_loss_of_dropped_gradients_is_no_part_of_a_step(tmp_path, has_scaler, has_masters):
    """As in a loop of SAM, whose first pass only moves the weights."""
    model = nn.Linear(4, 1)
    weights = masters = [*model.parameters()]
    if has_masters:  # of the script, which copies gradients to them
        masters = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.SGD(masters, lr=0.0)
    scaler = halfstep.GradScaler("cpu", enabled=has_scaler)
    with halfstep.record(tmp_path / "run", model=model):
        for _ in range(3):
            model.zero_grad()
            for factor in (5.0, 1.0, 1.0):  # dropped, and two micro-batches
                loss = factor * (model(torch.ones(2, 4)) * 0 + 1).mean()
                scaler.scale(loss).backward()
                if factor == 5.0:
                    model.zero_grad()
            for weight, master in zip(weights, masters, strict=True):
                master.grad = weight.grad.clone()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    run = read_run(tmp_path / "run")
    assert [step.loss for step in run.steps] == [2.0] * 3
    (text,) = (note.text for note in run.notes)
    assert "cleared 3 times before step() of an optimizer (first before step 1)" in text


def test_gradients_that_are_clipped_early_are_not_fine(tmp_path: Path) -> None:
    script = GUARDED.with_name("clipped_early.py")
    forked.python("-m", "halfstep", "run", "-o", "out", script, cwd=tmp_path)
    worst = sentences(summarize(read_run(tmp_path / "out")))[0]
    assert (worst.severity, worst.text[:11]) == ("warning", "step(Adam):")


def test_a_loss_that_rises_in_a_few_steps(tmp_path: Path) -> None:
    loop = Loop()
    loop.optimizer.param_groups[0].update(lr=0.3, maximize=True)

    def step() -> None:
        step_on(loop.optimizer, loop.loss())

    severity, text, _ = recorded(tmp_path, step, 5)
    assert (severity, text[:13]) == ("warning", "The loss rose")


def test_products_of_a_frozen_model_and_of_a_custom_function_are_left_out(tmp_path: Path) -> None:
    """Autograd sees neither, so that no sentence speaks of all products."""
    loop, frozen = Loop(), nn.Linear(8, 8).bfloat16().requires_grad_(False)

    def step() -> None:
        loss = (loop.model(frozen(X.bfloat16()).float()) - Y).square().mean()
        loop.optimizer.zero_grad()
        step_on(loop.optimizer, loss)

    *_, summary = recorded(tmp_path, step, num=3)
    no = "no product with gradients{} ran in a lower precision (products: float32)"
    assert dtypes_text(summary.products) == no.format("")
    outside = " outside of custom functions"
    assert dtypes_text({"float32": 1, "custom": 2}) == no.format(outside)
    all_ran = f"all products with gradients{outside} ran in bfloat16"
    assert dtypes_text({"bfloat16": 1, "custom": 1}) == all_ran
    assert dtypes_text({"custom": 1}) == "the dtypes of products were not measured"
    assert " outside of compiled or custom f" in dtypes_text({"float16": 1, "hidden": 1})


@pytest.mark.parametrize("is_root", [False, True])
@pytest.mark.parametrize(
    ("is_list", "factors", "expected"),
    [
        (False, [(2.0,), (3.0,)], 13.0),
        (False, [(), (0.5, 0.5)], 5.0),
        (False, [(1.0,), (0.5, 0.25)], 4.25),
        (True, [(1.0,), (0.5, 0.25)], 4.25),
    ],
)
def test_a_factor_is_of_the_scaled_loss_of_its_pass(is_list, factors, expected, is_root, tmp_path):
    """Those of several passes of one loss add up; without any, it counts once."""
    weight, scaler = nn.Parameter(torch.ones(())), halfstep.GradScaler("cpu", 8.0)
    with halfstep.record(tmp_path / "run", model=nn.ParameterList([weight])):
        losses = [weight * 2.0, weight * 3.0]
        losses = scaler.scale(losses) if is_list else [*map(scaler.scale, losses)]
        (weight * 100).backward(gradient=torch.tensor(7.0))
        for loss, of_loss in zip(losses[::-1], factors[::-1], strict=True):
            for factor in map(torch.tensor, of_loss):
                root, given = (loss * factor, None) if is_root else (loss, factor)
                root.backward(gradient=given, retain_graph=True)
        scaler.step(torch.optim.SGD([weight], lr=0.0))
        scaler.update()
    assert [step.loss for step in read_run(tmp_path / "run").steps] == [expected]


@pytest.mark.parametrize("is_sum", [False, True])
def test_factors_of_several_scaled_losses_in_one_pass(is_sum, tmp_path):
    weight, scaler = nn.Parameter(torch.ones(())), halfstep.GradScaler("cpu", 8.0)
    with halfstep.record(tmp_path / "run", model=nn.ParameterList([weight])):
        a, b = scaler.scale([weight * 2.0, weight * 4.0])
        roots = [a * 0.5 + b * 0.25] if is_sum else [a, b]
        torch.autograd.backward(roots, None if is_sum else [torch.tensor(0.5), torch.tensor(0.25)])
        scaler.step(torch.optim.SGD([weight], lr=0.0))
        scaler.update()
    assert [step.loss for step in read_run(tmp_path / "run").steps] == [2.0]
