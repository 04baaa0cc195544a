"""Steps that go bad on the optimizer's side: its settings, and weights that explode."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import halfstep
from halfstep import GradScaler
from halfstep._tools.line import Line
from halfstep._tools.watch import schedules
from halfstep._tools.watch.call_log import CallLog
from halfstep._tools.watch.carried import Carried
from halfstep._tools.watch.growth import Growth
from halfstep._tools.watch.optimizers import of_high_rate, still_scaled
from halfstep._tools.watch.watch import Watch


def watched(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    num: int = 12,
    *,
    before_step: Callable[[int], None] = lambda i: None,
    scaler: halfstep.GradScaler | None = None,
    loss_of: Callable[[Tensor], Tensor] = lambda out: (out - 1).square().mean(),
) -> tuple[Watch, list[int]]:
    """Train on random batches; return the watch, and the step of each diagnosis."""
    steps: list[int] = []
    with Watch(scaler, model, tell=lambda _, step: steps.append(step)) as watch:
        for i in range(1, num + 1):
            loss = loss_of(model(torch.randn(16, 8)))
            optimizer.zero_grad()
            (loss if scaler is None else scaler.scale(loss)).backward()
            before_step(i)
            if scaler is None:
                optimizer.step()
            else:
                scaler.step(optimizer)
                scaler.update()
    return watch, steps


def perceptron(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1)
    )


def rate_is_nan(group: dict[str, object]) -> None:
    group["lr"] = math.nan


def rate_is_a_tensor(group: dict[str, object]) -> None:
    group["lr"] = torch.tensor(math.inf, device="cpu")


def beta_is_nan(group: dict[str, object]) -> None:
    group["betas"] = (0.9, math.nan)


def decay_is_inf(group: dict[str, object]) -> None:
    group["weight_decay"] = math.inf


@pytest.mark.parametrize("has_scaler", [False, True])
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("lr", rate_is_nan),
        ("lr", rate_is_a_tensor),
        ("betas", beta_is_nan),
        ("weight_decay", decay_is_inf),
    ],
)
def test_a_setting_that_is_not_finite_is_named_before_the_step(name, setting, has_scaler):
    model = perceptron()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, foreach=False)

    def change(i: int) -> None:
        if i == 5:
            setting(optimizer.param_groups[0])

    with warnings.catch_warnings(action="ignore"):
        scaler = halfstep.GradScaler(init_scale=4.0) if has_scaler else None
        watch, steps = watched(model, optimizer, 7, before_step=change, scaler=scaler)
    (found,) = watch.found  # weights that are NaN in the steps after it are left over from it
    assert steps == [5]
    assert (found.verdict, found.tensor) == ("data", f"{name} of AdamW")
    assert f"param_groups[0]['{name}']" in found.cure.text
    # The lines of other files are read only if this one has none.
    line = f"test_optimizer_side.py:{setting.__code__.co_firstlineno + 1}"
    assert f'{line}: group["{name}"]' in found.cure.text
    assert str(found).startswith(f"data: `{name} of AdamW` was not finite before the step\n")


@pytest.mark.parametrize("kind", [torch.optim.Adam, torch.optim.AdamW])
def test_a_rate_that_is_too_high_is_neither_clipped_nor_a_usual_decay(kind) -> None:
    """Steps of Adam are as long with smaller gradients; the decay of AdamW is 0.01, as is usual."""
    model = perceptron()
    watch, _ = watched(model, kind(model.parameters(), 1e15))
    found, of = watch.found[0], kind.__name__
    assert found.happened.startswith(f"the run diverges: the largest weight of {of} grew from ")
    assert found.cure.text == f"lower the learning rate of {of}"


def test_a_number_that_no_step_computes_with_may_be_infinite() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD([{"params": model.parameters(), "max_norm": math.inf}], 1e-3)
    watch, _ = watched(model, optimizer)
    assert watch.found == []


def test_a_rate_that_is_too_high_is_the_cause_not_the_op_that_overflows() -> None:
    model = perceptron()
    watch, steps = watched(model, torch.optim.SGD(model.parameters(), 30.0))
    (found,) = watch.found
    assert steps == [4]
    assert found.cure.text.startswith("lower the learning rate of SGD, or clip the gradients")
    assert "clip_grad_norm_" in found.cure.text
    assert found.cure.is_finite is None
    assert found.verdict == "growth"
    assert found.happened.startswith("the run diverges: the largest weight of SGD grew from ")
    assert "at a learning rate of 30" in found.happened
    assert not any("clamp" in note for note in found.notes)


def test_a_line_that_wrote_to_the_largest_weight_is_checked_first() -> None:
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters())
    write = lambda i: i == 4 and model[0].weight.data.mul_(1e25)  # noqa: E731
    (found,) = watched(model, optimizer, before_step=write)[0].found
    assert found.happened.startswith("weights exploded: the largest weight of Adam grew from ")
    first = "first check this line, which wrote to it outside of a step of Adam: "
    assert found.cure.text.startswith(first)


@pytest.mark.parametrize(
    ("settings", "schedule", "happened", "cure"),
    [
        ({"lr": 30.0, "maximize": True}, None, "at a learning rate of 30", "maximize=False"),
        ({"lr": 0.3}, lambda i: 20.0 * i, ", raised from 0.3", "LambdaLR raised the"),
    ],
)
def test_a_setting_and_a_schedule_are_told(settings, schedule, happened, cure) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    rates = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule else None
    watch, _ = watched(model, optimizer, before_step=lambda i: i > 1 and rates and rates.step())
    assert happened in watch.found[0].happened
    assert cure in watch.found[0].cure.text


def test_weights_explode_in_the_first_step_of_a_recurrent_net() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.read = nn.Parameter(torch.randn(8, 8) * 0.7), nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            for _ in range(60):
                x = torch.relu(x @ self.w + 1)
            out: Tensor = self.read(x)
            return out

    torch.manual_seed(0)
    model = Net()
    watch, steps = watched(model, torch.optim.SGD(model.parameters(), 1e-2))
    assert steps == [2]
    assert watch.found[0].happened.startswith("the run diverges")


def test_a_bad_op_of_a_run_that_does_not_diverge_keeps_its_cure() -> None:
    model = perceptron()
    nn.init.zeros_(model[-1].weight)  # grows from zero, as it should
    num = 0

    def loss_of(out: Tensor) -> Tensor:
        nonlocal num
        num += 1
        return (out - 1).square().mean() + torch.log(
            torch.zeros(()) if num == 9 else torch.ones(())
        )

    watch, _ = watched(model, torch.optim.Adam(model.parameters(), 1e-2), loss_of=loss_of)
    (found,) = watch.found
    assert "clamp_min" in found.cure.text
    assert not any("diverges" in note for note in found.notes)


def test_a_buffer_of_a_loaded_state_is_named_with_the_line_that_loaded_it() -> None:
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 1)).eval()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    state["1.running_var"][2] = math.nan
    with Watch(None, model, tell=lambda *_: None) as watch:
        model.load_state_dict(state)
        optimizer = torch.optim.SGD(model.parameters(), 1e-2)
        (model(torch.randn(16, 8)) - 1).square().mean().backward()
        optimizer.step()
    (found,) = watch.found
    assert (found.verdict, found.tensor) == ("data", "1.running_var")
    assert re.search("this line loads is the cause: .*load_state_dict", found.cure.text)


class Uneven(torch.optim.SGD):
    """SGD that makes a weight NaN in step 3, and cannot take a step again."""

    num, steps_left = 0, 5

    @torch.no_grad()
    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        self.num += 1
        if self.num == 3:
            Uneven.steps_left -= 1
            if Uneven.steps_left < 4:
                raise RuntimeError("taken again")
            self.param_groups[0]["params"][0][0, 0] = math.nan


def test_a_step_that_cannot_be_taken_again_is_named_by_what_it_left() -> None:
    model = perceptron()
    watch, steps = watched(model, Uneven(model.parameters(), 1e-3), num=5)
    (found,) = watch.found
    assert (found.verdict, found.tensor, steps) == ("optimizer", "0.weight", [3])
    assert found.happened.startswith("Uneven made 1 of 512 entries of 0.weight NaN; its gradients")
    assert found.bad is None


class Climber(torch.optim.SGD):
    """SGD that first climbs by gradients of length 1, without a second step for those of 0."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor]) -> None:  # type: ignore[override]
        closure()
        weights = self.param_groups[0]["params"]
        norm = torch.stack([weight.grad.norm() for weight in weights]).norm()
        torch._foreach_add_(weights, [weight.grad * (0.1 / norm) for weight in weights])
        closure()


@pytest.mark.parametrize(("is_unset", "op"), [(True, "reciprocal"), (False, None)])
def test_weights_that_go_bad_between_two_calls_of_a_closure(is_unset: bool, op: str | None) -> None:
    model, x = perceptron(), torch.randn(16, 8)
    optimizer = Climber(model.parameters(), 1e-3)

    def closure() -> None:
        optimizer.zero_grad(is_unset)
        with torch.enable_grad():
            (model(x) * 0).sum().backward()

    with Watch(None, model, tell=lambda *_: None) as watch:
        for _ in range(3):
            optimizer.step(closure)
    (found,) = watch.found
    assert (found.verdict, found.tensor) == ("optimizer", "0.weight")
    assert (found.bad and found.bad.op) == op  # gradients that were zeroed in place are lost
    assert "its gradients were finite" in found.happened


def test_a_state_that_goes_bad_in_the_run_is_not_said_to_be_loaded() -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)

    def spoil(i: int) -> None:
        if i == 8:
            optimizer.state[model[0].weight]["momentum_buffer"][0] = math.nan

    (found,) = watched(model, optimizer, before_step=spoil)[0].found
    assert found.tensor == "momentum_buffer of 0.weight in SGD"
    assert "loaded or set" not in found.cure.text


@pytest.mark.parametrize("is_zeroed", [False, True])
def test_gradients_that_are_never_zeroed_are_the_cause_of_growth(is_zeroed: bool) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 30.0)
    with Watch(None, model, tell=lambda *_: None) as watch:
        for i in range(60):
            (model(torch.randn(16, 8)) - 1).square().mean().backward()
            if i % 2:
                optimizer.step()
                for weight in model.parameters() if is_zeroed else ():
                    weight.grad.data.zero_()  # unseen by the version of the gradient
    (found,) = watch.found
    assert found.cure.text.startswith("optimizer.zero_grad()") is not is_zeroed
    assert ("not zeroed after" in found.happened) is not is_zeroed


def test_a_loss_that_falls_without_end_is_growth_beside_another_that_does_not() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    with Watch(None, model, tell=lambda *_: None) as watch:
        for i in range(1, 60):
            for is_other in (True, False):
                optimizer.zero_grad()
                loss = -(model(torch.ones(1, 1)).abs() + i) * 30 * i
                if is_other:
                    (loss * 0).sum().backward()
                else:
                    loss.half().sum().backward()
                optimizer.step()
    (found,) = watch.found
    assert found.verdict == "growth"
    assert "the loss fell from -" in found.happened
    assert found.cure.text.startswith("bound the loss from below")


def test_the_usual_loss_is_that_of_its_line() -> None:
    """A GAN has two, whose median is that of neither."""
    growth = Growth(Carried(CallLog()))
    lines = [Line("gan.py", number, "", "") for number in (7, 9)]
    for step, (loss, line) in enumerate(zip([100.0, 1.0] * 9, lines * 9, strict=True)):
        growth.note_loss(loss, step, line)
    usual = [growth.usual(18, line).loss for line in (*lines, None)]
    assert usual == [100.0, 1.0, None]


def test_the_optimizers_of_a_loss_are_those_of_the_last_iterations_of_its_line() -> None:
    growth, line = Growth(Carried(CallLog())), Line("gan.py", 7, "", "")
    first, second, third = (torch.optim.SGD(nn.Linear(1, 1).parameters(), 0.1) for _ in range(3))
    for step in range(6):
        growth.note_loss(1.0, step, line)
        for each in [first] if step < 3 else [second, third]:
            growth.note_step(each)
    growth.note_loss(1.0, 6, line)
    growth.note_step(second)  # and third is to follow
    assert {*growth.usual(6, line).steppers} == {second, third}


def test_a_clipping_names_the_variable_of_the_model() -> None:
    solver = nn.Linear(2, 2)
    text = of_high_rate(torch.optim.SGD(solver.parameters(), 0.1), [1.0, 2e3], clips=True)
    assert "(solver.parameters(), 1.0)" in text


class Trainer:
    def cure_of_a_step(self) -> str:
        self.opt, self.scaling = torch.optim.Adam([nn.Parameter(torch.ones(2))]), GradScaler()
        return still_scaled(self.opt, self.scaling).cure.text


def test_lines_to_paste_name_the_variables_of_the_script() -> None:
    text = Trainer().cure_of_a_step()
    assert text.startswith("self.scaling.step(self.opt)  # in place of self.opt.step(); then")
    adam, own = torch.optim.Adam([nn.Parameter(torch.ones(2))]), GradScaler()
    assert still_scaled(adam, own).cure.text.startswith("own.step(adam)")


@pytest.mark.whole_trials
def test_a_guard_does_not_count_the_steps_of_a_trial() -> None:
    model = nn.Linear(8, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    guarded = halfstep.guard(optimizer, on_skips=lambda report: seen.append(report.since))
    seen: list[int] = []
    number = iter(torch.arange(12.0, 0, -1))
    loss_of = lambda out: (next(number) - 2.5).sqrt() * out.mean()  # noqa: E731
    watch, _ = watched(model, optimizer, loss_of=loss_of)
    assert all(found.cure.trial.startswith("20 steps of Adam") for found in watch.found)
    assert (guarded.counts().taken, seen) == (10, [11, 11])


def test_a_square_of_a_gradient_that_overflows_leaves_its_weight_finite() -> None:
    """Adam divides by its root, so that the weight stands still: it is not said to go bad."""
    model = perceptron()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3, foreach=False)

    def change(i: int) -> None:
        if i == 5:
            model[4].bias.grad.fill_(1e25)

    watch, steps = watched(model, optimizer, before_step=change)
    found = watch.found[0]
    assert steps[0] > 5
    assert found.tensor == "exp_avg_sq of 4.bias in Adam"
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert ", with which it steps 4.bias, was not finite before this step" in found.cure.text
    assert found.cure.text.startswith("torch.nn.utils.clip_grad_norm_(")
    assert "too large to be squared" in found.cure.text


def test_a_file_without_a_name_is_not_parsed(tmp_path, monkeypatch) -> None:
    """A program may have hundreds of files, and parsing them takes seconds."""
    with_it, without = tmp_path / "with.py", tmp_path / "without.py"
    with_it.write_text(
        "for g in groups:\n    g['lr'] = 1\nschedule = optim.LambdaLR (o, f)\nlr = 2\n"
    )
    without.write_text("lr = 1\nstep(lr=lr)\n")
    lines = schedules.lines_with(str(with_it), {"lr", "LambdaLR"})
    assert [line.rpartition(": ")[2] for line in lines] == [
        "g['lr'] = 1",
        "schedule = optim.LambdaLR (o, f)",
    ]
    monkeypatch.setattr(schedules, "tree_of", None)
    assert schedules.lines_with(str(without), {"lr"}) == []


@pytest.mark.parametrize("is_before_update", [False, True])
def test_a_plain_step_beside_that_of_a_scaler_uses_what_the_scaler_skips(is_before_update) -> None:
    model = perceptron()
    optimizer = torch.optim.SGD(model.parameters(), 1e-4)
    scaler = halfstep.GradScaler(init_scale=4.0, on_skips=lambda report: None)
    with halfstep.diagnose(scaler, model=model, tell=lambda *_: None) as watch:
        for step in range(14):
            optimizer.zero_grad()
            scaler.scale(model(torch.randn(8, 8)).square().mean()).backward()
            if step == 12:
                model[0].weight.grad[0, 0] = math.inf
            scaler.step(optimizer)
            if is_before_update:
                optimizer.step()
            scaler.update()
            if not is_before_update:
                optimizer.step()
    found = watch.found[0]
    assert found.verdict == "optimizer"
    assert found.happened.startswith("this step of SGD (test_optimizer_side.py:")
    assert "leave this line out" in found.cure.text
