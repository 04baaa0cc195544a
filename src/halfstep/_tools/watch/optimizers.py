"""The optimizer's side of bad steps: its settings, its state, and weights and losses that grow."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.numbers import number, power
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import members
from halfstep._pytorch import distributed, modes
from halfstep._scaler import GradScaler
from halfstep._scaler.access import is_unscaled
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis
from halfstep._tools.diagnose.several_steps import Step, Usual
from halfstep._tools.line import Line
from halfstep._tools.measure import is_finite
from halfstep._tools.replay.blame import name_in_code, names_in
from halfstep._tools.user_code import user_line

_SETTINGS = frozenset(
    ("lr", "weight_decay", "momentum", "dampening", "eps", "alpha", "betas", "rho", "lambd")
)
"""The numbers in a group that steps compute with; others may be infinite on purpose."""
EXPLODED = 100.0
"""The growth of the largest weight (of 1, if it is smaller) or of the loss that is an explosion."""
_WINDOWS = (1000, 300, 100, 50, 24, 12, 8)
"""The numbers of steps before a bad one in which the loss may have grown, longest first."""


def with_bad_setting(optimizer: Optimizer) -> Diagnosis | None:
    """Return the diagnosis of an optimizer whose next step has a number that is not finite.

    Sync: none; a setting that is a tensor on an accelerator is not read.
    """
    for name, value in _settings(optimizer):
        if not math.isfinite(value):
            of = type(optimizer).__name__
            text = (
                f"{name} of {of} is {value}, and so is every weight after this step: check what "
                f"sets it, such as a schedule past its end: optimizer.param_groups[0][{name!r}]"
            )
            return Diagnosis("data", tensor=f"{name} of {of}", cure=Cure("data", text))
    return None


def still_scaled(optimizer: Optimizer, scaler: GradScaler | None) -> Diagnosis | None:
    """Return the diagnosis of an optimizer that steps with gradients of scaled losses; or None."""
    if scaler is None or is_unscaled(scaler, optimizer):
        return None
    line, of = user_line(), type(optimizer).__name__
    where = "" if line is None else f" ({Path(line.file).name}:{line.number})"
    event = (
        f"the gradients of this step of {of} are still multiplied by the scale "
        f"({power(scaler.get_scale())}){where}"
    )
    text = "scaler.step(optimizer)  # in place of optimizer.step(); then scaler.update()"
    return Diagnosis("optimizer", happened=event, cure=Cure("code", text))


def _settings(optimizer: Optimizer) -> Iterator[tuple[str, float]]:
    for group in _groups(optimizer):
        for name in _SETTINGS.intersection(group):
            value = group[name]
            values: Iterable[Any] = value if isinstance(value, tuple) else (value,)
            for each in values:
                if isinstance(each, Tensor) and each.device.type == "cpu" and each.numel() == 1:
                    yield name, float(each)
                elif isinstance(each, float):
                    yield name, each


def _groups(optimizer: Optimizer) -> list[dict[str, Any]]:
    return [group for member in members(optimizer) for group in member.param_groups]


def _with_bad_state(
    optimizer: Optimizer, model: Callable[[], nn.Module | None], *, is_loaded: bool
) -> Diagnosis | None:
    """Return the diagnosis of an optimizer whose state has inf or NaN before a step."""
    of = type(optimizer).__name__
    which = ", the first one with a state that was loaded or set" if is_loaded else ""
    for weight, state in getattr(optimizer, "state", {}).items():
        for key, value in state.items() if isinstance(state, dict) else ():
            if isinstance(value, Tensor) and not is_finite(value):
                name = names_in(model())(weight) or name_in_code(weight)
                text = (
                    f"load a checkpoint from before {key} went bad: the state of {of} was not "
                    f"finite before this step{which}, which makes {name} so. Without one, "
                    f"begin with a new {of}"
                )
                tensor = f"{key} of {name} in {of}"
                return Diagnosis("data", tensor=tensor, cure=Cure("data", text))
    return None


class _Measured(NamedTuple):
    step: int
    amax: float


class Growth:
    """Growth of the losses, and of the weights, measured before steps 1, 2, 4, 8 ..."""

    def __init__(self) -> None:
        self.was_explained = False  # whether a step was explained by it
        self._before: weakref.WeakKeyDictionary[Optimizer, _Measured] = weakref.WeakKeyDictionary()
        self._states: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._losses: deque[tuple[int, float, Line | None]] = deque(maxlen=_WINDOWS[0])
        # The ids of the gradients in a step that was measured, until the next one, and the
        # optimizers by what was seen of their gradients between two such steps.
        self._stepped: weakref.WeakKeyDictionary[Optimizer, list[int]] = weakref.WeakKeyDictionary()
        self._cleared: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._adding: weakref.WeakSet[Optimizer] = weakref.WeakSet()

    def before_backward(self, *, adds: bool) -> None:
        """Note the optimizers whose gradients are zero, or whose pass does not add to them.

        Sync: one for each optimizer without such a pass yet, in the step after a measured one.
        """
        for optimizer in [*self._stepped]:
            if not adds or not _largest(_gradients(optimizer)) > 0:
                self._cleared.add(optimizer)
                del self._stepped[optimizer]

    def note_loss(self, loss: float, step: int, line: Line | None) -> None:
        """Note the loss of a step; of several of a line, the one that is farthest from 0 counts."""
        if self._losses and self._losses[-1][::2] == (step, line):
            loss = max(loss, self._losses.pop()[1], key=abs)
        self._losses.append((step, loss, line))

    def usual(
        self, step: int, line: Line | None, max_norm: float | None, before: Step | None
    ) -> Usual:
        """Return what is known of the steps before one: losses of its line, unless they are few."""
        is_alone = len({at for _, _, at in self._losses}) == 1
        last = [loss for _, loss, at in self._losses if is_alone or at == line][-50:]
        loss = size = None
        if len(last) >= 3:
            loss, size = median(last), median(map(abs, last))
        return Usual(loss, size, max_norm, before, partial(self.explain, step=step))

    def before_step(
        self, optimizer: Optimizer, step: int, model: Callable[[], nn.Module | None]
    ) -> Diagnosis | None:
        """Measure the largest weight; return the diagnosis of a state with inf or NaN.

        Sync: one for each tensor of the state in steps 1, 2, 4, 8 ... and after another state was
        loaded, else none.
        """
        known, state = self._before.get(optimizer), id(getattr(optimizer, "state", None))
        is_loaded, self._states[optimizer] = self._states.get(optimizer) != state, state
        last = self._stepped.pop(optimizer, None)
        if last is not None:
            is_same = last == [*map(id, _gradients(optimizer))]
            (self._adding if is_same else self._cleared).add(optimizer)
        if known is not None and step < 2 * known.step and not is_loaded:
            return None
        if optimizer not in self._cleared:
            self._stepped[optimizer] = [*map(id, _gradients(optimizer))]
        amax = _largest(parameters(optimizer))
        if math.isfinite(amax):
            self._before[optimizer] = _Measured(step, amax)
        with modes.unseen_by_modes(), suppress(Exception):  # as of a subclass
            return _with_bad_state(optimizer, model, is_loaded=is_loaded)
        return None

    def explain(self, found: Diagnosis, step: int) -> Diagnosis | None:
        """Return the diagnosis of a step whose weights have exploded or whose loss grew, or None.

        A clamp hides that, and a wider dtype delays it. Sync: one for each optimizer.
        """
        by_losses = self._by_losses(found)
        explained = by_losses
        if by_losses is not None or found.verdict == "maths":
            explained = self._by_weights(found, step, by_losses) or by_losses
        return explained and replace(explained, verdict="growth")

    def _by_weights(
        self, found: Diagnosis, step: int, by_losses: Diagnosis | None
    ) -> Diagnosis | None:
        for optimizer, before in self._before.items():
            amax = _largest(parameters(optimizer))
            needed = EXPLODED if by_losses is None else EXPLODED / 10
            if not amax > needed * max(before.amax, 1.0):
                continue
            groups = _groups(optimizer)
            rates = [float(group["lr"]) for group in groups if "lr" in group]
            begun = [float(group["initial_lr"]) for group in groups if "initial_lr" in group]
            name = type(optimizer).__name__
            event = (
                f"the run diverges: the largest weight of {name} grew from {number(before.amax)} "
                f"before step {before.step} to {number(amax)} before step {step}"
                + (f", at a learning rate of {number(max(rates))}" if rates else "")
                + (
                    f", raised from {number(max(begun))}"
                    if begun and max(rates) > max(begun)
                    else ""
                )
            )
            growth = (amax / max(before.amax, 1.0)) ** (1 / max(step - before.step, 1))
            text = of_settings(optimizer)
            if optimizer in self._adding and optimizer not in self._cleared:
                event += "; its gradients were not zeroed between the steps that were checked"
                text = (
                    f"optimizer.zero_grad()  # after each step of {name}, whose gradients now add "
                    "up over all steps"
                )
            if not text and type(optimizer) is torch.optim.SGD and 2 < growth < 1000:
                text = (  # of a loss near a parabola, whose curvature c multiplies by 1 - lr * c
                    f"lower the learning rate of SGD to {number(max(rates) / (growth + 1))}: at "
                    f"{number(max(rates))} its largest weight grew {number(growth)}-fold a step"
                )
            text = text or (
                f"lower the learning rate of {name}, or clip the gradients before its step:\n"
                "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
            )
            if by_losses is not None:
                event = f"{by_losses.happened}; {event.partition(': ')[2]}"
            return replace(found, happened=event, cure=Cure("code", text))
        return None

    def _by_losses(self, found: Diagnosis) -> Diagnosis | None:
        bad = found.bad
        if bad is None or bad.needs is None or bad.limit is None or bad.needs <= bad.limit:
            return None  # not an overflow
        lines = dict.fromkeys(line for _, _, line in self._losses)
        series = [[(i, loss) for i, loss, at in self._losses if at == line] for line in lines]
        windows = (losses[-length:] for losses in series for length in _WINDOWS)
        window = next((w for w in windows if _grew([loss for _, loss in w], bad.limit)), None)
        if window is None:
            return None
        (first, low), (last, high) = window[0], window[-1]
        dtype = "its dtype" if bad.output is None else bad.output.dtype
        event = (
            f"the loss {'fell' if high < 0 else 'grew'} from {number(low)} in step {first} to "
            f"{number(high)} in step {last}, until {bad.name} overflowed {dtype}"
        )
        text = (
            "stop the growth; a wider dtype or a clamp only delays it. Check what is computed from "
            "the model's own results: a target needs a discount below 1 or a target network, a "
            "state that is carried on needs a norm. Then the learning rate"
        )
        if high < 0:
            text = (
                "bound the loss from below; a wider dtype only delays the overflow. A critic needs "
                "a limit, such as p.data.clamp_(-0.1, 0.1) after each step, spectral_norm or a "
                "gradient penalty; a likelihood needs a smallest variance"
            )
        return replace(found, happened=event, cure=Cure("code", text))


def _grew(losses: list[float], limit: float) -> bool:
    """Return whether losses moved away from 0 from quarter to quarter, a hundredfold in all.

    Tenfold is enough below 0, if they came as near to the limit of a dtype as a hundredth of it.
    """
    sizes = [*map(abs, losses)]
    if len(sizes) < _WINDOWS[-1] or sizes[-1] > EXPLODED * sizes[-2]:  # few, or a single jump
        return False
    size = len(sizes) // 4
    starts = range(0, 4 * size, size)
    quarters = [median(sizes[start : start + size]) for start in starts]
    is_falling = max(losses) < 0 and quarters[3] > limit / 100
    needed = EXPLODED / 10 if is_falling else EXPLODED
    return all(a < b for a, b in pairwise(quarters)) and quarters[3] > needed * quarters[0]


def of_settings(optimizer: Optimizer) -> str:
    """Return the cure of a setting that makes weights larger; empty if none is the cause.

    A weight decay or ``maximize`` may, and LBFGS without a line search takes steps of any length.
    """
    if type(optimizer) is torch.optim.LBFGS and not _groups(optimizer)[0]["line_search_fn"]:
        return 'LBFGS(..., line_search_fn="strong_wolfe")  # limits its steps; or a lower lr'
    is_of_sgd = type(optimizer) is torch.optim.SGD
    for group in _groups(optimizer):
        if group.get("maximize"):
            return f"{type(optimizer).__name__}(..., maximize=False)  # True lets the loss grow"
        rate, decay = group.get("lr"), group.get("weight_decay")
        is_direct = is_of_sgd or group.get("decoupled_weight_decay", False)
        if is_direct and isinstance(rate, float) and decay and rate * decay > 2:
            return (
                f"lower weight_decay: {decay:g} at lr={rate:g} multiplies each weight by "
                f"1 - {rate:g} * {decay:g} = {1 - rate * decay:g} in a step. Below 2 / lr = "
                f"{2 / rate:g} weights shrink; weight_decay=0.01 is usual"
            )
    return ""


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [weight.grad for weight in parameters(optimizer) if weight.grad is not None]


def _largest(weights: list[Tensor]) -> float:
    """Return the largest magnitude on this rank; NaN if there is a NaN, or if it is unknown."""
    with modes.unseen_by_modes(), torch.no_grad(), suppress(Exception):  # as of a subclass
        parts = [distributed.local_part(weight.detach()) for weight in weights]
        sizes = [part.abs().amax().float().cpu() for part in parts if part.numel()]
        return float(torch.stack(sizes).amax()) if sizes else math.nan
    return math.nan
