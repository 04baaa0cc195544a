"""Trials of a bad step: replays with changes, and small steps on its batch with a change.

One replay finds the ops whose rounding spoils a later op: an op counts if its result, computed in
float32 from the inputs as they are, is another.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._autocast import HALVES
from halfstep._common.formats import FORMATS_BY_DTYPE, dtype_name
from halfstep._pytorch import modes
from halfstep._pytorch.storages import ByMemory
from halfstep._tools.diagnose.diagnosis import short_error
from halfstep._tools.diagnose.inspect_op import in_wider
from halfstep._tools.diagnose.stable_forms import Formulas, StableForm
from halfstep._tools.diagnose.user_calls import Edits, NotApplicable, UserCall, UserCalls
from halfstep._tools.replay.blame import OUTSIDE, Blame, scan
from halfstep._tools.replay.observer import OpCall, OpObserver
from halfstep._tools.replay.replay import Replayer, StepRun
from halfstep._tools.replay.variant import EnteredAutocast, Variant
from halfstep._tools.trace.ops import OpPlace, makes_no_values

_OUTSIDE = Blame(OUTSIDE, "", OpPlace(), "forward", OUTSIDE)
"""The blame for a replay that was not completed."""

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

    def origins(self, blame: Blame) -> list[Origin]:
        """Replay the step; return the ops before the bad one that round, the nearest ones first.

        A number near the op that rounds to zero is noted.
        """
        origins = Origins()
        with self.replayer.run(Variant(scale=self.scale), origins, self._around()):
            before = [*origins.before_op(blame.forward_number)]
            lost = [origin.lost for distance, origin in before if distance < _NEAR]
            self.replayer.notes += [*filter(None, lost)][:1]
            return [origin for _, origin in before[1:] if origin.is_rounded]

    def makers(self, blame: Blame) -> list[UserCall]:
        """Replay the step; return the user's calls before the bad one, the nearest ones first."""
        origins, calls = Origins(), UserCalls(self.replayer.num_ops)
        with self.replayer.run(Variant(scale=self.scale), origins, calls.active()):
            before = [origin for _, origin in origins.before_op(blame.forward_number)]
        different: list[UserCall] = []
        for call in filter(None, (calls.call_of(origin.number) for origin in before)):
            if not any(call.place.is_at(other.place) for other in different):
                different.append(call)
        return different[1:]

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
        return Tried(blame if calls.do_fit else _OUTSIDE, calls)

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


# --- rounding -------------------------------------------------------------------------------------

_NEAR = 4
"""The distance from the bad op, in ops, below which an eps is searched for."""


def _in_float32(call: OpCall) -> list[Tensor]:
    """Return the results of an op in float32; none if it cannot round, run or be repeated."""
    dtypes = (call.kwargs.get("dtype"), *(tensor.dtype for tensor in call.given))
    may_round = not makes_no_values(call.func) and any(dtype in HALVES for dtype in dtypes)
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    return (in_wider(call, torch.float32) if may_round and not is_random else None) or []


@dataclass(frozen=True)
class Origin:
    """Op on the way to a bad op."""

    number: int
    op: str
    place: OpPlace
    parents: tuple[int, ...]  # numbers of the ops that made its inputs
    lost: str  # a remark about a number in its arguments that its dtype rounds to zero
    is_rounded: bool  # whether its dtype makes 0, 1 or inf of other values


class Origins(OpObserver):
    """Observer that notes which ops made the inputs of each op of the forward pass.

    Sync: one for each op in lower precision.
    """

    def __init__(self) -> None:
        self._ops: dict[int, Origin] = {}
        self._makers: ByMemory[int] = ByMemory()
        self._wide: list[Tensor] = []

    def before(self, call: OpCall) -> None:
        self._wide = _in_float32(call) if call.phase != "backward" else []

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Note an op and the makers of its inputs."""
        if call.phase == "backward" or makes_no_values(call.func):
            return
        makers = (self._makers.get(tensor) for tensor in call.given)
        parents = tuple(dict.fromkeys(m for m in makers if m is not None))
        dtype = next((t.dtype for t in outputs if t.dtype in HALVES), None)
        lost = "" if dtype is None else _lost(call, dtype)
        is_rounded = any(map(_is_rounded, outputs, self._wide))
        origin = Origin(call.number, call.name, call.place, parents, lost, is_rounded)
        self._ops[call.number] = origin
        for tensor in outputs:
            self._makers.put(tensor, call.number)

    def before_op(self, number: int) -> Iterator[tuple[int, Origin]]:
        """Yield an op and the ops before it with their distances, the nearest ones first."""
        todo, seen = deque([(0, number)]), {number}
        while todo:
            distance, current = todo.popleft()
            if current not in self._ops:
                continue
            yield distance, self._ops[current]
            new = [parent for parent in self._ops[current].parents if parent not in seen]
            seen.update(new)
            todo.extend((distance + 1, parent) for parent in new)


def _is_rounded(result: Tensor, exact: Tensor) -> bool:
    if result.dtype not in HALVES or result.shape != exact.shape:
        return False
    is_zero = (result == 0) & (exact != 0)
    is_one = (result.abs() >= 1) & (exact.abs() < 1)
    return bool((is_zero | is_one | (exact.isfinite() & ~result.isfinite())).any())


def _lost(call: OpCall, dtype: torch.dtype) -> str:
    """Return a remark about a number in the arguments of an op that is 0 in a dtype, as 1e-12."""
    name = dtype_name(dtype)
    format, values = FORMATS_BY_DTYPE[name], (*call.args, *call.kwargs.values())
    floats = (each for each in values if isinstance(each, float))
    lost = next((value for value in floats if 0 < abs(value) <= format.flushed_below), None)
    if lost is None:
        return ""
    smallest = f"{format.smallest_subnormal:.2g} is the smallest number there"
    return f"{lost:g} is 0 in {name}: a larger eps is needed, {smallest}"
