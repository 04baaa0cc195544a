"""Log of the calls that a training loop makes, with their results.

Arguments are stored by reference. A tensor that a kept call returned is stored as a reference to
that call, so a call is kept as long as its results, or calls that need them, are in use. Nothing is
computed. Only buffers, random states, and tensors that the loop overwrites are copied.
"""

from __future__ import annotations

import copy
import gc
import itertools
import math
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_grad_enabled, nn
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep._autocast import current_settings
from halfstep._common.machine import RandomStates, accelerators
from halfstep._common.module_names import replicated, without_wrappers
from halfstep._common.nested import items_of, map_plain, parts_of, tensors_in, tensors_reached
from halfstep._pytorch import autograd, compiler, modes, storages
from halfstep._pytorch.distributed import has_ranks
from halfstep._pytorch.storages import ByMemory
from halfstep._tools.measure import bytes_of, is_finite, is_mask
from halfstep._tools.replay.blame import names_in
from halfstep._tools.replay.kept_calls import (
    LARGEST_COPY,
    Given,
    Inside,
    KeptCall,
    Made,
    devices_of_autocast,
    is_model,
    name_of,
    needed_for,
    set_part,
    why_not_again,
)
from halfstep._tools.replay.undo import restore_container
from halfstep._tools.user_code import Place, is_users, user_place, whole_model
from halfstep._tools.watch.bad_steps import are_finite, have_finite_values
from halfstep._tools.watch.loads import Load

MOST_CALLS = 4096
"""The largest number of calls kept for a step; with more, all of them count as the last step's."""
MOST_MODELS = 256
"""The largest number of model calls with gradients that are kept since the last step."""
MOST_KEEPERS = 8  # the largest number of such calls that are repeated for what they keep
MOST_EVALUATED = 16  # the largest number of model calls without gradients that a replay can repeat
MOST_CHECKED = 256  # the largest number of values that are checked when a loop ends with an error
MOST_COPIED = 2**28
"""The largest size in bytes of all tensors that are copied in a step before the loop overwrites
them, and of those that are held since it wrote their values to others."""
OF_LISTS = "_foreach_"  # functions of a clip: to keep the gradients that it changes costs memory
_GAP = "something computed a tensor in it that cannot be called again"
_GAP_OF_COMPILED = (
    "a function that is compiled computed a tensor in it, which cannot be called again; "
    'torch.compiler.set_stance("force_eager") before the loop runs it as it is written'
)
_WRITES_NO_VALUES = (".data", "register_hook", "retain_grad", "requires_grad_")
_SUMS = {"__setitem__", "copy_", "lerp_", "index_copy_", "index_put_", "scatter_", "__iadd__"}
_SUMS |= {"add_", "sub_", "__isub__", "mul_", "__imul__", "index_add_", "scatter_add_", "addcmul_"}
_SIMPLE = {
    *(str, int, float, bool, complex, type(None), slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
}


class _Argument(NamedTuple):
    """Tensor argument of a call, with the call that made it and its version."""

    tensor: Tensor
    made: Made | None
    version: int


class Writes(NamedTuple):
    """What the loop has written to a float16 tensor."""

    place: Place  # of the last one
    largest: Tensor  # the largest magnitude, also of what it held before; inf if it is not known


class LoggedCall(NamedTuple):
    """Call to keep, and its tensor arguments."""

    call: KeptCall
    arguments: list[_Argument]


class _Entry(weakref.ref[Tensor]):
    __slots__ = ("key", "made", "version")
    key: int
    made: Made
    version: int


class CallLog:
    """The calls of this step, and those of the last step that are still in use."""

    def __init__(self) -> None:
        self._numbers = itertools.count()
        self._entries: dict[int, _Entry] = {}
        self._given: dict[int, list[weakref.ref[Given]]] = {}
        self._writes: ByMemory[KeptCall] = ByMemory()
        self._new: list[weakref.ref[KeptCall]] = []
        self._old: list[weakref.ref[KeptCall]] = []
        self._models: deque[weakref.ref[KeptCall]] = deque()
        self._evaluated: deque[list[weakref.ref[KeptCall]]] = deque()
        self._last: deque[KeptCall] = deque(maxlen=MOST_KEEPERS)  # of modules, in this step
        self._put: list[tuple[list[Given], Any, Any]] = []  # what reads a holder, it, and its copy
        self._before = self._first = self._num_copied = self._num_held = 0
        # The last call in this step in which the loop wrote to a tensor, without the tensor, and
        # where it ever wrote inf or NaN.
        self._last_writes: ByMemory[KeptCall] = ByMemory()
        self.spoilt_at: ByMemory[Place] = ByMemory()
        # Where it wrote to a tensor in any step, with the number of the call.
        self._written_at: MutableMapping[Tensor, tuple[int, Place]] = WeakTensorKeyDictionary()
        # The calls that made inf or NaN before the loop, or in its first step, and what they need.
        self._made_bad: MutableMapping[Tensor, tuple[Made, int]] = WeakTensorKeyDictionary()
        self._needed_for_bad: set[KeptCall] = set()
        self.dataset: object = None  # of the last batch of a DataLoader
        self.loads: ByMemory[Load] = ByMemory()  # of batches that code of the user makes
        self._wholes: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = (
            weakref.WeakKeyDictionary()
        )
        self._buffers = BufferCopies()
        self.raised: LoggedCall | None = None  # the last call, if it has raised an error
        self.asked: Made | None = None  # the condition that the loop has read last
        self.halves: ByMemory[Writes] = ByMemory()

    def begin(self) -> None:
        """Begin a new step. Its calls may use results of the last step, but not older ones.

        Sync: after the first step; one, if all values are finite that were made until then.
        """
        if not self._first:
            with unseen():
                self._keep_bad()
        self._turn()
        self._last_writes, self.loads = ByMemory(), ByMemory()
        self._num_copied = self._num_held = 0
        for each in (self._evaluated, self._models, self._last):
            each.clear()
        self._writes = ByMemory()

    def _turn(self) -> None:
        self._forget(self._old)
        self._old, self._new = self._new, []
        self._before, self._first = self._first, next(self._numbers)
        self._given.clear()

    def _keep_bad(self) -> None:
        """Keep the calls that made inf or NaN, which may strike in any later step."""
        found = [(each(), each) for each in self._entries.values()]
        values = [(t, each) for t, each in found if t is not None and bytes_of(t) <= LARGEST_COPY]
        if have_finite_values(tensor for tensor, _ in values):
            return
        for tensor, entry in values:
            is_new = tensor.grad_fn is None and tensor not in self._made_bad
            if is_new and not is_finite(tensor) and not is_mask(tensor):
                self._made_bad[tensor] = entry.made, entry.version
                self._needed_for_bad.update(needed_for([entry.made.call]))

    def made_bad(self, tensor: Tensor) -> Made | None:
        """Return what made a tensor bad before the second step, if nothing has written to it."""
        if not self._first:
            with unseen():
                self._keep_bad()
        made, version = self._made_bad.get(tensor, (None, 0))
        return made if version == autograd.version_of(tensor) else None

    def _forget(self, references: Iterable[weakref.ref[KeptCall]]) -> None:
        for reference in references:
            call = reference()
            if call is not None and call not in self._needed_for_bad:
                call.forget()

    @compiler.do_not_compile_alone
    def call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, is_drawing: bool = False
    ) -> LoggedCall | None:
        """Return a call with placeholders for its tensors, or None if it cannot be kept."""
        with unseen():
            is_of_lists = name_of(function).startswith(OF_LISTS)
            kept = self._placed(function, *(((), {}) if is_of_lists else (args, kwargs)))
            kept.call.gap = _GAP if is_of_lists else kept.call.gap
            if isinstance(function, nn.Module):
                self._note_module(kept.call, function)
            elif is_drawing:
                kept.call.random = RandomStates(accelerators())
            return kept
        return None  # unseen() has suppressed an error of a user's object

    def _placed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> LoggedCall:
        call, arguments = KeptCall(next(self._numbers), function, user_place()), list[_Argument]()
        call.has_grad = is_grad_enabled()

        def kept(value: Any) -> Any:
            return self._kept(value, call, arguments)

        call.args, call.kwargs = map_plain(kept, args), map_plain(kept, kwargs) if kwargs else None
        for device in devices_of_autocast():
            call.settings += (current_settings(device),)
        return LoggedCall(call, arguments)

    def _note_module(self, call: KeptCall, module: nn.Module) -> None:
        if module not in self._wholes and is_model(module):
            self._wholes[module] = weakref.ref(whole_model(module))
        if call.has_grad or module.training:
            call.random = RandomStates(accelerators())
        call.is_training = module.training
        self._last.append(call)
        call.forward = vars(replicated(module)).get("forward")
        call.buffers = self._buffers.of(module)
        if not is_model(module):
            return
        if not call.has_grad:  # drop the others, except those since the last few such calls
            self._evaluated.append([])
            if len(self._evaluated) > MOST_EVALUATED:
                self._forget(self._evaluated.popleft())
            return
        self._models.append(weakref.ref(call))
        if len(self._models) > MOST_MODELS:  # such as an evaluation without no_grad
            self._forget([self._models.popleft()])

    def _kept(self, value: Any, call: KeptCall, arguments: list[_Argument]) -> Any:
        """Return a placeholder for a value that is not a container."""
        if isinstance(value, Tensor):
            made, version = self.made_by(value), autograd.version_of(value)
            if made is not None and self.is_old(made.call) and _detaches(call):
                made = None  # only the value is needed, not the call that computed it
            arguments.append(_Argument(value, made, version))
            return self._placeholder(value, made, version, call)
        if type(value) in _SIMPLE:
            return value
        if isinstance(value, torch.Generator):
            call.generators += ((value, value.get_state()),)
            return value
        arguments += [_Argument(tensor, None, 0) for tensor in tensors_in([value])]
        return self._inside_of(value, call)

    def _placeholder(
        self, tensor: Tensor, made: Made | None, version: int, call: KeptCall
    ) -> Made | Given:
        if made is not None:
            written = self._writes.get(tensor)
            call.of += (made.call,) if written is None else (made.call, written)
            return made
        whole = tensor
        if tensor.grad_fn is not None:
            is_used = call.has_grad and not _detaches(call)
            call.gap = _gap_at(tensor) if is_used else call.gap
            tensor = tensor.detach().requires_grad_(is_used)
        known = self._given.setdefault(_number_of(tensor), [])
        found = known[-1]() if known else None
        if found is None or found.tensor is not tensor or found.version != version:
            found = Given(tensor, version, whole=None if whole is tensor else weakref.ref(whole))
            known.append(weakref.ref(found))
        call.given += (found,)
        return found

    def _inside_of(self, whole: Any, call: KeptCall) -> Any:
        """Return a placeholder for an object, or the object if no kept call made a part of it."""
        parts = dict(parts_of(whole))
        made = {name: found for name, part in parts.items() if (found := self.made_by(part))}
        known = {id(parts[name]) for name in made}
        others = [tensor for tensor in tensors_reached(whole) if id(tensor) not in known]
        call.of += tuple(found.call for found in made.values())
        call.given += tuple(Given(t, autograd.version_of(t)) for t in others if t.grad_fn is None)
        for tensor in others:
            call.gap = call.gap if tensor.grad_fn is None else _gap_at(tensor)
        if not made:
            return whole
        rest = copy.copy(whole)
        for name in made:
            set_part(rest, name, torch.empty(0))
        return Inside(rest, made)

    def with_keepers(self, calls: list[KeptCall]) -> list[KeptCall]:
        """Add the calls of modules that put again what ``calls`` read and a hook has kept."""
        given = [each for call in calls for each in call.given]
        given = [each for each in given if each.whole or not are_finite([each.value()])]
        kept = [tensor for each in given if (tensor := each.original()) is not None]
        places: dict[int, list[tuple[Any, Any, Any]]] = {id(tensor): [] for tensor in kept}
        with unseen():
            for whole in gc.get_referrers(*kept) if kept and self._last else ():
                holder = whole if type(whole) is list else items_of(whole)
                is_of_hooks = type(holder) is dict  # a list is, if the loop puts nothing there
                if type(holder) is list and whole is not kept:
                    is_of_hooks = all(id(item) in places for item in holder)
                if not is_of_hooks or {"__builtins__", "__module__"} & items_of(holder).keys():
                    continue  # what a script or a class holds is data
                before = holder.copy()
                self._put.append((given, holder, before))
                for key, item in items_of(holder).items():
                    if id(item) in places:
                        places[id(item)].append((holder, key, before))
        more = needed_for([*calls, *self._last])
        if not any(places.values()) or has_ranks() or why_not_again(more) is not None:
            return calls  # or several ranks would wait for each other
        for each in given:
            each.places = places.get(id(each.original()), ())
        return more

    def put_back(self) -> None:
        """Restore what repeated calls have put where hooks keep tensors."""
        for given, holder, before in self._put:
            restore_container(holder, before)
            for each in given:
                each.places = ()
        self._put.clear()

    def given_bad(self) -> tuple[KeptCall, Tensor] | None:
        """Return the first call of a module, in this or a just ended step, with bad data."""
        calls = (reference() for reference in self._new or self._old)
        for call in filter(None, calls):
            if isinstance(call.function, nn.Module):
                for given in call.given:
                    if not is_finite(given.value()):
                        return call, given.tensor
        return None

    def note_made(self, kept: LoggedCall, result: Any, *, is_effect: bool) -> None:
        """Note the tensors that a call returned or wrote to."""
        call, arguments = kept
        self.raised = None
        call.writes = tuple(
            position
            for position, (tensor, made, version) in enumerate(arguments)
            if made is not None
            and (autograd.version_of(tensor) != version or (is_effect and not position))
        )
        before = {id(argument.tensor) for argument in arguments}  # x.float() may return x
        results = tensors_reached(result)
        made = [(index, tensor) for index, tensor in enumerate(results) if id(tensor) not in before]
        for index, position in enumerate(call.writes, len(results)):
            tensor = arguments[position].tensor
            made.append((index, tensor))
            self._writes.put(tensor, call)
        call.makes_floats = any(t.is_floating_point() or t.is_complex() for _, t in made)
        for index, tensor in made:
            entry = _Entry(tensor, self._drop)
            entry.key, entry.made = id(tensor), Made(call, index)
            entry.version = autograd.version_of(tensor)
            self._entries[entry.key] = entry
            call.results += ((entry, entry.version),)
        if made:
            cast = made[0][1] if call.name in ("half", "to", "type") and not self._first else None
            if cast is not None and cast.dtype is torch.float16 and cast.numel() and call.at:
                self.halves.put(cast, Writes(call.at, _largest(arguments[0].tensor)))
            self._new.append(weakref.ref(call))
            if not call.has_grad and self._evaluated:
                self._evaluated[-1].append(self._new[-1])
            if len(self._new) > MOST_CALLS:
                self._turn()
        if call.buffers and call.is_training and not self._first:
            self._keep_spoiled(call)

    def _keep_spoiled(self, call: KeptCall) -> None:
        """Keep a call of a module that has made its buffers inf or NaN. Sync: one."""
        # Versions do not say what it wrote to: batch norm does not count its writes.
        if have_finite_values(buffer for _, _, buffer, *_ in call.buffers):
            return
        for _, _, buffer, _, values in call.buffers:
            if buffer not in self._made_bad and is_finite(values) and not is_finite(buffer):
                self._made_bad[buffer] = Made(call, -1), autograd.version_of(buffer)
                self._needed_for_bad.update(needed_for([call]))

    def _drop(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def writes_to_older(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Return whether a function writes to a tensor that no call of this step made."""
        is_found = False
        with unseen():
            if args and isinstance(args[0], Tensor):
                is_found = self.made_by(args[0]) is None
                # The loop itself makes a batch bad. Its values count as data from now on.
                is_bad = any(isinstance(v, float) and not math.isfinite(v) for v in args[1:])
                is_found |= is_bad and args[0].grad_fn is None
                self._note_write(function, args, kwargs, is_bad=is_bad)
        return is_found

    def _note_write(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, is_bad: bool
    ) -> None:
        has_values = name_of(function) not in _WRITES_NO_VALUES
        call = self._placed(function, args[1:] if has_values else (), kwargs).call
        if call.at is not None:
            self._written_at[args[0]] = call.number, call.at
            if is_bad:
                self.spoilt_at.put(args[0], call.at)
            if args[0].dtype is torch.float16:
                self._note_half(function.__name__, args, call.at)
        if has_values:
            self._last_writes.put(args[call.name == ".data="], call)
            self._num_held += sum(bytes_of(value) for value, _ in call.arguments())
            if self._num_held > MOST_COPIED:  # as of a large checkpoint that is loaded
                call.forget()

    def _note_half(self, name: str, args: Any, place: Place) -> None:
        """Note the largest value that is written to a float16 tensor, which may overflow there."""
        old = self.halves.get(args[0])
        largest = _largest(args[0]) if old is None else old.largest
        given = [each.to(largest.device) for each in tensors_in([args[1:]]) if each.numel()]
        norms = torch.stack([largest, *map(_largest, given)])
        self.halves.put(args[0], Writes(place, norms.amax() * (1 if name in _SUMS else math.inf)))

    def note_batch(self, batch: Any, dataset: object, functions: list[Any], indices: Any) -> None:
        """Note where a batch is made: the last function of the user's."""
        self.dataset, plain = dataset, [each for each in functions if type(each) is FunctionType]
        own = [each for each in plain if is_users(each.__code__.co_filename)]
        for function in own[:1]:
            place = Place(function.__code__, 0, function.__globals__)
            call, load = KeptCall(0, function, place), Load(dataset, functions[0], indices, place)
            call.forget()
            for tensor in tensors_in([batch]):
                self._last_writes.put(tensor, call)
                self.loads.put(tensor, load)

    def wrote(self, tensor: Tensor) -> tuple[Made | None, Place | None]:
        """Return what the loop last wrote to a tensor in this step, or made before, and where.

        The write is that to a tensor of ones, since what it held is lost.
        """
        call, spoilt = self._last_writes.get(tensor), self.spoilt_at.get(tensor)
        if spoilt is None and (known := self.made_bad(tensor)) is not None:
            return known, known.call.at
        at = spoilt or (None if call is None else call.at)
        if call is None or call.is_forgotten:
            return None, at
        again, made = copy.copy(call), list[KeptCall]()

        def source(value: Any) -> Any:
            entry = self._entries.get(id(value.tensor)) if type(value) is Given else None
            if entry is None or entry() is not value.tensor or entry.version != value.version:
                return value
            if entry.made.call.is_forgotten:  # as of statistics, whose writes do not count
                return value
            made.append(entry.made.call)  # in the last step, if the write has ended it
            return entry.made

        args, given = map_plain(source, call.args), Given(tensor, autograd.version_of(tensor))
        again.function, again.args = _on_ones, (call.function, given, *args)
        again.of, again.given = (*call.of, *made), (*call.given, given)
        return Made(again, 0), at

    def place_of(self, tensor: Tensor, *, is_new: bool = False) -> Place | None:
        """Return where the loop wrote to a tensor or made it; ``is_new``: in the last two steps."""
        number, place = self._written_at.get(tensor, (-1, None))
        entry = self._entries.get(id(tensor))
        if place is None and entry is not None and entry() is tensor:
            number, place = entry.made.call.number, entry.made.call.at
        return None if is_new and number < self._before else place

    def recent(self) -> Iterator[tuple[Tensor, Place]]:
        """Yield what the loop made or wrote to in this step or the last, and where, in order."""
        made = ((each.made.call, each()) for each in self._entries.values())
        found = [(call.number, tensor, call.at) for call, tensor in made]
        found += [(number, tensor, at) for tensor, (number, at) in self._written_at.items()]
        for number, tensor, at in sorted(found, key=lambda each: each[0]):
            if tensor is not None and at is not None and number >= self._before:
                yield tensor, at

    def is_old(self, call: KeptCall) -> bool:
        return call.number < self._first

    def made_by(self, tensor: Tensor) -> Made | None:
        """Return the kept call that made a tensor, or None if there is none."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry() is not tensor or entry.version != autograd.version_of(tensor):
            return None
        if tensor.grad_fn is not None and not entry.made.call.has_grad:
            return None  # made inside an autograd function that was not captured
        is_value = tensor.grad_fn is None or not is_grad_enabled()
        is_old = self.is_old(entry.made.call) or entry.made.call.is_forgotten
        return None if is_old and is_value else entry.made

    def keep_values(self, values: Iterable[Any]) -> None:
        """Copy arguments of earlier calls that this call may overwrite."""
        for value in values:
            if isinstance(value, Tensor):
                for reference in self._given.get(_number_of(value), ()):
                    given = reference()
                    if given is not None and self._num_copied < MOST_COPIED:
                        self._num_copied += given.keep()

    def model_of(self, calls: Iterable[KeptCall]) -> nn.Module | None:
        """Return the trained model: the first one called with gradients, else the first one called.

        If a method of an enclosing module called it, return the enclosing module.
        """
        called = [call for call in calls if is_model(call.function)]
        trained = (call.function for call in called if call.has_grad)
        model = next(trained, called[0].function if called else None)
        if not isinstance(model, nn.Module):
            return None
        reference = self._wholes.get(model)
        return (reference and reference()) or model

    def full_name(self, module: str, model: nn.Module | None) -> str:
        """Return a name with its model, if others have it: ``Actor.fc``, ``Critic[0].fc``."""
        wholes = dict.fromkeys(whole for each in self._wholes.values() if (whole := each()))
        names = {w: {without_wrappers(name) for name, _ in w.named_modules()} for w in wholes}
        owners = [whole for whole in wholes if module in names[whole]]
        if not module or len(owners) < 2:
            return module
        alike = [whole for whole in owners if type(whole) is type(model)]
        number = f"[{alike.index(model)}]" if len(alike) > 1 and model in alike else ""
        return f"{type(model).__name__}{number}.{module}"

    def name_in_models(self, tensor: Tensor) -> str:
        """Return the name of a tensor of any model that the loop has called, or an empty text."""
        named = ((names_in(model)(tensor), type(model).__name__) for model in self._wholes)
        return next((f"{name} of a model ({kind})" for name, kind in named if name), "")

    def first_bad(self) -> Made | None:
        """Return the first value of this step that is alive and not finite. Sync: many."""
        with modes.unseen_by_modes():
            entries = sorted(self._entries.values(), key=lambda entry: entry.made.call.number)
            for entry in entries[-MOST_CHECKED:]:
                tensor = entry()
                if tensor is None or self.is_old(entry.made.call):
                    continue
                if not is_finite(tensor) and not is_mask(tensor):
                    return entry.made
        return None

    def bad_at_end(self) -> Made | None:
        """Return the bad value for which a call, or the script, has raised an error. Sync: many.

        It is what the call was given, or what the last condition was computed of; if these are
        finite, the first bad value of this step.
        """
        raised, made = self.raised, list[Made | None]()
        if raised is not None:
            made += [each.made for each in raised.arguments]
        if self.asked is not None:
            calls = reversed(needed_for([self.asked.call]))
            made += [Made(call, n) for call in calls for n in range(len(call.results))]
        with modes.unseen_by_modes():
            for each in filter(None, made):
                tensor = each.call.results[each.position][0]()
                if tensor is not None and not is_finite(tensor) and not is_mask(tensor):
                    return each
        return self.first_bad()


@contextmanager
def unseen() -> Iterator[None]:
    """Hide the bookkeeping in the block from the loop, including its errors.

    Inspecting a user's object or tensor may raise any error; the call is then not kept. The user's
    modes and tensor subclasses do not see the tensor calls of the block.
    """
    with modes.no_function_modes(), modes.unseen_by_modes():
        try:
            yield
        except Exception as error:
            codes = {frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__)}
            handlers = map(signal.getsignal, signal.valid_signals())  # as one for a time limit
            if any(getattr(each, "__code__", None) in codes for each in handlers):
                raise


def _number_of(tensor: Tensor) -> int:
    """Return an id for the memory of a tensor, or for the tensor if it has no memory."""
    return storages.number_of_memory(tensor) or id(tensor)


def _gap_at(tensor: Tensor) -> str:
    return _GAP_OF_COMPILED if autograd.is_made_by_compiled_code(tensor) else _GAP


def _on_ones(function: Callable[..., Any], like: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Let a function write to a tensor of ones."""
    ones = torch.ones_like(like)
    function(ones, *args, **kwargs)
    return ones


def _largest(value: Tensor) -> Tensor:
    return value.detach().abs().amax().float()


def _detaches(call: KeptCall) -> bool:
    return call.name in ("detach", ".data")


class BufferCopies:
    """The latest copies of the buffers of models."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._owners: weakref.WeakKeyDictionary[nn.Module, list[tuple[nn.Module, str]]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, model: nn.Module) -> list[tuple[nn.Module, str, Tensor, int, Tensor]]:
        """Return the current buffers of a model, each with its version and a copy of its values."""
        if model not in self._owners:
            # `_buffers` is not a dictionary in torch.jit modules.
            self._owners[model] = [
                (module, name)
                for module in model.modules()
                for name, _ in module.named_buffers(recurse=False)
            ]
        found = []
        for owner, name in self._owners[model]:
            buffer = getattr(owner, name, None)
            if isinstance(buffer, Tensor):
                found.append((owner, name, buffer, *self._copy_of(buffer)))
        return found

    def _copy_of(self, buffer: Tensor) -> tuple[int, Tensor]:
        """Return version and copy of a buffer; reuse the last copy unless it was written to."""
        known = self._copies.get(id(buffer))
        if known is None or known[0]() is not buffer or known[1] != autograd.version_of(buffer):
            copied = buffer.detach().clone()
            known = (weakref.ref(buffer), autograd.version_of(buffer), copied)
            self._copies[id(buffer)] = known
        return known[1:]
