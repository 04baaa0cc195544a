"""Values lost to rounding: ops whose rounded result spoils a later op, and ops that flush to zero.

An input that was flushed earlier counts only for the op that flushed it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from operator import gt
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._autocast import HALVES
from halfstep._common.formats import FORMATS_BY_DTYPE, dtype_name
from halfstep._pytorch.storages import ByMemory
from halfstep._tools.diagnose.diagnosis import Flush, short_error
from halfstep._tools.diagnose.inspect_op import in_wider
from halfstep._tools.diagnose.user_calls import UserCall, UserCalls
from halfstep._tools.line import Line
from halfstep._tools.measure import float_values
from halfstep._tools.replay.observer import OpCall, OpObserver
from halfstep._tools.replay.replay import Replayer
from halfstep._tools.replay.variant import Variant
from halfstep._tools.trace.ops import OpPlace, makes_no_values
from halfstep._tools.trace.rows import Phase
from halfstep._tools.user_code import user_line

_CASTS = ("_to_copy", "copy_")
_NEAR = 4
"""The distance from the bad op, in ops, below which an eps is searched for."""


Alike = tuple[str, str, int, int]
"""Op, module, call and a running number among these; casts do not count, so any dtype is alike."""


class Special(NamedTuple):
    """Numbers of entries of a tensor that are 0, at least 1 in magnitude, and not finite."""

    zeros: int
    ones: int
    bad: int


@dataclass(frozen=True)
class Origin:
    """Op on the way to a bad op."""

    number: int
    op: str
    place: OpPlace
    parents: tuple[int, ...]  # numbers of the ops that made its inputs
    dtype: torch.dtype | None  # None if it is no lower precision
    lost: float  # number in its arguments that its dtype rounds to zero, or 0
    alike: Alike | None  # identity in replays in other dtypes; None for a cast


class Origins(OpObserver):
    """Observer that notes which ops made the inputs of each op, and the special values.

    Sync: one for each op that returns floating-point values.
    """

    def __init__(self) -> None:
        self._ops: dict[int, Origin] = {}
        self._makers: ByMemory[int] = ByMemory()
        self._counts: Counter[tuple[str, str, int]] = Counter()
        self.special: dict[Alike, Special] = {}

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Note an op and the makers of its inputs."""
        if call.phase == "backward" or makes_no_values(call.func):
            return
        makers = (self._makers.get(tensor) for tensor in call.given)
        dtype = next((t.dtype for t in outputs if t.dtype in HALVES), None)
        parents = tuple(dict.fromkeys(m for m in makers if m is not None))
        alike = None if call.name in _CASTS else self._note(call, outputs)
        self._ops[call.number] = Origin(
            call.number, call.name, call.place, parents, dtype, _lost(call, dtype), alike
        )
        for tensor in outputs:
            self._makers.put(tensor, call.number)

    def _note(self, call: OpCall, outputs: list[Tensor]) -> Alike:
        here = call.name, call.place.module, call.place.call
        alike = (*here, self._counts[here])
        self._counts[here] += 1
        values = None if not outputs else float_values(outputs[0])
        if values is not None and values.numel():
            values = values.float() if values.element_size() == 1 else values
            counts = ((values == 0).sum(), (values.abs() >= 1).sum(), (~values.isfinite()).sum())
            self.special[alike] = Special(*torch.stack(counts).tolist())
        return alike

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

    def spoiled(self, number: int, exact: Mapping[Alike, Special]) -> list[Origin]:
        """Return the lower-precision ops whose rounding spoils an op, in order.

        ``exact`` has the special values of all ops in float32.
        """
        found: dict[int, Origin] = {}
        todo = [number] if number in self._ops else []
        while todo:
            for parent in self._ops[todo.pop()].parents:
                origin = self._ops[parent]
                if parent in found or not self._is_spoiled(origin, exact):
                    continue
                found[parent] = origin
                todo.append(parent)
        ordered = (found[number] for number in sorted(found))
        return [origin for origin in ordered if origin.alike is not None and origin.dtype]

    def _is_spoiled(self, origin: Origin, exact: Mapping[Alike, Special]) -> bool:
        """Return whether an op has more special values of some kind than in float32."""
        if origin.alike is None:
            return True  # a cast passes on the values of its input
        here, there = self.special.get(origin.alike), exact.get(origin.alike)
        return here is not None and there is not None and any(map(gt, here, there))


def lost_number(origins: Origins, number: int) -> str | None:
    """Return a remark about a number near an op that its dtype rounds to 0, such as 1e-12."""
    for distance, origin in origins.before_op(number):
        if origin.lost and origin.dtype is not None and distance < _NEAR:
            dtype = dtype_name(origin.dtype)
            return (
                f"{origin.lost:g} is 0 in {dtype}: a larger eps is needed, "
                f"{FORMATS_BY_DTYPE[dtype].smallest_subnormal:.2g} is the smallest number there"
            )
    return None


def makers_of(replayer: Replayer, number: int, scale: float | None) -> list[UserCall]:
    """Replay the step; return the user's calls before that of an op, the nearest ones first."""
    origins, calls = Origins(), UserCalls(replayer.num_ops)
    with replayer.run(Variant(scale=scale), origins, calls.active()):
        found = [calls.call_of(origin.number) for _, origin in origins.before_op(number)]
    different: list[UserCall] = []
    for call in found:
        if call is not None and not any(call.place.is_at(other.place) for other in different):
            different.append(call)
    return different[1:]


def _lost(call: OpCall, dtype: torch.dtype | None) -> float:
    if dtype is None:
        return 0.0
    limit = FORMATS_BY_DTYPE[dtype_name(dtype)].flushed_below
    values = (each for each in (*call.args, *call.kwargs.values()) if isinstance(each, float))
    return next((value for value in values if 0 < abs(value) <= limit), 0.0)


# --- underflow ------------------------------------------------------------------------------------

SCALE_FACTORS = (2.0**-8, 2.0**-4, 2.0**4, 2.0**8)
"""Other scales to count underflow at, as multiples of the current scale."""

_LARGEST_SCALE = 2.0**24
_Key = tuple[str, str, Phase, str, Line | None]


class FlushCounter(OpObserver):
    """Observer that counts the values that each op flushes to zero.

    Sync: one for each op that returns lower precision.
    """

    def __init__(self, scale: float | None) -> None:
        factors = () if scale is None else SCALE_FACTORS
        self._scales = {f * scale: f for f in factors if scale and 1 <= f * scale <= _LARGEST_SCALE}
        # Numbers of values, of flushed values, and in the backward pass of values that would be
        # flushed at each other scale.
        self._counts: dict[_Key, list[int]] = {}
        self._lines: dict[int, Line | None] = {}
        self._wide: list[Tensor] | None = None

    def before(self, call: OpCall) -> None:
        if call.phase != "backward":
            self._lines[call.number] = user_line()
        self._wide = _in_float32(call)

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Count the zeros that are not zero in float32."""
        wide, self._wide = self._wide, None
        if wide is None or len(wide) != len(outputs):
            return
        is_backward = call.phase == "backward"
        line = self._lines.get(call.place.number if is_backward else call.number)
        for result, exact in zip(outputs, wide, strict=True):
            format = FORMATS_BY_DTYPE.get(dtype_name(result.dtype))
            if format is None or result.shape != exact.shape:
                continue
            magnitudes = exact.abs()
            is_value = magnitudes != 0
            counts = [is_value.sum(), ((result == 0) & is_value).sum()]
            for factor in self._scales.values() if is_backward else ():
                counts.append(((magnitudes <= format.flushed_below / factor) & is_value).sum())
            key = (call.name, call.place.module, call.phase, dtype_name(result.dtype), line)
            before = self._counts.get(key, [0] * len(counts))
            found = torch.stack(counts).tolist()
            self._counts[key] = [sum(pair) for pair in zip(before, found, strict=True)]

    def found(self) -> tuple[Flush, ...]:
        """Return the ops that flush values, the largest shares first."""
        flushes = [
            Flush(*key, values, flushed, tuple(zip(self._scales, at_scales, strict=False)))
            for key, (values, flushed, *at_scales) in self._counts.items()
            if flushed
        ]
        return tuple(sorted(flushes, key=lambda flush: -flush.share))


def find_underflow(replayer: Replayer, scale: float | None) -> tuple[Flush, ...]:
    counter = FlushCounter(scale)
    with replayer.run(Variant(scale=scale), counter) as run:
        if run.error is not None:
            error = short_error(run.error)
            replayer.notes.append(f"the replay for underflow ended with {error}")
        return counter.found()


def _in_float32(call: OpCall) -> list[Tensor] | None:
    """Return the result of an op in float32; None if it cannot flush, run or be repeated."""
    dtypes = (call.kwargs.get("dtype"), *(tensor.dtype for tensor in call.given))
    may_flush = not makes_no_values(call.func) and any(dtype in HALVES for dtype in dtypes)
    is_random = torch.Tag.nondeterministic_seeded in call.func.tags
    return in_wider(call, torch.float32) if may_flush and not is_random else None
