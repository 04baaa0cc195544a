"""Trial of a change over several steps of training, in one replay, which is undone afterwards."""

from __future__ import annotations

import gc
import inspect
import math
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._autocast import HALVES
from halfstep._common.numbers import listed, number, things
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import members
from halfstep._pytorch import modes, optim
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.measure import bytes_of, is_finite
from halfstep._tools.replay.observer import OpObserver
from halfstep._tools.replay.replay import StepRun, own_time

Change = Callable[[], AbstractContextManager[object]]
"""A function that returns a context in which the user's code is changed."""
Standardise = Callable[[], tuple[str, Change | None]]
"""A function that returns the cure that standardises inputs, and the change, if they are large."""
NOT_LARGE: Standardise = lambda: ("", None)  # noqa: E731
Step = Callable[[], object]
LEAST_STEPS, MOST_STEPS = 5, 20
"""The least number of steps that show whether a loss falls, and the largest number."""
LARGEST = 2**31  # the largest size in bytes of all weights that are moved
FAR = 10.0  # the factor by which the loss of a batch may exceed the usual one of the run
FAR_GRADIENT = 100.0  # the factor by which the first gradient may exceed that of the step before
_SMALL_LOSS = 1e-3
_RATE = 0.01  # the length of a small step, as a share of the norm of a parameter
_LEAST_SIZE = 0.01
"""The size of the entries of a parameter that is smaller, such as a bias of zeros."""


@dataclass(frozen=True)
class Usual:
    """What is known of the steps of a run before a bad one.

    ``loss`` and ``size`` are the median of the last losses, if they are three or more, and of their
    magnitudes; ``largest`` is the largest magnitude of all.
    """

    loss: float | None = None
    size: float | None = None
    largest: float = 0.0
    max_norm: float | None = None  # to which the run clips gradients
    step: Step | None = None  # repeats the calls of the step before
    steppers: tuple[Optimizer, ...] = ()  # the optimizers that step after this loss, if known
    # Returns the diagnosis of a step in another way, as of weights that grew, or None.
    explain: Callable[..., Diagnosis | None] = lambda _, **__: None
    standardise: Standardise = NOT_LARGE
    # Returns whether a diagnosis of the same place was reported, which nobody needs cured again.
    is_known: Callable[[Diagnosis], bool] = lambda _: False

    def is_like(self, loss: float) -> bool:
        """Return whether a loss is like those of the run; in the first step it need be no giant."""
        if self.loss is None or self.size is None:
            return abs(loss) < FAR**8
        return abs(loss - self.loss) <= FAR * max(self.size, _SMALL_LOSS)


UNKNOWN = Usual()


class _NotFinite(Exception):  # noqa: N818  (control flow, not an error)
    """A loss in an optimizer's step is inf or NaN."""


class SeveralSteps(OpObserver):
    """Steps on the batch of a bad step, in turn with the batch before it if that is known.

    The optimizers of the weights take them, with the clipping of the run; one that needs a closure
    is given one, and starts without a state. A small step of gradient descent, by which neither the
    scale nor the size of the loss matters, stands in for one that is not known.
    """

    sees_ops = False

    def __init__(
        self,
        change: Change,
        usual: Usual,
        seconds: float,
        optimizers: Callable[[], list[Optimizer]],
        *,
        steps_itself: bool,
    ) -> None:
        self._change, self._usual, self._steps_itself = change, usual, steps_itself
        self._all_optimizers = optimizers  # returns all that there are
        self._end = own_time() + seconds
        self._owners: list[Optimizer] | None = None
        self._seen: list[float] = []
        self._scaled: list[float] = []  # losses since the last root
        self._loss: float | None = None
        self._run = StepRun()
        self._gradients: dict[int, tuple[Tensor, Tensor]] = {}
        self.losses: list[float] = []  # of the batch, before each step on it and after the last
        self.others: list[float] = []  # of the batch before
        self.num, self.fails_at = 0, 0  # steps; the number of the one that went bad
        self.norm, self.norm_before = math.nan, math.nan  # of the first gradient, and the last one
        self.takers: dict[int, str] = {}  # names of the optimizers
        self.why_not = ""  # if no step was taken, or too few

    # --- events -----------------------------------------------------------------------------------

    def see_loss(self, loss: Tensor) -> None:
        if loss.numel() == 1:
            self._scaled.append(float(loss.detach()))

    def see_root(self, root: Tensor) -> None:
        """Note a root; the last one is the loss, before it was scaled, and others may be inner."""
        self.see_loss(root)
        self._loss = self._scaled[0] if self._scaled else self._loss
        self._seen, self._scaled = [*self._seen, *self._scaled], []

    def see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        self._gradients[id(leaf)] = leaf, gradient

    def see_step(self, optimizer: Optimizer) -> None:
        self.takers[id(optimizer)] = type(optimizer).__name__
        if self._steps_itself and not all(map(is_finite, parameters(optimizer))):
            self._seen.append(math.nan)

    # --- steps ------------------------------------------------------------------------------------

    def take(self, step: Step, run: StepRun) -> None:
        """Take steps until one goes bad, none can be taken, or the time is over."""
        self._run = run
        batches, before = [(step, self.losses)], self._usual.step
        if before is not None and self._is_finite(before, self.others):
            batches.append((before, self.others))
            self.norm_before = self._norm()
        while self.num < MOST_STEPS and own_time() < self._end:
            now, losses = batches[self.num % len(batches)]
            if not self._is_finite(now, losses):
                self.fails_at = self.num and self.num + 1
                is_seen = not all(map(math.isfinite, self._seen))
                self.why_not = f"it {'is not finite again' if is_seen else 'has no loss to follow'}"
                return
            if self._steps_itself and not losses:
                self.why_not = "its loss was not followed"
                return
            try:
                if not self._advance(now):
                    return
            except _NotFinite:
                self.num = self.fails_at = self.num + 1
                return
            self.num += 1
        late = own_time() > self._end
        self.why_not = f"the time was over after {things(self.num, 'step')}"
        if self.num and not all(self._is_finite(*each) for each in batches[: 1 if late else 2]):
            self.fails_at = self.num + 1

    def _is_finite(self, step: Step, losses: list[float]) -> bool:
        """Run a step without that of an optimizer; note its loss, return whether it is finite."""
        for leaf, _ in self._gradients.values():
            leaf.grad = None
        self._seen, self._scaled, self._loss, self._gradients = [], [], None, {}
        with self._change():
            step()
        if not all(map(math.isfinite, self._seen)):
            return False
        losses += [] if self._loss is None else [self._loss / self.factor]
        return bool(self._seen or self.takers)

    @property
    def factor(self) -> float:
        """The number by which the code itself multiplies a loss, if a change is one of it."""
        return 1.0 if self._run.scale is None else self._run.by_hand or 1.0

    def _norm(self) -> float:
        with modes.unseen_by_modes(), torch.no_grad():
            norms = [float(grad.float().norm()) for _, grad in self._gradients.values()]
            return math.hypot(*norms) / ((self._run.scale or 1.0) * self._run.backoff)

    def _advance(self, now: Step) -> bool:
        """Take the step, after ``now`` has made gradients; return whether one was taken."""
        if self._steps_itself:
            return True
        leaves = [leaf for leaf, _ in self._gradients.values()]
        self.why_not = "no weight of it can be moved"
        if sum(map(bytes_of, leaves)) > LARGEST:  # a replay copies them, and states
            self.why_not = f"its weights take more than {LARGEST >> 30} GiB"
            return False
        run, norm = self._run, self._norm()
        scale = (run.scale or 1.0) * run.backoff
        self.norm = self.norm if self.num else norm
        if run.scale is not None and not math.isfinite(norm):
            run.backoff /= 16  # a scaler skips it
            return scale > 1
        if self._owners is None:
            steppers = self._usual.steppers
            self._owners = _optimizers_of(leaves, self._all_optimizers(), steppers)
        limit = self._usual.max_norm
        factor = (1.0 if limit is None or norm <= limit else limit / norm) / scale
        with torch.no_grad():
            if self._step_optimizers(factor, now):
                return True
            moves = [_move(leaf, gradient) for leaf, gradient in self._gradients.values()]
            return any(moves)

    def _step_optimizers(self, factor: float, now: Step) -> bool:
        def closure() -> Tensor:
            if own_time() > self._end:
                raise TimeoutError
            with torch.enable_grad():
                if not self._is_finite(now, []):
                    raise _NotFinite
            return torch.tensor(self._loss)

        try:
            for leaf, _ in self._gradients.values():
                if factor != 1 and leaf.grad is not None:
                    leaf.grad = leaf.grad * factor
            for optimizer in self._owners or ():
                self.undo.note_optimizer(optimizer)
                _widen(optimizer)
                own = inspect.signature(type(optimizer).step).parameters.get("closure")
                is_needed = own is not None and own.default is inspect.Parameter.empty
                given: list[Any] = [closure] if is_needed else []
                if given:
                    self.takers[id(optimizer)] = type(optimizer).__name__
                if given and not self.num:  # the step that went bad may have left half a state
                    optimizer.state.clear()
                optimizer.step(*given)
                if not self.takers:  # the step inside of a guard is not seen
                    self.takers[id(optimizer)] = type(optimizer).__name__
        except _NotFinite:
            raise
        except Exception:  # it cannot be repeated
            self._owners = []
            self.takers.clear()
        return bool(self._owners)


def all_optimizers() -> list[Optimizer]:
    """Return all optimizers of the process; the search takes as long as several replays."""
    found = (each for each in gc.get_objects() if issubclass(type(each), Optimizer))
    return [each for each in found if optim.is_whole(each)]


def _optimizers_of(
    leaves: Iterable[Tensor], optimizers: list[Optimizer], steppers: Iterable[Optimizer]
) -> list[Optimizer]:
    """Return the optimizers of weights that step them, if that is known; the outer ones of two."""
    wanted = set(map(id, leaves))
    found = [each for each in optimizers if wanted.intersection(map(id, parameters(each)))]
    inner = {id(value) for each in found for value in vars(each).values()}
    outer = [each for each in found if id(each) not in inner]
    known = set(map(id, steppers))
    stepping = [each for each in outer if known & {id(each), *map(id, vars(each).values())}]
    return stepping or outer


def _widen(optimizer: Optimizer) -> None:
    """Cast the state of weights that a change has cast to float32, as if they always had been."""
    for member in members(optimizer):
        for weight, state in getattr(member, "state", {}).items():
            for key, value in state.items():
                is_narrow = isinstance(value, Tensor) and value.dtype in HALVES
                if is_narrow and weight.dtype is torch.float32:
                    state[key] = value.float()


def _move(leaf: Tensor, gradient: Tensor) -> bool:
    """Move a parameter by a small step; entries of its gradient that are not finite do not move."""
    if not isinstance(leaf, nn.Parameter):
        return False
    with modes.unseen_by_modes():
        direction = gradient.float().nan_to_num(0.0, 0.0, 0.0)
        size = max(float(leaf.detach().float().norm()), _LEAST_SIZE * leaf.numel() ** 0.5)
        norm = float(direction.norm())
    leaf.add_(direction * (-_RATE * size / norm if norm else 0.0))
    return True


# --- what they show -------------------------------------------------------------------------------


def failures_of(steps: SeveralSteps) -> list[str]:
    """Return why a run with a change does not train; empty if it may."""
    found = []
    if steps.fails_at:
        what = "loss is" if steps.losses else "weights are"
        found.append(f"the {what} inf or NaN in step {steps.fails_at} with it")
    for losses, of in ((steps.losses, "this batch"), (steps.others, "the batch before it")):
        if losses and losses[-1] - losses[0] > FAR * max(abs(losses[0]), _SMALL_LOSS):
            found.append(f"the loss of {of} rises from {number(losses[0])} to {number(losses[-1])}")
    return found


def signs_of(steps: SeveralSteps, usual: Usual) -> list[str]:
    """Return how the first step with a change differs from those before it."""
    found = []
    if math.inf > steps.norm > FAR_GRADIENT * steps.norm_before > 0:
        times = number(steps.norm / steps.norm_before)
        found.append(f"the gradient of the first step with it is {times} times the last one")
    if steps.losses and not usual.is_like(steps.losses[0] * steps.factor):
        text = f"the loss of this batch is {number(steps.losses[0])} with it"
        if usual.loss is not None:
            text += f"; those before it were about {number(usual.loss / steps.factor)}"
        found.append(text)
    return found


def name_of(steps: SeveralSteps) -> str:
    """Return the number of steps, who took them, and on which batches."""
    takers = Counter(steps.takers.values()).items()
    names = [f"{num} {name} optimizers" if num > 1 else name for name, num in takers]
    of = f" of {listed(names)}" if names else ""
    both = " on this batch (in turn with the one before)" if steps.others else " on this batch"
    return f"{things(steps.num, 'step' if of else 'small step')}{of}{both if steps.losses else ''}"
