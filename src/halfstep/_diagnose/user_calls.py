"""Calls of PyTorch's functions by the user's code: found by the ops they run, and edited."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch.overrides import TorchFunctionMode

from halfstep._diagnose.blame import Blame
from halfstep._diagnose.edits import CALL, Edit, evaluated, in_place, writes_to_first
from halfstep._diagnose.source import Placed
from halfstep._diagnose.user_code import Place, torch_module, user_place, user_spot
from halfstep._pytorch import autograd

_PASSES = ("backward", "grad")
"""Functions that run a backward pass, which is no call of the user's."""
_NAMES = ("input", "other", "var")
"""The usual names of the first arguments."""


class NotApplicable(Exception):  # noqa: N818  (it ends a replay, nothing is wrong)
    """An edit does not fit what a call was given."""


class UserCall(NamedTuple):
    """Outermost call of a function of PyTorch at a place of the user's code.

    Attributes:
        place: The place.
        function: The name of the function.
        ops: The numbers of the ops that it ran.
    """

    place: Place
    function: str
    ops: range

    def is_at(self, other: UserCall) -> bool:
        """Return whether both are the same expression of the source, and function."""
        return self.place.is_at(other.place) and self.function == other.function


class UserCalls(TorchFunctionMode):
    """Mode that notes the user's calls of PyTorch's functions, and carries out edits of them.

    Args:
        num_ops: Returns the number of ops that have run.
        edits: Pairs of a call, found before, and an edit of it.

    Attributes:
        placed: The edits with their texts; known once their calls have run.
    """

    def __init__(
        self, num_ops: Callable[[], int], edits: tuple[tuple[UserCall, Edit], ...] = ()
    ) -> None:
        super().__init__()
        self._num_ops, self._edits = num_ops, edits
        self._calls: list[UserCall] = []
        self._is_inside = False
        self._texts: dict[tuple[int, int | str], str] = {}
        self.placed: dict[tuple[int, int | str], Placed] = {}

    def call_of(self, number: int) -> UserCall | None:
        """Return the call that ran an op."""
        return next((call for call in self._calls if number in call.ops), None)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, edited if that is asked for."""
        kwargs = kwargs or {}
        place = user_place()
        if place is None:
            return func(*args, **kwargs)
        call = UserCall(place, getattr(func, "__name__", ""), range(0))
        first, self._is_inside = self._num_ops(), True
        try:
            return self._edited(call, func, args, kwargs)
        finally:
            last, self._is_inside = self._num_ops(), False
            if last > first and call.function not in _PASSES:
                self._calls.append(call._replace(ops=range(first, last)))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Note the calls of the block, and those of backward passes in it."""
        with autograd.engine_in(self._in_backward), self:
            yield

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Note the calls of hooks too; PyTorch suspends a mode in what it is shown."""
        if not self._is_inside:
            yield
            return
        self._is_inside = False
        try:
            with self:
                yield
        finally:
            self._is_inside = True

    def _edited(self, call: UserCall, func: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        given, named = list(args), dict(kwargs)
        wanted = [
            (index, edit, slot)
            for index, (where, edit) in enumerate(self._edits)
            if where.is_at(call)
            for slot in edit.slots
        ]
        for index, edit, slot in wanted:
            if slot != CALL:
                holder, key = _holder(slot, given, named)
                holder[key] = self._changed((index, slot), edit, call, func, holder[key])
        result = func(*given, **named)
        for index, edit, slot in wanted:
            if slot == CALL:
                result = self._changed((index, slot), edit, call, func, result)
        return result

    def _changed(
        self, key: tuple[int, int | str], edit: Edit, call: UserCall, func: Any, value: Any
    ) -> Any:
        """Return what an edit makes of a value."""
        text = self._texts.get(key) or edit.text(value)
        if text is not None and key[1] == 0 and writes_to_first(call.function):
            text = in_place(text)
        if text is None:
            raise NotApplicable
        if key not in self._texts:
            module = torch_module()
            told = (module and edit.told) or text
            spot = user_spot()
            assert spot is not None
            self.placed[key] = Placed(spot, call.function, key[1], told, _parameters(func), module)
            self._texts[key] = text
        return evaluated(text, value)


def call_of(calls: UserCalls, blame: Blame) -> UserCall | None:
    """Return the call of the user's code that ran a bad op, or that whose gradient it is."""
    found = calls.call_of(blame.reader)
    if found is None and blame.phase == "backward":
        found = calls.call_of(blame.place.number)
    return found


def _holder(slot: int | str, given: list[Any], named: dict[str, Any]) -> tuple[Any, Any]:
    """Return what holds an argument, and its index or name there."""
    if isinstance(slot, str):
        named.setdefault(slot, None)
        return named, slot
    if slot < len(given):
        return given, slot
    if slot >= len(_NAMES) or _NAMES[slot] not in named:
        raise NotApplicable
    return named, _NAMES[slot]


@functools.cache
def _parameters(func: Any) -> tuple[str, ...]:
    try:
        return tuple(inspect.signature(func).parameters)
    except (TypeError, ValueError):  # a function of C has none
        return ()
