"""Trials of a bad step: replays with changes, of one step and of several.

One replay finds the ops whose rounding spoils a later op: an op counts if its result, computed in
float32 from the inputs as they are, is another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep._autocast import HALVES
from halfstep._common.formats import FORMATS_BY_DTYPE, dtype_name
from halfstep._pytorch.storages import ByMemory
from halfstep._tools.diagnose.diagnosis import Cure, short_error
from halfstep._tools.diagnose.edits import DIVISIONS
from halfstep._tools.diagnose.inspect_op import in_wider
from halfstep._tools.diagnose.several_steps import (
    LEAST_STEPS,
    UNKNOWN,
    Change,
    SeveralSteps,
    Usual,
    all_optimizers,
    failures_of,
    name_of,
    signs_of,
)
from halfstep._tools.diagnose.stable_forms import Formulas, StableForm
from halfstep._tools.diagnose.user_calls import Edits, NotApplicable, UserCall, UserCalls
from halfstep._tools.line import Line
from halfstep._tools.replay.blame import OUTSIDE, Blame, scan
from halfstep._tools.replay.observer import OpCall, OpObserver
from halfstep._tools.replay.replay import OutOfTime, Replayer, StepRun
from halfstep._tools.replay.variant import EnteredAutocast, Variant
from halfstep._tools.trace.ops import OpPlace, makes_no_values
from halfstep._tools.user_code import model_of, user_line

_OUTSIDE = Blame(OUTSIDE, "", OpPlace(), "forward", OUTSIDE)
"""The blame for a replay that was not completed."""

SHARE = 0.1  # the longest time for several steps, as a share of that for all replays
MOST_SECONDS = 3.0  # the longest time for several steps, in seconds
NOT_TRIED = "not tried over several steps"
CLIPPED = (
    "clip the gradients before each step, too: "
    "torch.nn.utils.clip_grad_norm_({model}.parameters(), {limit}); without that {why}"
)


class Tried(NamedTuple):
    """Result of a replay: its blame (None if it is finite) and the calls by the user's code."""

    blame: Blame | None
    calls: UserCalls


class Maker(NamedTuple):
    """Call by the user's code whose result has led to a bad op."""

    call: UserCall
    op: int  # number of the op that made them
    function: str  # function that made the values, also if the call returns a part of them
    is_shared: bool  # whether the whole result has led there, and is read at more than one place
    is_part: bool = False
    item: int = 0  # of what it returns, if that is a part


class CureTrial:
    """Replays of a bad step, each with changes; ``run`` is the replay without changes."""

    def __init__(self, replayer: Replayer, run: StepRun, usual: Usual = UNKNOWN) -> None:
        self.replayer, self.usual = replayer, usual
        self.model, self.entered, self.scale = replayer.model, run.entered, run.scale
        self._around: Change = nullcontext
        self.all_optimizers = cache(all_optimizers)

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

    def makers(self, op: int) -> list[Maker]:
        """Replay the step; return the user's calls before that of an op, the nearest ones first."""
        origins, calls = Origins(), UserCalls(self.replayer.num_ops)
        with self.replayer.run(Variant(scale=self.scale), origins, calls.active()):
            before = [origin for _, origin in origins.before_op(op)]
        found: list[Maker] = []

        def add(number: int, part: Part | None, maker: int, size: int) -> None:
            call, made = calls.call_of(number), calls.call_of(maker)
            if call is None or any(call.place.is_at(each.call.place) for each in found):
                return
            readers = map(calls.call_of, origins.readers_of(call.ops if part is None else part))
            is_shared = len({each.place.instruction for each in readers if each}) > 1
            is_shared &= size == before[0].size
            function, item = "" if made is None else made.function, 0 if part is None else part.item
            found.append(Maker(call, maker, function, is_shared, part is not None, item))

        for origin in before:
            add(origin.number, None, origin.number, origin.size)
            for part in origin.parts:
                add(part.number, part, part.maker, part.size)
        return found[1:]

    def read_before(self, op: int, tensors: list[Tensor]) -> list[Tensor]:
        """Replay the step; return the tensors that led to an op, those read nearest to it first."""
        origins = Origins(tensors)
        with self.replayer.run(Variant(scale=self.scale), origins, self._around()):
            parents = chain.from_iterable(each.parents for _, each in origins.before_op(op))
            return [tensors[~number] for number in dict.fromkeys(parents) if number < 0]

    def shares_of_limits(self, ops: set[str], **changes: Any) -> dict[Line, dict[str, float]]:
        """Replay the step with changes; return how near ops come to the limits of their dtypes.

        The shares are by line and module; 0 for lines without these ops.
        """
        nearness = _Nearness(ops)
        with self.replayer.run(Variant(**changes), nearness, self._around()):
            return nearness.shares

    def divides_by(self, call: UserCall) -> UserCalls | None:
        """Replay the step; return its calls if a later one divides by what a call has led to."""
        origins, calls = Origins(), UserCalls(self.replayer.num_ops)
        with self.replayer.run(Variant(scale=self.scale), origins, calls.active()):
            later = chain.from_iterable(each.ops for each in calls.after(call, DIVISIONS))
            before = chain.from_iterable(map(origins.before_divisor, later))
            makers = (calls.call_of(origin.number) for _, origin in before)
            return calls if any(made and made.is_at(call) for made in makers) else None

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

    def judged(self, cure: Cure, change: Change = nullcontext, **changes: Any) -> Cure:
        """Return a cure with what several steps with it show, with clipping if they need that."""
        usual, remarks = self.usual, list(cure.remarks)
        try:
            steps = self._several_steps(change, usual, changes)
            failures, signs = failures_of(steps), signs_of(steps, usual)
            if failures and usual.max_norm is None:
                limit = float(f"{steps.norm_before:.0e}") if steps.norm_before > 0 else 1.0
                clipped = self._several_steps(change, replace(usual, max_norm=limit), changes)
                if clipped.num >= LEAST_STEPS and not failures_of(clipped):
                    model = model_of(() if self.model is None else self.model.parameters())
                    said = CLIPPED.format(model=model, limit=f"{limit:g}", why=failures[0])
                    remarks.append(said)
                    steps, failures = clipped, []
        except OutOfTime:
            return replace(cure, remarks=(*remarks, f"{NOT_TRIED}: the time was over"))
        if not failures and steps.num < LEAST_STEPS:
            return replace(cure, remarks=(*remarks, *signs, f"{NOT_TRIED}: {steps.why_not}"))
        return replace(
            cure,
            is_finite=not failures,
            trial=name_of(steps),
            has_small_steps=not steps.takers,
            losses=tuple(steps.losses),
            remarks=(*remarks, *failures, *signs),
        )

    def _several_steps(self, change: Change, usual: Usual, changes: dict[str, Any]) -> SeveralSteps:
        replayer = self.replayer
        seconds = min(replayer.limit * SHARE, MOST_SECONDS, replayer.limit - replayer.own_seconds)
        steps = SeveralSteps(
            change, usual, seconds, self.all_optimizers, steps_itself=replayer.has_steps
        )
        before, replayer.takes_steps = (replayer.takes_steps, replayer.has_steps), True
        variant = Variant(**{"scale": self.scale, **changes})
        try:
            with replayer.run(variant, steps, self._around(), steps.take) as run:
                if run.error is not None:
                    steps.why_not = f"it ended with {short_error(run.error)}"
        finally:
            replayer.takes_steps, replayer.has_steps = before
        return steps

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


class _Nearness(OpObserver):
    """Observer of how near the results of some ops come to the limit of their lower precision.

    Sync: one for each of them.
    """

    def __init__(self, ops: set[str]) -> None:
        self._ops = ops
        self.shares: dict[Line, dict[str, float]] = {}

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        if call.phase != "forward" or (line := user_line()) is None:
            return
        is_wanted = (call.place.op or call.name) in self._ops
        results = [t for t in outputs if is_wanted and t.dtype in HALVES and t.numel()]
        sizes = (t.abs().nan_to_num(0, 0).amax() / torch.finfo(t.dtype).max for t in results)
        share = max(map(float, sizes), default=0)
        modules = self.shares.setdefault(line, {})
        modules[call.place.module] = max(share, modules.get(call.place.module, 0.0))


# --- rounding -------------------------------------------------------------------------------------

_NEAR = 4  # the distance from the bad op, in ops, below which an eps is searched for


def _in_float32(call: OpCall) -> list[Tensor]:
    """Return the results of an op in float32; none if it cannot round, run or be repeated."""
    dtypes = (call.kwargs.get("dtype"), *(tensor.dtype for tensor in call.given))
    may_round = not makes_no_values(call.func) and any(dtype in HALVES for dtype in dtypes)
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    return (in_wider(call, torch.float32) if may_round and not is_random else None) or []


class Part(NamedTuple):
    """View that an op has returned: of its outputs, the one with a number."""

    number: int
    item: int
    maker: int  # number of the op that made the values
    size: int


@dataclass(frozen=True)
class Origin:
    """Op on the way to a bad op."""

    number: int
    op: str
    place: OpPlace
    parents: tuple[int, ...]  # numbers of the ops that made its inputs
    lost: str  # a remark about a number in its arguments that its dtype rounds to zero
    is_rounded: bool  # whether its dtype makes 0, 1 or inf of other values
    is_one: bool  # whether it makes 1 of smaller values
    size: int  # number of values of its first result
    parts: tuple[Part, ...] = ()  # views that it has read


class Origins(OpObserver):
    """Observer that notes which ops made the inputs of each op of the forward pass.

    The makers of ``given`` tensors are ``~0``, ``~1`` ... Sync: one for each op in a lower dtype.
    """

    def __init__(self, given: Sequence[Tensor] = ()) -> None:
        self._ops: dict[int, Origin] = {}
        self._makers: ByMemory[int] = ByMemory()
        for number, tensor in enumerate(given):
            self._makers.put(tensor, ~number)
        self._parts: ByMemory[dict[tuple[int, int], Part]] = ByMemory()  # by the position in it
        self._wide: list[Tensor] = []

    def before(self, call: OpCall) -> None:
        self._wide = _in_float32(call) if call.phase != "backward" else []

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Note an op and the makers of its inputs."""
        if call.phase == "backward":
            return
        if call.func.is_view:
            self._note_parts(call, outputs)
        if makes_no_values(call.func):
            return
        makers = (self._makers.get(tensor) for tensor in call.given)
        parents = tuple(dict.fromkeys(m for m in makers if m is not None))
        dtype = next((t.dtype for t in outputs if t.dtype in HALVES), None)
        lost = "" if dtype is None else _lost(call, dtype)
        rounds = _rounding([*zip(outputs, self._wide, strict=False)])
        size = outputs[0].numel() if outputs else 0
        known = ((self._parts.get(each) or {}).get(_position(each)) for each in call.given)
        read = tuple(part for part in known if part is not None)
        origin = Origin(call.number, call.name, call.place, parents, lost, *rounds, size, read)
        self._ops[call.number] = origin
        for tensor in outputs:
            self._makers.put(tensor, call.number)

    def _note_parts(self, call: OpCall, outputs: list[Tensor]) -> None:
        for item, tensor in enumerate(outputs):
            maker = self._makers.get(tensor)
            if maker is not None:
                parts = self._parts.get(tensor) or {}
                at, known = _position(tensor), parts.get(_position(tensor))
                if known is None or known.maker != maker:  # else it is a view of all of that part
                    parts[at] = Part(call.number, item, maker, tensor.numel())
                self._parts.put(tensor, parts)

    def readers_of(self, made: range | Part) -> Iterator[int]:
        """Yield the other ops that read the results of ops, or a part of them."""
        for number, origin in self._ops.items():
            if isinstance(made, Part):
                is_reader = made in origin.parts
            else:
                is_reader = number not in made and any(each in made for each in origin.parents)
            if is_reader:
                yield number

    def before_divisor(self, number: int) -> Iterator[tuple[int, Origin]]:
        """Yield the ops before the divisor of an op, if it divides by a computed tensor."""
        origin = self._ops.get(number)
        least = 1 if origin is not None and origin.op == "reciprocal" else 2
        if origin is not None and len(origin.parents) >= least:
            yield from self.before_op(origin.parents[-1])

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


def _position(tensor: Tensor) -> tuple[int, int]:
    """Return where the values of a tensor begin in its memory, and how many there are."""
    offset = int(tensor.storage_offset()) if tensor.layout is torch.strided else 0
    return offset, tensor.numel()


def _rounding(pairs: Iterable[tuple[Tensor, Tensor]]) -> tuple[bool, bool]:
    """Return whether results are 0, 1 or inf for other exact values, and whether some are 1."""
    both = [(r, e) for r, e in pairs if r.dtype in HALVES and r.shape == e.shape]
    is_one = any(bool(((r.abs() >= 1) & (e.abs() < 1)).any()) for r, e in both)
    lost = (((r == 0) & (e != 0)) | (e.isfinite() & ~r.isfinite()) for r, e in both)
    return is_one or any(bool(each.any()) for each in lost), is_one


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
