"""Why a step is skipped, what happens to the scale, and what the user is told."""

import math
import warnings
from typing import Any

import pytest
import torch
from tests.training import fused_or_not, one_parameter

import halfstep
from halfstep._scaler import GradScaler
from halfstep._scaler.alarm import Alarm, SkipReport
from halfstep._scaler.scale_state import LOWEST, Dynamic, Static
from halfstep.errors import SkippedStepsError, SkippedStepsWarning


class Training:
    """One layer; its loss or its gradients can be made bad."""

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-6, fused=fused)
        self.scaler = GradScaler(**{"on_skips": lambda report: None, **kwargs})
        self.scaler.watch(self.model)

    def step(self, kind: str = "good", **kwargs: Any) -> float:
        """One iteration; returns the scale after it."""
        self.optimizer.zero_grad()
        loss = self.model(torch.ones(4, 3)).square().mean()
        if kind == "bad loss":
            loss = loss * math.nan
        self.scaler.scale(loss).backward()
        if kind == "bad gradient":
            self.model[1].weight.grad[0, 0] = math.nan
            self.model[1].weight.grad[0, 1] = math.inf
        if kind == "overflow":  # as a weight gradient in float16 would
            for param in self.model.parameters():
                if self.scaler.get_scale() > self.limit:
                    param.grad += math.inf
        self.scaler.step(self.optimizer, **kwargs)
        self.scaler.update()
        return self.scaler.get_scale()

    limit = 100.0

    def is_finite(self) -> bool:
        return all(bool(p.isfinite().all()) for p in self.model.parameters())


@fused_or_not
@pytest.mark.parametrize("num_bad", [1, 2, 3, 8, 9, 20, 30])
@pytest.mark.parametrize("num_before", [0, 3])
def test_after_non_finite_losses_the_scale_is_back_at_once(fused, num_bad, num_before):
    """A9."""
    training = Training(fused)
    for _ in range(num_before):
        training.step()
    for _ in range(num_bad):
        training.step("bad loss")
    assert str(training.scaler.outcome(training.optimizer).reason) == "loss"
    assert training.scaler.counts() == (num_before, num_bad, num_bad, num_before + 1)
    assert [training.step() for _ in range(3)] == [65536.0] * 3
    assert training.scaler.counts() == (num_before + 3, num_bad, 0, None)
    assert training.is_finite()


def test_inside_functorch_the_loss_is_scaled_and_not_looked_at() -> None:
    scaler = GradScaler(init_scale=8.0)
    gradient = torch.func.grad(lambda x: scaler.scale((x * x).sum()))(torch.ones(2))
    assert torch.equal(gradient, torch.full((2,), 16.0))
    each = torch.func.vmap(lambda x: scaler.scale(x.sum()))(torch.ones(3, 2))
    assert torch.equal(each, torch.full((3,), 16.0))


@fused_or_not
def test_a_run_that_no_scale_helps_leaves_the_scale_where_it_was(fused: bool) -> None:
    """A1: 200 steps of NaN. The scale comes down again and again, and is not the one to go on."""
    training = Training(fused)
    training.step()
    scales = [training.step("bad gradient") for _ in range(200)]
    assert scales[:42] == [2.0**k for k in range(15, -25, -1)] + [65536.0, 32768.0]
    assert min(scales) == LOWEST
    assert str(training.scaler.outcome(training.optimizer).reason) == "non-finite down to min_scale"
    assert training.scaler.counts() == (1, 200, 200, 2)
    assert [training.step() for _ in range(2)] == [65536.0] * 2
    assert training.is_finite()


@fused_or_not
def test_at_the_floor(fused: bool) -> None:
    """A guard at scale 1: the first bad step is told, then the 2nd, 4th, 8th bad run."""
    reports: list[SkipReport] = []
    training = Training(fused, init_scale=LOWEST, on_skips=reports.append)
    for _ in range(10):
        training.step("bad gradient")
        training.step()
    assert [report.since for report in reports] == [1, 3, 7, 15]
    assert training.scaler.get_scale() == LOWEST
    assert str(training.scaler.outcome(training.optimizer).reason) == "None"


@fused_or_not
def test_the_message(fused: bool) -> None:
    training = Training(fused, max_consecutive_skips=3, on_skips="warn", schedule=Static())
    training.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            training.step("bad gradient")
    with pytest.warns(SkippedStepsWarning) as caught:
        training.step("bad gradient")
    (warning,) = caught
    assert warning.filename == __file__
    text = str(warning.message)
    assert text.splitlines()[:3] == [
        "updates 2 to 4 were skipped (SGD); reason: overflow; the scale is now 2^16",
        "inf or NaN in the gradients of 1 parameter:",
        "  1.weight: 1 inf and 1 NaN of 2 entries",
    ]
    assert "What to try: the scaled gradients overflow." in text


def test_the_message_counts_updates() -> None:
    """Those of a GAN are no steps of a record, which may have two."""
    reports: list[SkipReport] = []
    scaler = GradScaler(max_consecutive_skips=4, on_skips=reports.append)
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    both = [(param, torch.optim.SGD([param], lr=0.1)) for param in params]
    for value in (1.0, math.nan, math.nan):
        for param, optimizer in both:
            optimizer.zero_grad()
            scaler.scale(param * value).backward()
            scaler.step(optimizer)
            scaler.update()
    (report,) = reports
    assert str(report).startswith("updates 3 to 6 were skipped (SGD); reason: loss; ")


def test_a_script_that_leaves_steps_out_is_told_to_clear_gradients() -> None:
    reports: list[SkipReport] = []
    scaler = GradScaler(max_consecutive_skips=2, on_skips=reports.append)
    param, optimizer = one_parameter(torch.ones(1))
    for _ in range(6):
        scaler.scale(param * math.inf).backward()
        scaler.unscale_(optimizer)
        scaler.update()
    assert "What to try: call optimizer.zero_grad() where the script" in str(reports[0])


def test_a_run_that_is_diagnosed_is_given_no_guess() -> None:
    reports: list[SkipReport] = []
    training = Training(max_consecutive_skips=2, on_skips=reports.append)
    with halfstep.diagnose(training.scaler, tell=lambda *_: None):
        for _ in range(2):
            training.step("bad loss")
    text = str(reports[0])
    assert text.startswith("updates 1 to 2 were skipped (SGD); the scale is now 2^")
    assert text.endswith("see the diagnoses of this run, if any: it replays steps that go bad.")


@fused_or_not
def test_never_the_same_warning_every_step(fused: bool) -> None:
    reports: list[SkipReport] = []
    training = Training(fused, max_consecutive_skips=5, on_skips=reports.append)
    for _ in range(100):
        training.step("bad loss")
    # After the 17th the scale is below 1, and the 41st is at the smallest.
    assert [report.skipped_in_a_row for report in reports] == [5, 10, 17, 34, 41, 82]
    assert {str(report.reason) for report in reports} == {"loss"}
    training.step()
    for _ in range(5):
        training.step("bad loss")
    assert [report.since for report in reports[-1:]] == [102]


@fused_or_not
def test_raise(fused: bool) -> None:
    training = Training(fused, max_consecutive_skips=4, on_skips="raise")
    for _ in range(3):
        training.step("bad loss")
    with pytest.raises(
        SkippedStepsError, match=r"updates 1 to 4 were skipped \(SGD\); reason: loss"
    ):
        training.step("bad loss")
    # The iteration has ended: whoever catches the error can go on.
    assert training.step() == 65536.0
    assert training.scaler.counts() == (1, 4, 0, None)


@fused_or_not
def test_raise_when_the_floor_was_tried_in_vain(fused: bool) -> None:
    training = Training(fused, on_skips="raise", max_consecutive_skips=1000)
    with pytest.warns(SkippedStepsWarning, match=r"updates 1 to 17 .* now 2\^-1\n(.|\n)*below 1"):
        scales = [training.step("bad gradient") for _ in range(40)]
    assert scales[-1] == LOWEST
    with pytest.raises(SkippedStepsError, match=r"down to min_scale; the scale is now 2\^16"):
        training.step("bad gradient")
    # At a scale that began at the floor one bad step proves nothing.
    training = Training(fused, on_skips="raise", init_scale=LOWEST, max_consecutive_skips=3)
    with pytest.warns(SkippedStepsWarning, match="update 1 was skipped"):
        training.step("bad gradient")
    training.step("bad gradient")
    with pytest.raises(SkippedStepsError, match="updates 1 to 3 were skipped"):
        training.step("bad gradient")


def test_many_culprits_are_counted() -> None:
    params = [torch.nn.Parameter(torch.ones(1)) for _ in range(9)]
    optimizer = torch.optim.SGD(params, lr=0.1)
    reports: list[SkipReport] = []
    scaler = GradScaler(init_scale=1.0, on_skips=reports.append)
    scaler.scale(sum(p.sum() for p in params)).backward()
    for param in params[1:]:
        param.grad.fill_(math.nan)
    scaler.step(optimizer)
    scaler.update()
    lines = str(reports[0]).splitlines()
    assert lines[1] == "inf or NaN in the gradients of 8 parameters:"
    assert lines[2].startswith("  param_groups[0]['params'][1]: 1 NaN of 1 entry")
    assert lines[7] == "  and 3 more"


@pytest.mark.parametrize(
    ("kwargs", "error", "words"),
    [
        ({"max_consecutive_skips": 0}, ValueError, "max_consecutive_skips is 0"),
        ({"max_consecutive_skips": 1.5}, TypeError, "max_consecutive_skips is 1.5"),
        ({"on_skips": "shout"}, ValueError, "on_skips is 'shout': pass 'warn', 'raise', or a"),
        ({"min_scale": 0.0}, ValueError, "min_scale is 0.0"),
        ({"max_scale": math.inf}, ValueError, "max_scale is inf"),
        ({"min_scale": 2.0**17}, ValueError, "init_scale"),
        ({"max_scale": 4.0}, ValueError, "init_scale"),
        ({"schedule": Dynamic(), "growth_factor": 3.0}, ValueError, "schedule=Dynamic"),
        ({"module": 3}, TypeError, "that is trained, got int"),
    ],
)
def test_arguments(kwargs: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        GradScaler(**kwargs)


def test_alarm_says_when() -> None:
    alarm = Alarm(3, "warn")
    said = [n for n in range(1, 30) if alarm.note(n, depth=0)]
    assert said == [3, 6, 12, 24]
    assert not alarm.note(0, depth=0)
    said = [n for n in range(1, 30) if alarm.note(n, depth=(n >= 2) + (n >= 5))]
    assert said == [2, 4, 5, 10, 20]
