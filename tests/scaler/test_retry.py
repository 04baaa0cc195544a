"""scaler.retry(optimizer): the same batch again, as if the attempts before had not been.

The reference is training in float32 without a scaler and without repetitions. All scales are powers
of two, so that everything must be the same bit for bit: parameters, buffers and random numbers.
"""

import math
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from tests.scaler.containers import Wrapper
from tests.training import assert_same, batches, closure_of, fused_or_not

from halfstep._scaler import GradScaler
from halfstep._scaler.scale_state import Static
from halfstep.errors import CallOrderError


class Limited(torch.autograd.Function):
    """Changes nothing, but gradients above a limit overflow, as float16 ones would."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, limit: float) -> torch.Tensor:
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return (grad * math.inf if grad.abs().max() > ctx.limit else grad), None


class Buffered(torch.nn.Module):
    """Changes buffers in all the ways that there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("written", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.register_buffer("made", None)
        self.register_buffer("dropped", torch.ones(3))
        self.register_buffer("expanded", torch.ones(1).expand(3))
        self.register_buffer("temporary", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            mean = x.detach().mean(0)
            self.written.add_(mean)
            self.replaced = 0.5 * self.replaced + mean
            if "late" not in self._buffers:
                self.register_buffer("late", mean)
            self.late += 1.0
            self.made = mean if self.made is None else self.made + mean
            if self.dropped is not None:
                self.dropped = None
                self.temporary.add_(1.0)
        changed = self.written + self.replaced + self.made * self.temporary + self.late
        return x + changed + self.expanded


class Training:
    """Everything that may differ when a batch is run again."""

    def __init__(self, fused: bool = False, **kwargs: Any) -> None:
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        self.model = torch.nn.Sequential(
            Buffered(),
            torch.nn.Linear(3, 8),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            torch.nn.Linear(8, 1),
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1, fused=fused)
        kwargs = {"on_skips": lambda report: None, "init_scale": 2.0**10} | kwargs
        self.scaler = GradScaler(module=self.model, **kwargs)
        self.masks: list[torch.Tensor] = []
        self.model[3].register_forward_hook(lambda module, x, y: self.masks.append(y == 0))

    def loss(self, batch: torch.Tensor, limit: float = math.inf) -> torch.Tensor:
        factor = random.random() + np.random.rand()
        return Limited.apply(self.model(batch).square().mean() * factor, limit)

    def attempts(self, limits: list[float], times: int = 20) -> list[int]:
        """One batch for each limit; returns the number of attempts."""
        attempts = []
        for batch, limit in zip(batches(len(limits), 6, 3), limits, strict=True):
            for attempt in self.scaler.retry(self.optimizer, times):
                assert all(param.grad is None for param in self.model.parameters()) or not attempt
                self.iterate(batch, limit)
            attempts.append(attempt + 1)
            self.optimizer.zero_grad()
        return attempts

    def iterate(self, batch: torch.Tensor, limit: float) -> None:
        self.scaler.scale(self.loss(batch, limit)).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def plain(self, count: int) -> None:
        for batch in batches(count, 6, 3):
            self.optimizer.zero_grad()
            self.loss(batch).backward()
            self.optimizer.step()

    def everything(self) -> list[Any]:
        random_numbers = (
            torch.rand(3),
            torch.tensor(random.random()),
            torch.tensor(np.random.rand()),
        )
        return [*self.model.parameters(), *self.model.buffers(), *random_numbers]


def with_scaler(**kwargs: Any) -> tuple[Any, Any, GradScaler]:
    param = torch.nn.Parameter(torch.zeros(2))
    kwargs = {"on_skips": lambda report: None, "init_scale": 2.0**10} | kwargs
    return param, torch.optim.SGD([param], lr=1.0), GradScaler(**kwargs)


def iterate(param: Any, optimizer: Any, scaler: GradScaler, limit: float = math.inf) -> None:
    scaler.scale(Limited.apply(param.sum(), limit)).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()


# --- a batch is run again ----------------------------------------------------------------------


@fused_or_not
def test_as_if_it_had_overflowed_never(fused: bool) -> None:
    mine = Training(fused)
    assert mine.attempts([math.inf, 2.0**8, 2.0**8, 2.0**5]) == [1, 3, 1, 4]
    mine_at_the_end = mine.everything()
    theirs = Training(fused)
    theirs.plain(4)
    theirs_at_the_end = theirs.everything()
    assert_same(mine_at_the_end, theirs_at_the_end)
    assert mine.model[2].num_batches_tracked == 4
    for number, attempts in [(1, [1, 2, 3]), (3, [5, 6, 7, 8])]:
        for attempt in attempts:
            assert torch.equal(mine.masks[attempt], theirs.masks[number])
    assert not torch.equal(theirs.masks[1], theirs.masks[2])
    assert mine.scaler.get_scale() == 2.0**5
    assert mine.scaler.counts() == (4, 5, 0, None)
    taken = "".join(".t"[entry.taken] for entry in mine.scaler.history())
    assert taken == "t" + "..t" + "t" + "...t"


@fused_or_not
@pytest.mark.parametrize(("times", "attempts"), [(0, 1), (1, 2), (2, 3), (3, 4), (9, 4)])
def test_at_most_so_many_times(fused: bool, times: int, attempts: int) -> None:
    """The fourth attempt is good; if it does not come to that, the batch is lost."""
    mine = Training(fused)
    assert mine.attempts([2.0**7], times) == [attempts]
    assert len(mine.masks) == attempts
    theirs = Training(fused)
    if attempts == 4:
        theirs.plain(1)
    assert_same(mine.model.parameters(), theirs.model.parameters())
    assert mine.scaler.outcome(mine.optimizer).taken == (attempts == 4)


@pytest.mark.parametrize("kind", ["closure", "parts", "wrapper"])
def test_with_other_features(kind: str) -> None:
    param, optimizer, scaler = with_scaler()
    retried = Wrapper(optimizer) if kind == "wrapper" else optimizer
    attempts = 0
    for _ in scaler.retry(retried, times=5):
        attempts += 1
        if kind == "closure":
            loss = lambda: Limited.apply(param.sum(), 2.0**8)  # noqa: E731
            scaler.step(optimizer, closure_of(scaler, loss))
        elif kind == "parts":
            for _ in range(2):
                scaler.scale(Limited.apply(param.sum() / 2, 2.0**8)).backward()
            scaler.step(optimizer)
        else:
            scaler.scale(Limited.apply(param.sum(), 2.0**8)).backward()
            scaler.step(optimizer)
        scaler.update()
    assert attempts == 3
    assert torch.equal(param, torch.full((2,), -1.0))


# --- and when it is not ------------------------------------------------------------------------


def bad_loss(param: Any) -> torch.Tensor:
    return param.sum() * math.nan


def overflow(param: Any) -> torch.Tensor:
    return Limited.apply(param.sum(), 0.0)


@pytest.mark.parametrize(
    ("make", "kwargs", "attempts", "reason"),
    [
        (bad_loss, {}, 11, "loss"),
        (bad_loss, {"init_scale": 1.0, "min_scale": 1.0}, 1, "loss"),
        (bad_loss, {"schedule": Static()}, 1, "loss"),
        (overflow, {"init_scale": 1.0, "min_scale": 1.0}, 1, "non-finite down to min_scale"),
        (overflow, {"init_scale": 4.0, "min_scale": 1.0}, 3, "non-finite down to min_scale"),
        (overflow, {"schedule": Static()}, 1, "overflow"),
        (torch.sum, {}, 1, None),
    ],
)
def test_a_batch_that_no_smaller_scale_helps(make, kwargs, attempts, reason):
    param, optimizer, scaler = with_scaler(**kwargs)
    iterate(param, optimizer, scaler)
    count = 0
    for _ in scaler.retry(optimizer, times=10):
        scaler.scale(make(param)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        count += 1
    assert count == attempts
    assert scaler.outcome(optimizer).reason == reason


@pytest.mark.parametrize("leave", ["raise", "break"])
def test_leaving_the_loop(leave: str) -> None:
    param, optimizer, scaler = with_scaler()

    def loop() -> Iterator[int]:
        for attempt in scaler.retry(optimizer, times=5):
            yield attempt
            if attempt == 1:
                if leave == "raise":
                    raise KeyboardInterrupt
                break
            iterate(param, optimizer, scaler, limit=1.0)

    try:
        assert list(loop()) == [0, 1]
    except KeyboardInterrupt:
        assert leave == "raise"
    assert scaler.get_scale() == 2.0**9
    iterate(param, optimizer, scaler)
    assert torch.equal(param, torch.full((2,), -1.0))


@pytest.mark.parametrize("stepped_before", [False, True])
@pytest.mark.parametrize("forgotten", ["step", "update", "both", "another optimizer"])
def test_the_loop_forgets_something(forgotten: str, stepped_before: bool) -> None:
    param, optimizer, scaler = with_scaler()
    other = torch.optim.SGD([param], lr=0.0)
    if stepped_before:
        iterate(param, optimizer, scaler)
    before = param.detach().clone()
    words = r"retry\(SGD\): the loop must call scaler.step\(optimizer\) and scaler.update\(\)"
    attempts = scaler.retry(optimizer)
    assert next(attempts) == 0
    scaler.scale(param.sum()).backward()
    if forgotten in ("update", "another optimizer"):
        scaler.step(other if forgotten == "another optimizer" else optimizer)
    if forgotten == "another optimizer":
        scaler.update()
    with pytest.raises(CallOrderError, match=words):
        next(attempts)
    if forgotten != "another optimizer":
        if forgotten != "update":
            scaler.step(optimizer)
        scaler.update()
        assert torch.equal(param, before - 1.0)
    optimizer.zero_grad()
    for _ in scaler.retry(optimizer):
        iterate(param, optimizer, scaler)
    assert torch.equal(param, before - (1.0 if forgotten == "another optimizer" else 2.0))


@pytest.mark.parametrize(
    ("times", "error", "words"),
    [
        (-1, ValueError, "times is -1: it must lie between 0 and"),
        (True, TypeError, r"times is True \(bool\): pass a whole number"),
        (2.0, TypeError, r"times is 2.0 \(float\): pass a whole number"),
        (None, TypeError, "times is None"),
    ],
)
def test_wrong_times(times: Any, error: type[Exception], words: str) -> None:
    _, optimizer, scaler = with_scaler()
    with pytest.raises(error, match=words):
        scaler.retry(optimizer, times)
