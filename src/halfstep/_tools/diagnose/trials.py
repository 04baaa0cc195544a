"""Trials of a bad step: replays with changes, and small steps on its batch with a change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._pytorch import modes
from halfstep._tools.diagnose.diagnosis import short_error
from halfstep._tools.diagnose.edits import LAST_RESORTS
from halfstep._tools.diagnose.rounding import Origin, Origins, lost_number
from halfstep._tools.diagnose.stable_forms import Formulas, StableForm
from halfstep._tools.diagnose.user_calls import Edits, NotApplicable, UserCalls
from halfstep._tools.replay.blame import OUTSIDE, Blame, scan
from halfstep._tools.replay.observer import OpObserver
from halfstep._tools.replay.replay import Replayer, StepRun
from halfstep._tools.replay.variant import EnteredAutocast, Variant
from halfstep._tools.trace.ops import OpPlace

_OUTSIDE = Blame(OUTSIDE, "", OpPlace(), "forward", OUTSIDE)
"""The blame for a replay that was not completed."""

HIDES = (
    "the clamp hides values that are too large: they get no gradient, and the training goes on "
    "with the rest; look why they grow"
)
"""A remark on :data:`LAST_RESORTS`."""

Change = Callable[[], AbstractContextManager[object]]
"""A function that returns a context in which the user's code is changed."""


class Tried(NamedTuple):
    """Result of a replay: its blame (None if it is finite) and the calls by the user's code."""

    blame: Blame | None
    calls: UserCalls


class CureTrial:
    """Replays of a bad step, each with changes; ``run`` is the replay without changes."""

    def __init__(self, replayer: Replayer, run: StepRun) -> None:
        self.replayer = replayer
        self.model, self.entered, self.scale = replayer.model, run.entered, run.scale
        self._around: Change = nullcontext
        # A stable form that cannot be pasted: its losses judge others.
        self.exact: Change | None = None

    def inside(
        self, around: Callable[[], AbstractContextManager[object]], entered: EnteredAutocast
    ) -> CureTrial:
        """Return a trial whose replays run in a context that enters an autocast region."""
        trial = copy(self)
        trial._around, trial.entered = around, [entered]
        trial.model = None  # rules for modules need float32 parameters, which it does not have yet
        return trial

    def note_lost_number(self, blame: Blame) -> Origins:
        """Replay the step and return the origins; note a number near the op that rounds to zero."""
        origins = self._origins_in(Variant(scale=self.scale))
        note = lost_number(origins, blame.forward_number)
        self.replayer.notes += [] if note is None else [note]
        return origins

    def origins(self, blame: Blame) -> list[Origin]:
        """Return the earlier ops whose rounding spoils the bad op, in order."""
        origins = self.note_lost_number(blame)
        wide = self._origins_in(Variant(torch.float32, scale=self.scale))
        return origins.spoiled(blame.forward_number, wide.special)

    def _origins_in(self, variant: Variant) -> Origins:
        origins = Origins()
        with self.replayer.run(variant, origins, self._around()):
            return origins

    def is_finite(self, **changes: Any) -> bool:
        """Return whether a replay with changes is finite; the scale is the step's by default."""
        return self.blame(**changes) is None

    def blame(
        self, around: AbstractContextManager[object] | None = None, **changes: Any
    ) -> Blame | None:
        variant = Variant(**{"scale": self.scale, **changes})
        try:
            found = scan(self.replayer, variant, around or self._around())
        except ValueError:  # a rule applies to a module whose parameters are not float32
            return _OUTSIDE
        error = found.run.error
        if error is not None and found.blame is None:
            if not isinstance(error, NotApplicable):
                self.replayer.notes.append(f"a replay ended with {short_error(error)}")
            return _OUTSIDE
        return found.blame

    def losses(self, change: Change) -> tuple[float, ...]:
        """Return the loss before and after each of some steps of gradient descent on the batch.

        The code of the user is changed in them. Each parameter moves against its gradient by a
        hundredth of its norm, so that neither the scale nor the size of the loss matters. Nothing
        is left of it: each step is a replay. Empty if a loss is not finite, or if there is no loss
        or no parameter to move.
        """
        moves: dict[int, tuple[Tensor, Tensor]] = {}
        losses: list[float] = []
        for _ in range(STEPS + 1):
            ends = self._ends(change, moves)
            judged = ends if self.exact is None else self._ends(self.exact, moves)
            if ends.has_failed or judged.has_failed or not math.isfinite(judged.loss):
                return ()
            losses.append(judged.loss)
            with modes.unseen_by_modes(), torch.no_grad(), suppress(Exception):
                for leaf, gradient in ends.gradients.values():
                    move = _move(leaf, gradient)
                    before = moves.get(id(leaf), (leaf, torch.zeros_like(move)))[1]
                    moves[id(leaf)] = leaf, before + move
            if not moves:
                return ()
        return tuple(losses)

    def _ends(self, change: Change, moves: dict[int, tuple[Tensor, Tensor]]) -> _Ends:
        ends, around = _Ends(), _in_all(_moved(moves), self._around(), change())
        with self.replayer.run(Variant(scale=self.scale), ends, around) as run:
            ends.has_failed = run.error is not None
        return ends

    def is_usual(self, losses: tuple[float, ...]) -> bool:
        """Return whether the loss with a cure is like those of the run, as far as is known."""
        usual = self.replayer.usual_loss
        return usual is None or not losses or abs(losses[0]) <= FAR * max(usual, _SMALL_LOSS)

    def edited(self, edits: Edits, scale: float | None) -> Tried:
        replayer = self.replayer
        calls = UserCalls(replayer.num_ops, edits, may_end_early=replayer.is_kept)
        blame = self.blame(calls.active(), scale=scale)
        if not calls.do_fit:
            return Tried(_OUTSIDE, calls)
        is_last = any(edit in LAST_RESORTS for edit in calls.chosen.values())
        if blame is None and is_last and calls.hides:
            replayer.notes.append(HIDES)
        return Tried(blame, calls)

    def rewritten(self, forms: list[StableForm]) -> tuple[Tried, Formulas]:
        calls, formulas = UserCalls(self.replayer.num_ops), Formulas([form.root for form in forms])
        blame = self.blame(_in_all(calls.active(), formulas), scale=self.scale)
        return Tried(blame, calls), formulas


@contextmanager
def _in_all(*contexts: AbstractContextManager[object]) -> Iterator[None]:
    with ExitStack() as stack:
        for each in contexts:
            stack.enter_context(each)
        yield


# --- small steps ----------------------------------------------------------------------------------

FAR = 10.0
"""The factor by which the loss of a batch may exceed the usual one of the run."""
_SMALL_LOSS = 1e-3
STEPS = 4
"""The number of steps."""
_RATE = 0.01
"""The length of a step, as a share of the norm of a parameter."""
_LEAST_SIZE = 0.01
"""The size of the entries of a parameter that is smaller, such as a bias of zeros."""


class _Ends(OpObserver):
    """Observer of the first loss of a step, and of the gradients of its parameters."""

    def __init__(self) -> None:
        self.loss, self.has_failed = math.nan, False
        self.gradients: dict[int, tuple[Tensor, Tensor]] = {}

    def see_loss(self, loss: Tensor) -> None:
        if math.isnan(self.loss) and loss.numel() == 1:  # the scaler shows it before it is scaled
            self.loss = float(loss.detach())

    def see_gradient(self, leaf: Tensor, gradient: Tensor) -> None:
        if isinstance(leaf, nn.Parameter):
            self.gradients[id(leaf)] = leaf, gradient.detach().clone()


def _move(leaf: Tensor, gradient: Tensor) -> Tensor:
    """Return the step of a parameter. Entries of its gradient that are not finite do not move."""
    direction = gradient.float().nan_to_num(0.0, 0.0, 0.0)
    size = max(float(leaf.detach().float().norm()), _LEAST_SIZE * leaf.numel() ** 0.5)
    norm = float(direction.norm())
    return direction * (-_RATE * size / norm) if norm else torch.zeros_like(direction)


@contextmanager
def _moved(moves: dict[int, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Move parameters for the time of a replay, which restores them."""
    with torch.no_grad():
        for leaf, move in moves.values():
            leaf.add_(move)
    yield
