"""Ops that lead to a bad op: where a value may have been rounded to what spoils it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep._diagnose.observer import OpCall, OpObserver
from halfstep._diagnose.replay import Replayer
from halfstep._diagnose.user_calls import UserCall, UserCalls
from halfstep._diagnose.variant import Variant
from halfstep._numerics.formats import FORMATS_BY_DTYPE, dtype_name
from halfstep._pytorch.storages import ByMemory
from halfstep._trace.ops import makes_no_values
from halfstep._trace.places import OpPlace

_LOWER = (torch.float16, torch.bfloat16)
_NEAR = 4
"""How far from the bad op an eps is looked for."""


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
    """

    number: int
    op: str
    place: OpPlace
    parents: tuple[int, ...]
    dtype: torch.dtype | None
    lost: float


class Origins(OpObserver):
    """Observer that notes which ops made the inputs of which."""

    def __init__(self) -> None:
        self._ops: dict[int, Origin] = {}
        self._makers: ByMemory[int] = ByMemory()

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Note an op and the makers of its inputs."""
        if call.phase == "backward" or makes_no_values(call.func):
            return
        makers = (self._makers.get(tensor) for tensor in call.given)
        dtype = next((t.dtype for t in outputs if t.dtype in _LOWER), None)
        parents = tuple(dict.fromkeys(m for m in makers if m is not None))
        self._ops[call.number] = Origin(
            call.number, call.name, call.place, parents, dtype, _lost(call, dtype)
        )
        for tensor in outputs:
            self._makers.put(tensor, call.number)

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


def origins_of(replayer: Replayer, number: int, scale: float | None) -> list[Origin]:
    """Replay the step; return the ops in lower precision before an op, the nearest ones first.

    A number that the format rounds to zero, such as an eps of 1e-12, becomes a note.
    """
    origins = Origins()
    with replayer.run(Variant(scale=scale), origins):
        found = list(origins.before_op(number))
    for distance, origin in found:
        if origin.lost and distance < _NEAR:
            assert origin.dtype is not None
            replayer.notes.append(
                f"{origin.lost:g} is 0 in {dtype_name(origin.dtype)}: a larger eps is needed, "
                f"{_smallest(origin.dtype):.2g} is the smallest number there"
            )
            break
    return [origin for _, origin in found if origin.dtype is not None]


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
