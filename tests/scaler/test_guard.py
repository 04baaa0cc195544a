"""Steps without a scaler that are skipped where a gradient is bad."""

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.device import DEVICE
from tests.integrations.quiet import quiet_trainer
from tests.training import mlp
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import halfstep
from halfstep import guard
from halfstep._tools.record.read import read_run
from halfstep._tools.report.summarize import summarize
from halfstep._tools.report.text import sentences
from halfstep.errors import SkippedStepsError, SkippedStepsWarning

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.01),
}


def silent(report: object) -> None:
    pass


def backward(model: nn.Module, seed: int, *, is_bad: bool = False) -> Tensor:
    torch.manual_seed(seed)
    x = torch.full((3, 4), math.nan) if is_bad else torch.randn(3, 4)
    model.zero_grad()
    loss: Tensor = model(x).square().mean()
    loss.backward()
    return loss


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("max_norm", [None, 0.1])
def test_bad_steps_are_left_out_and_others_are_as_without_it(
    name: str, max_norm: float | None
) -> None:
    plain, guarded = mlp(4, 8, 1), mlp(4, 8, 1)
    reference, optimizer = (OPTIMIZERS[name](m.parameters()) for m in (plain, guarded))
    made = guard(optimizer, max_norm, on_skips=silent)
    for seed in range(8):
        is_bad = seed in (2, 3, 6)
        backward(guarded, seed, is_bad=is_bad)
        before, state = weights(guarded), copy.deepcopy(optimizer.state_dict()["state"])
        optimizer.step()
        assert made.outcome().taken is not is_bad
        if is_bad:
            assert all(map(torch.equal, before, weights(guarded)))
            torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
        else:
            backward(plain, seed)
            if max_norm is not None:
                nn.utils.clip_grad_norm_(plain.parameters(), max_norm)
            reference.step()
            for mine, its in zip(weights(guarded), weights(plain), strict=True):
                torch.testing.assert_close(mine, its, rtol=1e-5 if max_norm else 0, atol=0)
    assert made.counts()[:2] == (5, 3)


@pytest.mark.parametrize("schedule", ["none", "made before", "made after"])
def test_the_first_skip_names_the_parameters_and_later_ones_are_counted(schedule: str) -> None:
    """A schedule wraps ``step``, and accelerate hides the warnings of its module."""
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if schedule == "made before":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    guard(optimizer, module=model)
    if schedule == "made after":
        torch.optim.lr_scheduler.StepLR(optimizer, 1)
    with warnings.catch_warnings(record=True, action="always") as told:
        for is_bad in (True, False) * 9:
            backward(model, 0, is_bad=is_bad)
            optimizer.step()
    assert {(each.filename, each.category) for each in told} == {(__file__, SkippedStepsWarning)}
    first, *later = [str(warning.message) for warning in told]
    assert first.startswith("update 1 was skipped (SGD); reason: inf or NaN in the gradients\n")
    assert "2.weight: 8 NaN of 8 entries" in first
    assert "scale" not in first
    assert later == [
        f"update {2 * n - 1} was skipped (SGD), {n} of {2 * n - 1} so far; reason: inf or NaN in "
        "the gradients"
        for n in (2, 4, 8)
    ]


def test_a_new_optimizer_does_not_repeat_what_was_warned_of() -> None:
    """As in a script that makes an optimizer for each task."""
    told = []
    for sizes in ((4, 8, 1), (4, 8, 1), (4, 1)):
        model = mlp(*sizes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        guard(optimizer, module=model)
        backward(model, 0, is_bad=True)
        with pytest.warns(SkippedStepsWarning) as warned:
            optimizer.step()
        told.append(str(warned[0].message).split("\n"))
    head = "update 1 was skipped (SGD); reason: inf or NaN in the gradients"
    assert [text[0] for text in told] == [head] * 3
    assert told[0][-1].startswith("What to try: ")
    assert told[1] == [head]
    assert [text.split(":")[0] for text in told[2][2:]] == ["  0.weight", "  0.bias"]


def test_each_of_many_in_a_row_is_reported() -> None:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    told: list[int] = []
    guard(optimizer, on_skips=lambda report: told.append(report.skipped_in_a_row))
    for seed in range(5):
        backward(model, seed, is_bad=True)
        optimizer.step()
    assert told == [1, 2, 3, 4, 5]


def test_raise_at_a_skip() -> None:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = guard(optimizer, on_skips="raise")
    for _ in range(4):
        backward(model, 0, is_bad=True)
        with pytest.raises(SkippedStepsError):
            optimizer.step()
    backward(model, 0)
    optimizer.step()
    assert made.outcome().taken


@pytest.mark.parametrize("by_name", [False, True])
def test_a_closure_is_evaluated_once(by_name: bool) -> None:
    model, losses = mlp(4, 8, 1), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    made = guard(optimizer, on_skips=silent)
    for is_bad in (False, True, False):
        before = weights(model)

        def closure(is_bad: bool = is_bad) -> Tensor:
            losses.append(backward(model, 0, is_bad=is_bad))
            return losses[-1]

        with torch.no_grad():
            loss = optimizer.step(closure=closure) if by_name else optimizer.step(closure)
        assert loss is losses[-1]
        assert all(map(torch.equal, before, weights(model))) is is_bad
    assert len(losses) == 3
    assert made.counts()[:2] == (2, 1)


class Sharpness(torch.optim.SGD):
    """Changes parameters, and evaluates the closure there."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for param in self.param_groups[0]["params"]:
            param.add_(param.grad)
        return closure()


def test_a_closure_that_is_evaluated_elsewhere_is_refused() -> None:
    model = mlp(4, 8, 1)
    optimizer = Sharpness(model.parameters(), lr=0.1)
    guard(optimizer)
    with pytest.raises(halfstep.CallOrderError, match="Put the guard"):
        optimizer.step(lambda: backward(model, 0))


class Foreign(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


def test_master_weights_are_no_change_by_the_optimizer() -> None:
    model = mlp(4, 8, 1).to(torch.bfloat16)
    optimizer = Foreign(model.parameters(), lr=0.1)
    halfstep.master_weights(optimizer)
    made = guard(optimizer)

    def closure() -> Tensor:
        model.zero_grad()
        loss: Tensor = model(torch.ones(3, 4, dtype=torch.bfloat16)).float().square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert made.outcome().taken


class Breaking(torch.optim.SGD):
    is_broken = False

    def step(self, closure: Any = None) -> Any:
        if self.is_broken:
            raise MemoryError
        return super().step(closure)


@pytest.mark.parametrize("max_norm", [None, 1.0])
def test_a_bad_step_after_one_that_raised_is_left_out(max_norm: float | None) -> None:
    model = mlp(4, 8, 1)
    optimizer = Breaking(model.parameters(), lr=0.1)
    made = guard(optimizer, max_norm, on_skips=silent)
    for seed in range(5):
        is_bad = seed == 4
        optimizer.is_broken = seed == 3
        backward(model, seed, is_bad=is_bad)
        if optimizer.is_broken:
            with pytest.raises(MemoryError):
                optimizer.step()
        else:
            optimizer.step()
            assert made.outcome().taken is not is_bad
    assert all(param.isfinite().all() for param in model.parameters())
    assert made.counts()[:2] == (3, 1)


def test_one_that_steps_another() -> None:
    models = mlp(4, 8, 1), mlp(4, 8, 1)
    outer, inner = (torch.optim.SGD(model.parameters(), lr=0.1) for model in models)
    guards = [guard(optimizer, on_skips=silent) for optimizer in (outer, inner)]
    outer.register_step_post_hook(lambda *_: inner.step())
    backward(models[0], 0)
    backward(models[1], 0, is_bad=True)
    outer.step()
    assert [made.outcome().taken for made in guards] == [True, False]


class Lookahead(torch.optim.Optimizer):
    """Slow weights that follow those of another optimizer, at every second step of it."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.optimizer, self.num_steps = optimizer, 0
        self.slow = [p.detach().clone() for g in self.param_groups for p in g["params"]]

    def step(self, closure: Any = None) -> Any:
        loss = self.optimizer.step(closure)
        self.num_steps += 1
        params = (p for g in self.param_groups for p in g["params"])
        for param, slow in zip(params, self.slow, strict=True):
            if self.num_steps % 2 == 0:
                slow.lerp_(param.detach(), 0.5)
                param.data.copy_(slow)
        return loss


@pytest.mark.parametrize("is_outer", [True, False])
def test_lookahead(is_outer: bool) -> None:
    plain, guarded = mlp(4, 8, 1), mlp(4, 8, 1)
    reference, inner = (torch.optim.AdamW(m.parameters(), lr=0.01) for m in (plain, guarded))
    around_reference, around = Lookahead(reference), Lookahead(inner)
    made = guard(around if is_outer else inner, on_skips=silent)
    for seed in range(6):
        is_bad = seed == 3
        backward(guarded, seed, is_bad=is_bad)
        around.step()
        if not is_bad:
            backward(plain, seed)
            around_reference.step()
        elif not is_outer:  # the outer step is made, with an inner one that changes nothing
            reference.zero_grad()
            around_reference.step()
    assert made.counts()[:2] == (5, 1)
    assert all(map(torch.equal, weights(plain), weights(guarded)))


@pytest.mark.parametrize("optimizer_of", [OPTIMIZERS["SGD"], torch.optim.AdamW])
@pytest.mark.parametrize("make", [lambda: torch.device("meta"), FakeTensorMode])
def test_tensors_without_values_step_as_without_it(
    make: Callable[[], Any], optimizer_of: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """AdamW before 2.13 reads its count of steps, which is an error if that is on meta."""

    def result(*, is_guarded: bool) -> Any:
        with make():
            model = nn.Linear(4, 1)
            optimizer = optimizer_of(model.parameters())
            if is_guarded:
                kept.append(optimizer)
                made.append(guard(optimizer, max_norm=1.0, on_skips="raise"))
            model(torch.ones(3, 4)).sum().backward()
            try:
                optimizer.step()
            except RuntimeError as error:
                return str(error)
        return {key: value.shape for key, value in optimizer.state[model.weight].items()}

    made: list[Any] = []
    kept: list[torch.optim.Optimizer] = []  # a guard has a weak reference
    assert result(is_guarded=True) == result(is_guarded=False)
    assert made[0].counts()[:2] == (0, 0)
    with pytest.raises(halfstep.CallOrderError, match="no step of this optimizer has been checked"):
        made[0].outcome()


@pytest.mark.parametrize("is_first", [True, False])
def test_tensors_without_values_do_not_hide_others(is_first: bool) -> None:
    meta, real = nn.Parameter(torch.ones(2, device="meta")), nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([meta, real] if is_first else [real, meta], lr=0.1)
    guard(optimizer, on_skips=silent)
    meta.grad, real.grad = torch.ones(2, device="meta"), torch.full((2,), math.nan)
    with pytest.raises(RuntimeError, match="meta"):
        optimizer.step()
    assert torch.equal(real, torch.ones(2))


def test_schedulers_and_checkpoints_go_on() -> None:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0)
    guard(optimizer, on_skips=silent)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        for is_bad in (True, False):
            backward(model, 0, is_bad=is_bad)
            optimizer.step()
            scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    other = torch.optim.AdamW(mlp(4, 8, 1).parameters())
    other.load_state_dict(optimizer.state_dict())
    assert len(other.state) == 4


def test_without_gradients_it_steps() -> None:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = guard(optimizer)
    optimizer.step()
    assert made.counts()[:2] == (0, 0)
    with pytest.raises(halfstep.CallOrderError):
        made.outcome()


def test_removed_it_is_gone() -> None:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        made = guard(optimizer)
        with pytest.raises(halfstep.CallOrderError, match="has a guard already"):
            guard(optimizer)
        made.remove()
    assert "step" not in vars(optimizer)
    backward(model, 0, is_bad=True)
    optimizer.step()
    assert any(param.isnan().any() for param in model.parameters())


def test_a_guard_that_was_removed_leaves_the_next_one_alone() -> None:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first = guard(optimizer)
    first.remove()
    second = guard(optimizer, on_skips=silent)
    first.remove()
    backward(model, 0, is_bad=True)
    optimizer.step()
    assert not second.outcome().taken
    assert all(param.isfinite().all() for param in model.parameters())


def test_removed_it_leaves_what_is_on_top_of_it() -> None:
    model, calls = mlp(4, 8, 1), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    made = guard(optimizer)
    step = optimizer.step

    def counted() -> Any:
        calls.append(1)
        return step()

    optimizer.step = counted  # type: ignore[method-assign,assignment]
    made.remove()
    backward(model, 0, is_bad=True)
    optimizer.step()
    assert calls == [1]
    assert any(param.isnan().any() for param in model.parameters())
    guard(optimizer)


def test_what_it_is_given() -> None:
    params = [nn.Parameter(torch.ones(2))]
    with pytest.raises(ValueError, match="LBFGS"):
        guard(torch.optim.LBFGS(params))
    with pytest.raises(TypeError, match="pass the optimizer"):
        guard(mlp(4, 8, 1))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_norm"):
        guard(torch.optim.SGD(params), max_norm=-1.0)


@pytest.mark.parametrize("theirs", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_a_scaler_beside_it_is_refused(theirs: bool, fused: bool) -> None:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=fused)
    guard(optimizer)
    kind = torch.amp.GradScaler if theirs else halfstep.GradScaler
    scaler: Any = kind(DEVICE, init_scale=1.0)
    scaler.scale(model(torch.ones(1, 4)).sum()).backward()
    if theirs and not fused:  # which tells an optimizer nothing: both look, and both are right
        scaler.step(optimizer)
    else:
        with pytest.raises(halfstep.CallOrderError, match="leave one of them out"):
            scaler.step(optimizer)


def test_a_step_that_was_kept_from_before_is_an_error() -> None:
    """So accelerate keeps it, with a scaler, and puts it back: nothing would be clipped."""
    model = mlp(4, 8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    kept = optimizer.step
    made = guard(optimizer, max_norm=0.5)
    backward(model, 0)
    for step in (kept, lambda: torch.optim.AdamW.step(optimizer)):
        with pytest.raises(halfstep.CallOrderError, match=r"call guard\(optimizer\) first"):
            step()
    optimizer.step()
    made.remove()
    kept()
    assert made.counts()[:2] == (1, 0)


def test_with_master_weights() -> None:
    model = mlp(4, 8, 1).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    halfstep.master_weights(optimizer)
    made = guard(optimizer, max_norm=1.0, on_skips=silent)
    for is_bad in (False, True, False):
        torch.manual_seed(0)
        model.zero_grad()
        x = torch.full((3, 4), math.inf if is_bad else 1.0, dtype=torch.bfloat16)
        model(x).float().square().mean().backward()
        before = halfstep.float32_weights(model, optimizer)["0.weight"]
        optimizer.step()
        after = halfstep.float32_weights(model, optimizer)["0.weight"]
        assert torch.equal(before, after) is is_bad
    assert made.counts()[:2] == (2, 1)


def test_records_and_reports(tmp_path: Path) -> None:
    model = mlp(4, 8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    guard(optimizer, max_norm=1.0, on_skips=silent)
    with halfstep.record(tmp_path, model, every=5), halfstep.use_policy("standard"):
        for seed in range(20):
            with torch.autocast(DEVICE, torch.bfloat16):
                backward(model, seed, is_bad=seed == 12)
            optimizer.step()
    run = read_run(tmp_path)
    assert [step.step for step in run.skipped] == [13]
    assert all(step.loss is not None and step.norm is not None for step in run.steps)
    assert run.policies[0].dtype == "bfloat16"
    said = " ".join(sentence.text for sentence in sentences(summarize(run)))
    assert "1 of 20 steps was skipped" in said
    assert "The loss became NaN at step 13" in said
    assert "while the loss was finite" not in said
    assert "needs no GradScaler" not in said


# --- frameworks -----------------------------------------------------------------------------------


def train_with_accelerate(model: nn.Module, guarded: bool, folder: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(mixed_precision="bf16", cpu=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if guarded:
        guard(optimizer, on_skips=silent)
    wrapped, optimizer = accelerator.prepare(model, optimizer)
    for x in BATCHES:
        optimizer.zero_grad()
        accelerator.backward(wrapped(x).float().square().mean())
        optimizer.step()


def train_with_lightning(model: nn.Module, guarded: bool, folder: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Tensor) -> Tensor:
            return self.model(batch).float().square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            if guarded:
                guard(optimizer, on_skips=silent)
            return optimizer

    trainer = quiet_trainer(folder, precision="bf16-mixed")
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.cat(BATCHES), batch_size=3))


BATCHES = [torch.ones(3, 4), torch.full((3, 4), math.nan), torch.ones(3, 4)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("train", [train_with_accelerate, train_with_lightning])
def test_frameworks_survive_a_bad_batch(
    train: Callable[[nn.Module, bool, Path], None], tmp_path: Path
) -> None:
    plain, guarded = mlp(4, 8, 1), mlp(4, 8, 1)
    train(plain, False, tmp_path)
    train(guarded, True, tmp_path)
    assert any(param.isnan().any() for param in plain.parameters())
    assert all(param.isfinite().all() for param in guarded.parameters())
    assert not all(map(torch.equal, weights(mlp(4, 8, 1)), weights(guarded)))
