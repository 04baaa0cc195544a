"""Weights and losses that grow from step to step, and what makes them grow."""

from __future__ import annotations

import ast
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise, starmap
from statistics import median
from typing import NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.numbers import number
from halfstep._gradients.gradients import parameters
from halfstep._pytorch import modes
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis, pasted
from halfstep._tools.diagnose.several_steps import NOT_LARGE, Standardise, Usual
from halfstep._tools.line import Line, line_text
from halfstep._tools.replay.kept_calls import KeptCall
from halfstep._tools.source import Source
from halfstep._tools.user_code import variable_of
from halfstep._tools.watch.bad_steps import largest
from halfstep._tools.watch.carried import Carried
from halfstep._tools.watch.inputs import standardise
from halfstep._tools.watch.optimizers import (
    first_rate,
    of_high_rate,
    of_negative_rate,
    of_raised_rate,
    of_settings,
    rate_of,
    with_bad_state,
)

EXPLODED = 100.0
"""The growth of the largest weight (of 1, if it is smaller) or of the loss that is an explosion."""
_THROWN = 4.0
"""That of a weight that a step has thrown, by still-scaled gradients or from call to call."""
_WINDOWS = (1000, 300, 100, 50, 24, 12, 8)
"""The numbers of steps before a bad one in which the loss may have grown, longest first."""
OF_CRITIC = (
    "A critic, whose loss is a mean of its outputs, needs a limit: "
    "for p in critic.parameters(): p.data.clamp_(-0.1, 0.1) after each of its steps, spectral_norm "
    "or a gradient penalty; a lower learning rate only delays the growth"
)
OF_LIKELIHOOD = (
    "A likelihood needs a smallest variance, such as log_sigma.clamp_min(-5).exp() or "
    "softplus(sigma) + 1e-3; a KL divergence is at least 0: where it is below, its sign is wrong"
)
_LOGARITHMS = {"log", "log2", "log10", "log1p", "logsumexp", "logdet", "exp", "exp2", "rsqrt"}


def _bound_of(calls: Sequence[KeptCall]) -> str:
    """Return how a loss that calls compute is bounded from below."""
    names = {call.name.strip("_").lower() for call in calls}
    if _LOGARITHMS & names or any("nll" in name for name in names):
        return OF_LIKELIHOOD
    return OF_CRITIC if {"mean", "sum"} & names else f"{OF_LIKELIHOOD}. {OF_CRITIC}"


def _of_falling_term(calls: Sequence[KeptCall], losses: Sequence[float]) -> Cure | None:
    """Return the clamp of what the last difference of calls takes from a loss, or None."""
    limit = number(10 * max([1.0, *map(abs, losses[:1])]))
    for call in reversed(calls):
        is_scalar = any(not each.dim() for each in call.still_there() or ())
        match call.at.node if call.at and is_scalar else None:
            case ast.BinOp(op=ast.Sub(), right=term) | ast.UnaryOp(op=ast.USub(), operand=term):
                source = Source(call.at.code.co_filename)  # type: ignore[union-attr]
                edits = source.put(term, f"{{}}.clamp_max({limit})") and source.edited()
                remark = (
                    f"bound the loss from below: it fell, and takes away `{ast.unparse(term)}`, "
                    f"which gets no gradient above {limit} then"
                )
                return pasted(edits, remark) if edits else None
    return None


class _Measured(NamedTuple):
    step: int
    amax: float  # of the weights
    rate: float

    def growth(self, now: _Measured) -> float:
        """Return by how much the largest weight (of 1, if it is smaller) grew in each step."""
        return math.pow(now.amax / max(self.amax, 1.0), 1 / max(now.step - self.step, 1))


class Growth:
    """Growth of the losses, and of the weights, measured before steps 1, 2, 4, 8 ..."""

    def __init__(self, carried: Carried) -> None:
        self._carried = carried
        self.was_explained = False  # whether a step was explained by it
        self._explained = math.inf  # the largest weight or loss of that step
        # Optimizers that took still-scaled gradients, with their largest weight before that.
        self._misled: weakref.WeakKeyDictionary[Optimizer, float] = weakref.WeakKeyDictionary()
        self._measured: weakref.WeakKeyDictionary[Optimizer, list[_Measured]] = (
            weakref.WeakKeyDictionary()
        )
        self._states: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._losses: deque[tuple[int, float, Line | None]] = deque(maxlen=_WINDOWS[0])
        # The lines of backward passes since the last step, and the optimizers that step after each
        # in its running iteration, and in the one before it.
        self._lines: set[Line | None] = set()
        self._has_stepped = False
        self._steppers: dict[Line | None, tuple[weakref.WeakSet[Optimizer], ...]] = {}
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
            if not adds or not largest(_gradients(optimizer)) > 0:
                self._cleared.add(optimizer)
                del self._stepped[optimizer]

    def note_loss(
        self, loss: float, step: int, line: Line | None, owner: Optimizer | None = None
    ) -> None:
        """Note a loss, of ``owner``'s closure if given; the farthest from 0 of a line counts."""
        if owner is not None:
            self._note_stepper(owner, line)
        else:
            self._lines = {line} if self._has_stepped else self._lines | {line}
            self._has_stepped = False
        if self._losses and self._losses[-1][::2] == (step, line):
            loss = max(loss, self._losses.pop()[1], key=abs)
        self._losses.append((step, loss, line))

    def note_step(self, optimizer: Optimizer) -> None:
        """Note a step without a closure, which is one after the losses since the last step."""
        self._has_stepped = True
        for line in self._lines:
            self._note_stepper(optimizer, line)

    def _note_stepper(self, optimizer: Optimizer, line: Line | None) -> None:
        running, before = self._steppers.get(line, (weakref.WeakSet(), weakref.WeakSet()))
        if optimizer in running:  # an iteration ends where an optimizer steps again
            running, before = weakref.WeakSet(), running
        running.add(optimizer)
        self._steppers[line] = running, before

    def usual(
        self,
        step: int,
        line: Line | None,
        calls: Sequence[KeptCall] = (),
        before: Sequence[KeptCall] = (),
    ) -> Usual:
        """Return what losses of its line say of the steps before; ``before`` are the last calls."""
        is_alone = len({at for _, _, at in self._losses}) == 1
        losses = [loss for _, loss, at in self._losses if is_alone or at == line]
        last, top = losses[-50:], max(map(abs, losses), default=0.0)
        loss = median(last) if len(last) >= 3 else None
        size = median(map(abs, last)) if last else None
        inputs = cache(partial(standardise, calls, before))
        explain = partial(self.explain, step=step, calls=calls, inputs=inputs, line=line)
        steppers = tuple({each for some in self._steppers.get(line, ()) for each in some})
        return Usual(loss, size, top, explain=explain, standardise=inputs, steppers=steppers)

    def before_step(
        self,
        optimizer: Optimizer,
        step: int,
        model: Callable[[], nn.Module | None],
        written: Callable[[Tensor], list[str]],
        calls: Callable[[], Sequence[KeptCall]] = tuple,
    ) -> Diagnosis | None:
        """Measure the largest weight; return the diagnosis of a state with inf or NaN after calls.

        Sync: one for each tensor of the state in steps 1, 2, 4, 8 ... and after a load, else none.
        """
        known, state = self._measured.get(optimizer, []), id(getattr(optimizer, "state", None))
        is_loaded, self._states[optimizer] = self._states.get(optimizer) != state, state
        last = self._stepped.pop(optimizer, None)
        if last is not None:
            is_same = last == [*map(id, _gradients(optimizer))]
            (self._adding if is_same else self._cleared).add(optimizer)
        if known and step < 2 * known[-1].step and not is_loaded:
            return None
        if optimizer not in self._cleared:
            self._stepped[optimizer] = [*map(id, _gradients(optimizer))]
        now = _Measured(step, largest(parameters(optimizer)), rate_of(optimizer))
        self._measured[optimizer] = [*known, now]
        with modes.unseen_by_modes(), suppress(Exception):  # as of a subclass
            checked = [each.step for each in (*known, now)]
            found = with_bad_state(optimizer, model, written, is_loaded=is_loaded, checked=checked)
            return found and (self.explain(found, step, calls()) or found)
        return None

    def explain(
        self,
        found: Diagnosis,
        step: int,
        calls: Sequence[KeptCall] = (),
        only: Tensor | None = None,
        inputs: Standardise = NOT_LARGE,
        line: Line | None = None,
    ) -> Diagnosis | None:
        """Return the diagnosis of a step whose weights have exploded or whose loss grew, or None.

        A clamp hides that, and a wider dtype delays it. ``only`` is a weight that the step
        multiplies by from call to call, where less growth is enough. The losses are those of the
        step's line, or of each if it is not known. Sync: one for each optimizer.
        """
        by_losses = self._by_losses(found, calls, line)
        needed = _THROWN if only is not None else EXPLODED / (1 if by_losses is None else 10)
        # The loop may write large weights itself, as weights of a teacher are copied.
        is_by_rate = by_losses is None and found.verdict == "range"
        explained = (
            self._by_weights(found, step, calls, inputs, needed, is_by_rate, only, line)
            or self.of_carried(found, step, calls)
            or by_losses
        )
        if explained and by_losses and explained is not by_losses:
            both = f"{by_losses.happened}; {explained.happened.partition(': ')[2]}"
            explained = replace(explained, happened=both)
        sizes = [largest(parameters(optimizer)) for optimizer in self._measured]
        size = max([*sizes, *(abs(loss) for _, loss, _ in [*self._losses][-1:])], default=0.0)
        text = explained.cure.text if explained is not None and explained.cure else ""
        if explained is not None and OF_LIKELIHOOD in text and OF_CRITIC in text:
            losses = [loss for series in self._series(line)[-1:] for _, loss in series]
            term = _of_falling_term(calls, losses)
            explained = replace(explained, cure=term or explained.cure)
        if explained is not None:
            self._explained = min(self._explained, size)
        elif size > self._explained / 10:
            explained = found  # it goes on
        return explained and replace(explained, verdict="growth")

    def mislead(self, optimizer: Optimizer) -> None:
        """Note that the gradients of an optimizer's next step are still scaled. Sync: the first."""
        self.was_explained = True
        if optimizer not in self._misled:
            self._misled[optimizer] = largest(parameters(optimizer))

    def has_thrown(self) -> bool:
        """Return whether still-scaled gradients made weights large, which explains what follows."""
        return any(
            largest(parameters(optimizer)) > _THROWN * max(before, 1.0)
            for optimizer, before in self._misled.items()
        )

    def _by_weights(
        self,
        found: Diagnosis,
        step: int,
        calls: Sequence[KeptCall],
        inputs: Standardise,
        needed: float,
        is_by_rate: bool,
        only: Tensor | None,
        line: Line | None,
    ) -> Diagnosis | None:
        """Return the growth of weights, only by a rate that was raised if ``is_by_rate``."""
        for optimizer, measured in self._measured.items():
            amax, name = largest(parameters(optimizer)), type(optimizer).__name__
            least = largest([w for w in parameters(optimizer) if only is None or w is only])
            for back, before in enumerate(reversed(measured), start=1):
                base = max(before.amax, 1.0)
                if least > needed**back * base:
                    break
            else:
                continue
            rate, begun = rate_of(optimizer), first_rate(optimizer, measured[0].rate)
            if is_by_rate and 0 <= rate <= begun:
                continue
            rates = dict.fromkeys(map(number, (before.rate, rate)))
            since = f" before step {before.step}" if before.step < step else ""  # of a closure
            weight = max(parameters(optimizer), key=lambda each: largest([each]))
            place = self._carried.log.place_of(weight, is_new=True)
            wrote = line_text(place.line) if place and step > 2 else ""  # and not made it
            event = (
                f"{'weights exploded' if wrote else 'the run diverges'}: the largest weight of "
                f"{name} grew from {number(before.amax)}{since} to {number(amax)} "
                f"{'before' if since else 'in'} step {step}"
                + (f", at a learning rate of {' to '.join(rates)}" if rate else "")
                + (f", raised from {number(begun)}" if rate > begun else "")
            )
            files = [at.file for _, _, at in self._losses if at is not None]
            if (below := of_negative_rate(optimizer, files)) is not None:
                return replace(found, happened=event, cure=below)
            text = of_settings(optimizer, begun)
            if optimizer in self._adding and optimizer not in self._cleared:
                steps = ", ".join(str(each.step) for each in measured)
                event += f"; its gradients were not zeroed after each of the checked steps {steps}"
                of = f"after each step of {name}, whose gradients add up over several steps"
                text = f"{variable_of(optimizer)}.zero_grad()  # {of}"
            if not text and rate > begun:
                text = of_raised_rate(optimizer, begun, files)
            elif not text:
                to = [each for each in measured if each.step <= before.step]
                growths = [*starmap(_Measured.growth, pairwise([*to, _Measured(step, amax, rate)]))]
                growths = growths if only is None else [1.0]  # no parabola has such a loss
                hints = [*filter(None, [self.of_collapse(calls, line), inputs()[0]])]
                if not any(OF_CRITIC in hint for hint in hints):
                    hints.append(of_high_rate(optimizer, growths, clips=not hints))
                text = "\nor ".join(hints)
            if wrote:
                check = f"check this line, which wrote to it outside of a step of {name}: {wrote}"
                # A step of Adam and its like is no longer than its rate allows.
                is_short = any("betas" in group for group in optimizer.param_groups)
                text = f"first {check}\nor {text}" if is_short else f"{text}\nor {check}"
            return replace(found, happened=event, cure=Cure("code", text))
        return None

    def of_carried(
        self, found: Diagnosis, step: int, calls: Sequence[KeptCall]
    ) -> Diagnosis | None:
        """Return the diagnosis of a tensor of the script that has grown, also to inf, or None."""
        grown = self._carried.grown(
            calls, step, are_bad=found.verdict == "data" and found.bad is not None
        )
        if grown is None:
            return None
        happened, cure = f"the run diverges: {grown[0]}", Cure("code", grown[1])
        return replace(found, verdict="growth", happened=happened, cure=cure)

    def of_collapse(self, calls: Sequence[KeptCall], line: Line | None) -> str:
        """Return the cure of a loss that fell to below -1, and not ever more slowly, else empty."""
        for series in self._series(line):
            last = [loss for _, loss in series]
            lowest = min(range(len(last)), key=last.__getitem__)
            falling = last[max(0, lowest - 100) : lowest + 1]
            is_long = len(falling) >= _WINDOWS[-1] and falling[-1] <= -1
            falls = [a - b for a, b in pairwise(_quarters(falling))] if is_long else [0.0]
            if min(falls) > 0 and falls[-1] > falls[0] / 2:
                fell = f"it fell to {number(falling[-1])} in step {series[lowest][0]}"
                return f"bound the loss from below: {fell}. {_bound_of(calls)}"
        return ""

    def _series(self, only: Line | None = None) -> list[list[tuple[int, float]]]:
        """Return the losses of a line, or of each line if it is None."""
        lines = dict.fromkeys(at for _, _, at in self._losses if only in (None, at))
        return [[(i, loss) for i, loss, at in self._losses if at == line] for line in lines]

    def _by_losses(
        self, found: Diagnosis, calls: Sequence[KeptCall], line: Line | None
    ) -> Diagnosis | None:
        bad, cure, goes_on = found.bad, found.cure, ""
        if bad is None or bad.limit is None or not bad.is_overflow:
            return None
        series = self._series(line)
        windows = (losses[-length:] for losses in series for length in _WINDOWS)
        window = next((w for w in windows if _grew([loss for _, loss in w], bad.limit)), None)
        if window is None and cure is not None and cure.losses:
            recent = (losses[-_WINDOWS[-1] :] for losses in series)
            window = next((w for w in recent if _runs_off([loss for _, loss in w], cure)), None)
            goes_on = f"; with a wider dtype it falls on to {number(cure.losses[-1])}"
        if window is None:
            return None
        (first, low), (last, high) = window[0], window[-1]
        dtype = "its dtype" if bad.output is None else bad.output.dtype
        event = (
            f"the loss {'fell' if high < low else 'grew'} from {number(low)} in step {first} to "
            f"{number(high)} in step {last}, until {bad.name} overflowed {dtype}{goes_on}"
        )
        text = (
            "stop the growth; a wider dtype or a clamp only delays it. Check what is computed from "
            "the model's own results: a target needs a discount below 1 or a target network, a "
            "state that is carried on needs a norm. Then the learning rate"
        )
        if high < 0:
            bound = "bound the loss from below; a wider dtype only delays the overflow"
            text = f"{bound}. {_bound_of(calls)}"
        return replace(found, happened=event, cure=Cure("code", text))


def _runs_off(losses: list[float], cure: Cure) -> bool:
    """Return whether a loss that falls ever faster goes on so in a trial of a wider dtype.

    Two losses are enough, since the trial has that of the bad step as a third.
    """
    if len(losses) < 2 or cure.kind not in ("policy", "dtype"):
        return False
    before, now = losses[-2:]
    is_faster = -(EXPLODED**2) * max(abs(before), 1.0) < now < min(2 * before, 0)  # and no jump
    needed = 2 if cure.is_finite is False else EXPLODED
    return is_faster and cure.losses[-1] < -needed * max(abs(cure.losses[0]), 1.0)


def _grew(losses: list[float], limit: float) -> bool:
    """Return whether losses moved away from 0 from quarter to quarter, a hundredfold in all.

    Tenfold is enough below 0 and within a hundredth of the limit of a dtype. A loss that begins
    closer to 0 than 1 is measured from 1.
    """
    sizes = [*map(abs, losses)]
    if len(sizes) < _WINDOWS[-1] or sizes[-1] > EXPLODED * sizes[-2]:  # few, or a single jump
        return False
    quarters = _quarters(sizes)
    is_falling = max(losses) < 0 and quarters[3] > limit / 100
    needed = EXPLODED / 10 if is_falling else EXPLODED
    return all(a < b for a, b in pairwise(quarters)) and quarters[3] > needed * max(quarters[0], 1)


def _quarters(values: list[float]) -> list[float]:
    size = len(values) // 4
    return [median(values[start : start + size]) for start in range(0, 4 * size, size)]


def _gradients(optimizer: Optimizer) -> list[Tensor]:
    return [weight.grad for weight in parameters(optimizer) if weight.grad is not None]
