"""Calls of PyTorch functions by the user's code, their lookup by op, and edits of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep._common.numbers import things
from halfstep._pytorch import autograd, modes
from halfstep._tools.diagnose.changes import Placed, Slot, parameters_of
from halfstep._tools.diagnose.edits import (
    CALL,
    DIVISIONS,
    OPERAND,
    USUAL_NAMES,
    Edit,
    in_place,
    item_of,
    parameter_in,
    row_name,
    writes_to_first,
)
from halfstep._tools.replay.blame import Blame
from halfstep._tools.source import value_with
from halfstep._tools.user_code import (
    Place,
    called_by_user,
    is_called_by_a_scaler,
    is_given_to_module,
    may_be_rows,
    names_here,
    path_in_module,
    torch_modules,
    user_place,
    user_spot,
)

_PASSES = ("backward", "grad")
"""Functions that run a backward pass, whose ops do not count as ops of the call."""


class NotApplicable(Exception):  # noqa: N818  (control flow, not an error)
    """An edit does not fit the arguments of a call."""


class UserCall(NamedTuple):
    """Outermost call of a PyTorch function in the user's code, and the ops that it ran."""

    place: Place
    function: str
    ops: range
    path: str = ""  # in the PyTorch module that the user called

    def is_at(self, other: UserCall) -> bool:
        """Return whether both are the same instruction and function."""
        return self.place.is_at(other.place) and self.function == other.function


class _Running(NamedTuple):
    """Call of a function that is made now, with edits."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


Edits = tuple[tuple[UserCall, Edit], ...]  # known calls, each with an edit of it


class UserCalls(TorchFunctionMode):
    """Function mode that notes the user's calls of PyTorch functions, and applies edits to them."""

    def __init__(
        self, num_ops: Callable[[], int], edits: Edits = (), *, may_end_early: bool = False
    ) -> None:
        super().__init__()
        # Whether an edit that does not fit may end the replay; else the call is made unchanged.
        self._num_ops, self._edits, self._may_end_early = num_ops, edits, may_end_early
        self._functions = {where.function for where, _ in edits}
        self._calls: list[UserCall] = []
        self._is_inside, self.do_fit = False, True
        self._changes: dict[tuple[int, Slot], _Changes] = {}
        self.held_parameter = ""  # whose values an edit takes
        self.reached: set[int] = set()  # indices of the edits whose call was made
        self._texts: dict[tuple[int, Slot], str] = {}
        self.placed: dict[tuple[int, Slot], Placed] = {}

    def again(self) -> UserCalls:
        """Return another mode with the same edits, written as here; it notes no calls."""
        calls = UserCalls(lambda: 0, self._edits)
        calls._texts, calls.placed = self._texts, self.placed
        return calls

    def call_of(self, number: int) -> UserCall | None:
        """Return the call that ran an op."""
        return next((call for call in self._calls if number in call.ops), None)

    def like(self, call: UserCall) -> list[UserCall]:
        """Return the other calls of its function in the same function of the user, each once."""
        found = [call]
        for each in self._calls:
            is_like = each.function == call.function and each.place.code is call.place.code
            if is_like and not any(each.is_at(other) for other in found):
                found.append(each)
        return found[1:]

    def after(self, call: UserCall, functions: Sequence[str]) -> list[UserCall]:
        """Return the calls of some functions after one in the same function of the user."""
        here = (each for each in self._calls if each.place.code is call.place.code)
        later = (each for each in here if each.place.instruction > call.place.instruction)
        return [each for each in later if row_name(each.function) in functions]

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        first, self._is_inside = self._num_ops(), True
        try:
            if name in self._functions:
                return self._edited(_Running(name, func, args, kwargs))
            return func(*args, **kwargs)
        finally:
            last, self._is_inside = self._num_ops(), False
            if last > first and name not in _PASSES:
                self._note(name, range(first, last))

    def _note(self, name: str, ops: range) -> None:
        place = user_place()
        if place is not None and not is_called_by_a_scaler():
            self._calls.append(UserCall(place, name, ops, path_in_module()))

    @contextmanager
    def active(self) -> Iterator[None]:
        """Note the calls in the block, including those in backward passes."""
        with autograd.engine_in(self._in_backward), self:
            yield

    @contextmanager
    def _in_backward(self) -> Iterator[None]:
        """Note calls in hooks too: PyTorch disables a mode while it handles ``backward``."""
        if not self._is_inside:
            yield
            return
        self._is_inside = False
        try:
            with self:
                yield
        finally:
            self._is_inside = True

    def _edited(self, running: _Running) -> Any:
        place, name = user_place(), running.name
        if place is None:
            return running.function(*running.args, **running.kwargs)
        call, path = UserCall(place, name, range(0)), path_in_module()
        here = [
            n
            for n, (where, edit) in enumerate(self._edits)
            if where.is_at(call) and (edit.slots != (CALL,) or where.path == path)
        ]
        if not here:
            return running.function(*running.args, **running.kwargs)
        self.reached.update(here)
        try:
            return self._carried_out(here, running)
        except Exception:  # an error of the edit must not interrupt the user's function
            self.do_fit = False
            if self._may_end_early:
                raise
            return running.function(*running.args, **running.kwargs)

    def _carried_out(self, numbers: list[int], running: _Running) -> Any:
        given, named = list(running.args), dict(running.kwargs)
        of_result: list[tuple[int, Slot]] = []
        for number in numbers:
            slots = self._edits[number][1].slots_in(given, named)
            if not slots:
                raise NotApplicable
            for slot in slots:
                if slot == OPERAND:
                    return self._changed(running, number, slot, given[0])
                if slot == CALL or item_of(slot) is not None:
                    of_result.append((number, slot))
                    continue
                holder, key = _holder(slot, given, named, running.function)
                holder[key] = self._changed(running, number, slot, holder[key])
        result = running.function(*given, **named)
        for number, slot in of_result:
            item = item_of(slot)
            if item is None:
                result = self._changed(running, number, slot, result)
            else:
                changed = self._changed(running, number, slot, result[item])
                result = (*result[:item], changed, *result[item + 1 :])
        return result

    def _changed(self, running: _Running, number: int, slot: Slot, value: Any) -> Any:
        """Apply an edit to a value, and note the source expression of the edit."""
        key, edit = (number, slot), self._edits[number][1]
        text = self._texts.get(key)
        if text is None:
            text = self._texts[key] = _text(edit, running.name, slot, value)
            spot = user_spot()
            if spot is None:
                raise NotApplicable
            module, *around = torch_modules() or [""]
            told = (module and edit.told) or text
            if not _is_in_call(slot, value, running.args, told, around):
                module = ""
            parameters = parameters_of(running.function)
            self.placed[key] = Placed(spot, running.name, slot, told, parameters, module)
        result = value_with(text, value, names_here())
        is_eps = row_name(running.name) in DIVISIONS and slot in edit.slots and slot != CALL
        if (is_eps or "clamp" in text or "masked_fill" in text) and isinstance(value, Tensor):
            is_held = "masked_fill" in text or "clamp_min" in text
            if is_held and (parameter := parameter_in(value)) is not None:
                self.held_parameter = variable_of(parameter)
            with modes.no_function_modes(), modes.unseen_by_modes():
                changes = self._changes.setdefault(key, _Changes())
                if is_eps:
                    changes.add_divisors(value.detach(), result.detach())
                is_told = self.placed[key].expression == text
                if is_told and ("clamp" in text or "masked_fill" in text):
                    changes.add(value, result)
        return result

    def keep_values(self, edits: Edits) -> bool:
        """Return whether some of the edits are clamps that may change values, and have not yet."""
        numbers = {number for number, each in enumerate(self._edits) if each in edits}
        of_them = {key: each for key, each in self._changes.items() if key[0] in numbers}
        is_lost = any(each.is_of_data or str(each) for each in of_them.values())
        return {n for n, _ in of_them} == numbers and not is_lost

    @property
    def share(self) -> float:
        """The largest share of values that an edit takes from where they were."""
        return max((each.share for each in self._changes.values()), default=0.0)

    @property
    def lost(self) -> float:
        """The same share, also of few values."""
        return max((each.lost for each in self._changes.values()), default=0.0)

    @property
    def changed(self) -> float:
        """The largest share of values of a call that the clamps have changed, also of few."""
        return max((each.changed for each in self._changes.values()), default=0.0)

    def remarks(self) -> tuple[str, ...]:
        """Return how many values the clamps have changed, and which of them are data."""
        return tuple(dict.fromkeys(text for each in self._changes.values() if (text := str(each))))


def variable_of(parameter: Tensor) -> str:
    """Return the name of the variable or attribute that is or holds a parameter, else "it"."""
    name = (called_by_user(parameter) or "it").partition(" in ")[0]
    name = re.sub(r"\[[^]'\"]*\]", "", name)  # in ``sigmas[i]``, but not in ``sigmas["depth"]``
    return str(re.findall(r"[^\W\d]\w*", name)[-1])


FEW = 32  # the number of values below which a share says nothing


class _Changes:
    """Values that a clamp has changed in a replay."""

    def __init__(self) -> None:
        self._num, self._of, self.is_of_data, self._rows = 0, 0, False, ""
        self._is_left_out = self._is_of_numbers = self._may_be_labels = False
        self._num_lost = self._num_replaced = self._num_divisors = 0

    @property
    def share(self) -> float:
        """The share of values, if they are not few."""
        return self.lost if max(self._of, self._num_divisors) >= FEW else 0.0

    @property
    def lost(self) -> float:
        """The share of values that get no gradient any more, or of divisors that an eps replaces.

        Of data, it is that of values that are cut off, or replaced by larger ones. Infinities that
        are clamped, and divisors of 0, had none before.
        """
        if self._is_of_numbers:
            return self._num_replaced / self._num_divisors
        return self._num_lost / max(self._of, 1)

    @property
    def changed(self) -> float:
        return self.lost if self._is_of_numbers else self._num / max(self._of, 1)

    def add(self, before: Tensor, after: Tensor) -> None:
        old, new = before.detach(), after.detach()
        changed = old != new
        self._num += int(changed.sum())
        self._of += changed.numel()
        is_lost = (old.abs() > new.abs()) | ((old != 0) & ((new - old).abs() >= old.abs()))
        is_lost = changed if before.requires_grad else is_lost
        self._num_lost += int((is_lost & old.isfinite() & ~new.isinf()).sum())
        self.is_of_data |= not before.requires_grad
        self._may_be_labels |= torch.is_grad_enabled()
        self._is_left_out = bool(after[changed].isinf().any())
        is_of_limits = not self._is_left_out and bool((after[changed].abs() >= 1).any())
        has_rows = may_be_rows(before) and not is_of_limits
        self._rows = self._rows or (named_rows(changed) if has_rows else "")

    def add_divisors(self, before: Tensor, after: Tensor) -> None:
        replaced = ((after - before).abs() >= before.abs()) & before.isfinite() & after.isfinite()
        self._num_replaced += int(replaced.sum())
        self._num_divisors += before.numel()
        self._is_of_numbers |= bool((before[replaced] != 0).any())

    def __str__(self) -> str:
        if self._is_of_numbers and 2 * self._num_replaced > self._num_divisors >= FEW:
            of = f"{self._num_replaced:,} of {self._num_divisors:,}"
            return f"it replaces {of} divisors, which were smaller than it"
        if not self._num:
            return ""
        if self._is_left_out:
            places = f"{self._num:,} of {things(self._of, 'place')}{': ' * bool(self._rows)}"
            return f"it makes the quotient 0 in {places}{self._rows}"
        changed = f"it changes {self._num:,} of {things(self._of, 'value')}"
        if not self.is_of_data:
            return f"{changed}, which then get no gradient: check why they are out of range"
        if not (self._rows and self._may_be_labels):
            return changed
        return f"{changed} without a gradient; if they are labels, leave {self._rows} out instead"


def named_rows(bad: Tensor) -> str:
    """Return "row 3 of 32 (from 0)" for the rows with a True; empty if all or none have one."""
    return _named(bad.reshape(len(bad), -1).any(1), "row") if bad.dim() else ""


def named_entries(bad: Tensor) -> str:
    """Return :func:`named_rows`, and so the columns of a matrix."""
    columns = _named(bad.any(0), "column") if bad.dim() == 2 else ""
    return ", ".join(filter(None, (named_rows(bad), columns)))


def _named(bad: Tensor, what: str) -> str:
    found: list[int] = bad.nonzero().flatten().tolist()
    if not 0 < len(found) < len(bad):
        return ""
    if found[MOST_NAMED:]:
        return f"{len(found):,} of {len(bad):,} {what}s"
    *others, last = map(str, found)
    named = f"{what}s {', '.join(others)} and {last}" if others else f"{what} {last}"
    return f"{named} of {len(bad):,} (from 0)"


MOST_NAMED = 8  # the largest number of bad rows, or columns, that are named


def _is_in_call(
    slot: Slot, value: Any, args: tuple[Any, ...], told: str, around: Sequence[str]
) -> bool:
    """Return whether an edit inside a module can be made where the module is called or constructed.

    It cannot if the module passes a value of its own, such as a weight, or if another module
    constructed the module, such as a ``TransformerEncoderLayer``.
    """
    if isinstance(slot, str) and slot != CALL:
        return "{" in told or set(around) <= {"Sequential"}
    return is_given_to_module(args[0] if slot == CALL and args else value)


def _text(edit: Edit, function: str, slot: Slot, value: Any) -> str:
    text = edit.text(value)
    if text is not None and slot == 0 and writes_to_first(function):
        text = in_place(text)
    if text is None:
        raise NotApplicable
    return text


def call_of(calls: UserCalls, blame: Blame) -> UserCall | None:
    """Return the user's call that ran a bad op, or the op whose gradient it computes."""
    return calls.call_of(blame.reader) or calls.call_of(blame.forward_number)


def _holder(slot: Slot, given: list[Any], named: dict[str, Any], function: Any) -> tuple[Any, Any]:
    """Return the list or dictionary that holds an argument, and its index or name."""
    if isinstance(slot, str):
        if slot in parameters_of(function)[: len(given)]:
            return given, parameters_of(function).index(slot)
        named.setdefault(slot, None)
        return named, slot
    if slot < len(given):
        return given, slot
    if slot >= len(USUAL_NAMES) or USUAL_NAMES[slot] not in named:
        raise NotApplicable
    return named, USUAL_NAMES[slot]
