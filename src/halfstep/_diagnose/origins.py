"""Ops that lead to a bad op: where a value was rounded to what spoils it, such as 0 or 1."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from operator import gt
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._diagnose.observer import OpCall, OpObserver
from halfstep._diagnose.replay import Replayer
from halfstep._diagnose.user_calls import UserCall, UserCalls
from halfstep._diagnose.variant import Variant
from halfstep._numerics.formats import FORMATS_BY_DTYPE, dtype_name
from halfstep._numerics.measure import float_values
from halfstep._pytorch.storages import ByMemory
from halfstep._trace.ops import makes_no_values
from halfstep._trace.places import OpPlace

_LOWER = (torch.float16, torch.bfloat16)
_CASTS = ("_to_copy", "copy_")
_NEAR = 4
"""How far from the bad op an eps is looked for."""


Alike = tuple[str, str, int, int]
"""Op, module, call, and which of these: the same in any dtype, where casts do not count."""


class Special(NamedTuple):
    """How many values of a tensor are 0, 1 or beyond, and not finite."""

    zeros: int
    ones: int
    bad: int


@dataclass(frozen=True)
class Origin:
    """Op on the way to a bad op.

    Attributes:
        number: Its number in the replay.
        op: The name of the ATen op.
        place: Its place.
        parents: The numbers of the ops that made its inputs.
        dtype: The dtype of its result, if that is a lower precision.
        lost: The number among its arguments that its dtype rounds to zero, 0 without one.
        alike: Identifies it in a replay in another dtype; None for a cast.
    """

    number: int
    op: str
    place: OpPlace
    parents: tuple[int, ...]
    dtype: torch.dtype | None
    lost: float
    alike: Alike | None


class Origins(OpObserver):
    """Observer that notes which ops made the inputs of which, and their special values.

    Sync: one for each op that returns numbers.
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
        dtype = next((t.dtype for t in outputs if t.dtype in _LOWER), None)
        parents = tuple(dict.fromkeys(m for m in makers if m is not None))
        alike = None if call.name in _CASTS else self._note(call, outputs)
        self._ops[call.number] = Origin(
            call.number, call.name, call.place, parents, dtype, _lost(call, dtype), alike
        )
        for tensor in outputs:
            self._makers.put(tensor, call.number)

    def _note(self, call: OpCall, outputs: list[Tensor]) -> Alike:
        """Note the special values of an op."""
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
        """Yield the ops before an op with their distance from it, the nearest ones first."""
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
        """Return the ops from which an op has what spoils it, the first ones first.

        Args:
            number: The op.
            exact: The special values of all ops in float32.
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
        """Return whether an op has 0, 1 or no number where float32 has another value."""
        if origin.alike is None:
            return True  # a cast has what it is given
        here, there = self.special.get(origin.alike), exact.get(origin.alike)
        return here is not None and there is not None and any(map(gt, here, there))


def origins_in(
    replayer: Replayer, variant: Variant, around: AbstractContextManager[object]
) -> Origins:
    """Replay the step, in a context, and return which ops made what."""
    origins = Origins()
    with replayer.run(variant, origins, around):
        return origins


def lost_number(origins: Origins, number: int) -> str | None:
    """Return a remark on a number near an op that its dtype rounds to zero, such as 1e-12."""
    for distance, origin in origins.before_op(number):
        if origin.lost and distance < _NEAR:
            assert origin.dtype is not None
            return (
                f"{origin.lost:g} is 0 in {dtype_name(origin.dtype)}: a larger eps is needed, "
                f"{_smallest(origin.dtype):.2g} is the smallest number there"
            )
    return None


def makers_of(replayer: Replayer, number: int, scale: float | None) -> list[UserCall]:
    """Replay the step; return the user's calls that led to an op, the nearest ones first."""
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


def _smallest(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
