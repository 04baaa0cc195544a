"""scale(loss, name=...): one scale for each loss, against one scaler for each loss."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.device import DEVICE

from halfstep._scaler import GradScaler
from halfstep.errors import CallOrderError

SCALE = 2.0**10

fused_or_not = pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])


class Limited(torch.autograd.Function):
    """Changes nothing, but gradients above a limit overflow, as float16 ones would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return (grad * math.inf if grad.abs().max() > ctx.limit else grad), None


class Training:
    """One parameter, whose gradient is 1 whatever the loss is called."""

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        self.param = torch.nn.Parameter(torch.zeros(2))
        self.optimizer = torch.optim.SGD([self.param], lr=1.0, fused=fused)
        kwargs = {"init_scale": SCALE, "on_skips": lambda report: None} | kwargs
        self.scaler = GradScaler(**kwargs)

    def loss(self, limit: float = math.inf) -> torch.Tensor:
        return Limited.apply(self.param.sum(), limit)

    def iterate(self, name: str | None, limit: float = math.inf) -> float:
        """One iteration; returns the scale after it."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(limit), name=name).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return self.scaler.get_scale(name)

    def block(self, name: str | None, limit: float = math.inf, factor: float = 1.0) -> None:
        with self.scaler.accumulate(self.optimizer):
            self.scaler.scale(self.loss(limit) * factor, name=name).backward()

    def finish(self) -> float:
        """Returns how far the parameter went."""
        before = self.param.detach().clone()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return (before - self.param)[0].item()

    def scales(self, *names: str | None) -> list[float]:
        return [self.scaler.get_scale(name) for name in names]


# --- iterations with one loss each -------------------------------------------------------------


@fused_or_not
def test_each_scale_moves_on_its_own(fused: bool) -> None:
    """As if each name had a scaler of its own; what overflows above its limit differs."""
    training = Training(fused, growth_interval=3)
    alone = {name: Training(fused, growth_interval=3) for name in (None, "a", "b")}
    limits = {None: math.inf, "a": 2.0**8, "b": 2.0**12}
    for _ in range(12):
        for name, own in alone.items():
            before = training.param.detach().clone(), own.param.detach().clone()
            assert training.iterate(name, limits[name]) == own.iterate(None, limits[name])
            assert training.scaler.counts(name) == own.scaler.counts()
            moved = training.param - before[0], own.param - before[1]
            assert torch.equal(*moved)
    assert training.scales(None, "a", "b") == [2.0**14, 2.0**8, 2.0**12]
    entries = training.scaler.history()
    assert len(entries) == 36
    assert [entry.reason for entry in entries[1:6:3]] == ["overflow", "overflow"]
    assert {entry.reason for entry in entries[::3]} == {None}


def test_one_optimizer_for_each_name() -> None:
    """A GAN: two optimizers, two losses, an iteration for each."""
    training = Training()
    other = Training()
    other.scaler = training.scaler
    for _ in range(3):
        training.iterate("generator", 2.0**9)
        other.iterate("discriminator", 2.0**8)
    assert training.scales("generator", "discriminator") == [2.0**9, 2.0**8]
    assert training.scaler.counts("generator") == (2, 1, 0, None)
    assert training.scaler.counts("discriminator") == (1, 2, 0, None)
    assert training.scaler.counts() == (0, 0, 0, None)
    assert torch.equal(training.param, torch.full((2,), -2.0))
    assert torch.equal(other.param, torch.full((2,), -1.0))
    assert training.scaler.outcome(other.optimizer).scale == 2.0**8


def test_a_loss_that_is_not_finite_moves_only_its_own_scale() -> None:
    training = Training()
    training.scaler.scale(training.param.sum() * math.nan, name="a").backward()
    assert training.finish() == 0.0
    assert training.scaler.outcome(training.optimizer).reason == "loss"
    training.iterate("b", 2.0**9)
    assert training.scales("a", "b") == [SCALE / 2, SCALE / 2]
    for name in "ab":
        training.iterate(name, SCALE)
    assert training.scales("a", "b") == [SCALE, SCALE / 2]


def test_retry_lets_the_right_scale_back_off() -> None:
    training = Training()
    attempts = 0
    for _ in training.scaler.retry(training.optimizer, times=5):
        training.iterate("a", 2.0**8)
        attempts += 1
    assert attempts == 3
    assert training.scales(None, "a") == [SCALE, 2.0**8]
    assert torch.equal(training.param, torch.full((2,), -1.0))


# --- several losses in one iteration -----------------------------------------------------------


CALLS: dict[str, Callable[[Training], Any]] = {
    "step": lambda training: training.scaler.step(training.optimizer),
    "unscale_": lambda training: training.scaler.unscale_(training.optimizer),
    "clip_grad_norm_": lambda training: training.scaler.clip_grad_norm_(training.optimizer, 1.0),
    "accumulate": lambda training: two_names_in_a_block(training),
    "step with a closure": lambda training: training.scaler.step(
        training.optimizer, lambda: two_names(training)
    ),
}


def two_names(training: Training) -> None:
    training.scaler.scale(training.loss(), name="a").backward()
    training.scaler.scale(training.loss()).backward()


def two_names_in_a_block(training: Training) -> None:
    with training.scaler.accumulate(training.optimizer):
        two_names(training)


@fused_or_not
@pytest.mark.parametrize("call", CALLS)
def test_two_names_without_blocks(call: str, fused: bool) -> None:
    training = Training(fused)
    if call in ("step", "unscale_", "clip_grad_norm_"):
        two_names(training)
    with pytest.raises(CallOrderError) as caught:
        CALLS[call](training)
    text = str(caught.value)
    assert text.startswith(f"{call.split()[0]}(SGD): losses of several names have been scaled")
    assert "['a', None]" in text
    assert "with scaler.accumulate(optimizer): scaler.scale(loss, name=...).backward()" in text
    assert torch.equal(training.param, torch.zeros(2))
    # What the message says works at once, in the same iteration.
    training.optimizer.zero_grad()
    training.block("a", factor=0.5)
    training.block(None, factor=0.5)
    assert training.finish() == 1.0
    assert training.iterate("a") == SCALE


@fused_or_not
def test_losses_of_several_names_share_parameters(fused: bool) -> None:
    """Each has the scale that it needs, and the gradients are added up unscaled."""
    training = Training(fused)
    moved = []
    for _ in range(4):
        training.block("a", 2.0**6, factor=0.25)
        training.block("b", 2.0**12, factor=0.75)
        moved.append(training.finish())
    assert moved[2:] == [1.0, 1.0]
    assert training.scales("a", "b") == [2.0**8, SCALE]
    assert [entry.taken for entry in training.scaler.history()] == [True] * 4


@fused_or_not
@pytest.mark.parametrize("order", ["ab", "ba", "aba"])
def test_a_dropped_loss_leaves_the_others_as_they_are(order: str, fused: bool) -> None:
    """There is no average over losses that differ."""
    training = Training(fused)
    for name in order:
        training.block(name, 0.0 if name == "a" else math.inf, factor=0.75)
    assert training.finish() == 0.75


class Wrapper(torch.optim.Optimizer):
    """Passes everything on, as the wrapper of accelerate does."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.inner.param_groups

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return self.inner.step(closure)


@pytest.mark.parametrize("then", ["step", "clip all parameters"])
def test_blocks_of_several_names_and_a_wrapper(then: str) -> None:
    training = Training()
    inner = training.optimizer
    if then == "step":
        training.optimizer = Wrapper(inner)
    training.block("a", factor=0.25)
    training.block("b", factor=0.25)
    training.optimizer = inner
    if then == "clip all parameters":
        assert training.scaler.clip_grad_norm_([training.param], 9.0) == pytest.approx(0.5**0.5)
    assert training.finish() == 0.5


def test_blocks_of_several_names_that_are_all_bad() -> None:
    """Only the scale whose loss overflowed moves."""
    for order in (["a", "b"], ["b", "a"]):
        training = Training()
        for name in order:
            with training.scaler.accumulate(training.optimizer):
                loss = training.loss(0.0) if name == "a" else training.loss() * math.nan
                training.scaler.scale(loss, name=name).backward()
        assert training.finish() == 0.0
        assert training.scales("a", "b") == [SCALE / 2, SCALE]
        assert training.scaler.outcome(training.optimizer).reason == "overflow"


# --- looking, setting, saving ------------------------------------------------------------------


def test_setting_one_scale() -> None:
    training = Training()
    training.iterate("a")
    training.iterate("b")
    training.scaler.update(4.0, name="a")
    assert training.scales(None, "a", "b") == [SCALE, 4.0, SCALE]
    training.scaler.update(torch.tensor(16.0), name="b")
    training.scaler.update(2.0)
    assert training.scales(None, "a", "b") == [2.0, 4.0, 16.0]
    assert training.iterate("a", limit=2.0) == 2.0
    assert torch.equal(training.param, torch.full((2,), -2.0))


def test_changing_the_rule_of_all() -> None:
    training = Training()
    training.iterate("a")
    training.scaler.set_growth_interval(1)
    training.scaler.set_growth_factor(4.0)
    assert training.iterate("a") == 4.0 * SCALE
    assert training.iterate("new") == 4.0 * SCALE
    assert training.iterate(None) == 4.0 * SCALE


@pytest.mark.parametrize("known", [[], ["a", "b"]])
def test_unknown_names(known: list[str]) -> None:
    training = Training()
    for name in known:
        training.iterate(name)
    calls: list[Callable[[str], Any]] = [
        training.scaler.get_scale,
        training.scaler.counts,
        lambda name: training.scaler.update(4.0, name=name),
    ]
    for call in calls:
        with pytest.raises(ValueError, match="no loss named 'c' has been scaled") as caught:
            call("c")
        assert str(caught.value).endswith(f"known names: {known}")
    assert training.scales(None, *known) == [SCALE] * (1 + len(known))


def restored(scaler: GradScaler, how: str) -> GradScaler:
    if how == "pickle":
        return pickle.loads(pickle.dumps(scaler))
    if how == "copy":
        return copy.deepcopy(scaler)
    target = GradScaler(on_skips=lambda report: None)
    if how == "into one that was used":
        other = Training()
        other.scaler = target
        other.iterate("a", 2.0**12)
        other.iterate(None)
    target.load_state_dict(json.loads(json.dumps(scaler.state_dict())))
    return target


def quiet(report: Any) -> None:
    """A function that pickle finds."""


@pytest.mark.parametrize("how", ["pickle", "copy", "into a new one", "into one that was used"])
def test_saving(how: str) -> None:
    """What is restored goes on as the original does."""
    mine = Training(growth_interval=3, on_skips=quiet)
    for name, limit in [("a", 2.0**8), ("a", 2.0**8), ("b", 2.0**12), (None, 2.0**9)]:
        mine.iterate(name, limit)
    theirs = Training()
    theirs.scaler = restored(mine.scaler, how)
    assert theirs.scaler.state_dict() == mine.scaler.state_dict()
    for name, limit in [("a", 2.0**8), ("b", 2.0**10), ("b", 2.0**10), (None, math.inf)] * 3:
        assert theirs.scales(None, "a", "b") == mine.scales(None, "a", "b")
        assert theirs.scaler.counts(name) == mine.scaler.counts(name)
        assert theirs.iterate(name, limit) == mine.iterate(name, limit)
    assert theirs.scaler.state_dict() == mine.scaler.state_dict()


def test_torch_loads_the_scale_of_losses_without_a_name() -> None:
    training = Training()
    training.iterate("a", 2.0**9)
    theirs = torch.amp.GradScaler(DEVICE)
    theirs.load_state_dict(training.scaler.state_dict())
    assert theirs.get_scale() == SCALE


def test_a_scaler_that_is_switched_off_knows_every_name() -> None:
    scaler = GradScaler(enabled=False)
    assert scaler.scale(torch.ones(()), name="a") == 1.0
    assert scaler.get_scale("a") == scaler.get_scale("b") == 1.0
