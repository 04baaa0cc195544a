"""Capture of the calls that a training loop makes, for a replay.

Calls of models and of PyTorch's functions are kept where the loop makes them; what they call
themselves is a part of them. Arguments are kept by reference, and a tensor that a kept call has
made as a reference to that call: a call is kept for as long as one of its results is in use, or a
call that needs it. Nothing is computed. Only buffers, the states of random generators, and what
the loop overwrites are copied.
"""

from __future__ import annotations

import copy
import itertools
import math
import signal
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, is_autocast_enabled, is_grad_enabled, nn

from halfstep._autocast.modules import replicated
from halfstep._autocast.region import current_settings
from halfstep._common.nested import map_plain, tensors_in, tensors_reached
from halfstep._common.patches import Patches
from halfstep._common.random_states import RandomStates, accelerators
from halfstep._common.top_level_calls import TopLevelCalls, not_compiled
from halfstep._diagnose.buffer_copies import BufferCopies
from halfstep._diagnose.function_kinds import Kind, kind_of, name_of
from halfstep._diagnose.kept_calls import (
    Given,
    Inside,
    KeptCall,
    Made,
    found_bad,
    is_model,
    parts_of,
    scale,
    set_part,
)
from halfstep._diagnose.user_code import Place, is_called_by_a_scaler, user_place, whole_model
from halfstep._numerics.measure import is_finite, is_mask
from halfstep._pytorch import autograd, compiler, data, modes, optim, storages, transforms
from halfstep._pytorch.storages import ByMemory
from halfstep._scaler.scaler import GradScaler

MOST_CALLS = 4096
"""The most calls of a step that are kept; older ones then count as those of the step before."""
MOST_MODELS = 256
"""The most calls of models with gradients that are kept since the last step."""
MOST_EVALUATED = 16
"""The most calls of models without gradients whose results are more than values."""
MOST_CHECKED = 256
"""The most values that are checked when a loop has ended with an error."""
MOST_COPIED = 2**28
"""The size in bytes of all that is copied in a step before the loop writes to it."""
MOST_READ = 1024
"""The most entries of an array that are checked when the loop reads it."""

_GAP = "something computed a tensor in it that cannot be called again"
_GAP_OF_COMPILED = (
    "a function that is compiled computed a tensor in it, which cannot be called again; "
    'torch.compiler.set_stance("force_eager") before the loop runs it as it is written'
)


_SIMPLE = {
    *(str, int, float, bool, complex, type(None), slice, type(Ellipsis)),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size),
}


class _Argument(NamedTuple):
    """Tensor among the arguments of a call, the call that has made it, and its version."""

    tensor: Tensor
    made: Made | None
    version: int


class _Kept(NamedTuple):
    """Call to be kept, and the tensors among its arguments."""

    call: KeptCall
    arguments: list[_Argument]


class _Entry(weakref.ref[Tensor]):
    """Reference to a tensor that a kept call has made."""

    __slots__ = ("key", "made", "version")
    key: int
    made: Made
    version: int


class _CallsOfFunctions(modes.FunctionMode):
    """Function mode that hands calls to a :class:`Capture`."""

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture

    @compiler.do_not_compile_alone
    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function, and keep the call."""
        kwargs = kwargs or {}
        if torch.compiler.is_compiling():
            return func(*args, **kwargs)
        kind = kind_of(name_of(func))
        if kind is Kind.LEFT_OUT or self._capture.is_left_out():
            return func(*args, **kwargs)
        return self._capture.call_function(func, kind, args, kwargs)


class Capture(TopLevelCalls):
    """Keeps the calls of a training loop.

    Args:
        is_here: Returns whether a call now is part of the watched training.
        before_model: Is called before a model is, with gradients enabled.
        before_backward: Is called before ``backward``, with its roots.
        after_read: Is called when the loop has read a value that is not finite, or has asked for
            such values and found some, with the tensor.

    Attributes:
        ends: The calls of ``backward`` in this step.
        written: What the loop last wrote to a tensor from before the step, such as the factor that
            it has multiplied gradients by.
        made_bad: Where it last wrote inf or NaN as a number in this step, as to a batch.
    """

    losses = ()  # a function mode sees them

    def __init__(
        self,
        is_here: Callable[[], bool],
        before_model: Callable[[], object],
        before_backward: Callable[[Any], object],
        after_read: Callable[[Made], object],
    ) -> None:
        super().__init__()
        self._is_here = is_here
        self._before_model, self._before_backward = before_model, before_backward
        self._after_read = after_read
        self._mode = _CallsOfFunctions(self)
        self._numbers = itertools.count()
        self._entries: dict[int, _Entry] = {}
        self._given: dict[int, list[weakref.ref[Given]]] = {}
        self._writes: ByMemory[KeptCall] = ByMemory()
        self._new: list[weakref.ref[KeptCall]] = []
        self._old: list[weakref.ref[KeptCall]] = []
        self._models: deque[weakref.ref[KeptCall]] = deque()
        self._evaluated: deque[list[weakref.ref[KeptCall]]] = deque()
        self._first = self._num_copied = 0
        self._is_paused = self._has_left = False
        self.ends: list[KeptCall] = []
        self.written: Made | None = None
        self.made_bad: Place | None = None
        self._wholes: weakref.WeakKeyDictionary[nn.Module, weakref.ref[nn.Module]] = (
            weakref.WeakKeyDictionary()
        )
        self._buffers = BufferCopies()

    @property
    def is_on(self) -> bool:
        """Whether calls are kept."""
        if not self._is_here():  # another thread must not go on for the one that steps
            return False
        if self._is_paused and not optim.optimizer_step_depth():
            self.pause(is_paused=False)  # the step has raised an error
        return not self._is_paused

    def pause(self, *, is_paused: bool) -> None:
        """Keep nothing while an optimizer steps, or go on."""
        if is_paused == self._is_paused:
            return
        self._is_paused = is_paused
        if not is_paused and self._has_left:
            self._mode.come_back()
        self._has_left = is_paused and self._mode.leave()

    def install(self, patches: Patches) -> None:
        """Put it around the calls until ``patches`` are undone; those of functions need more."""
        super().install(patches)
        for owner, name in transforms.CALLED_AS_A_WHOLE:
            patches.wrap(owner, name, self._around_transform)
        patches.wrap(GradScaler, "scale", self._around_scale)
        patches.wrap(data.LOADER_ITERATOR, "__next__", self._around_batch)
        patches.put(autograd.FUNCTION_BASE, "apply", classmethod(self._apply()))

    def keeping(self) -> AbstractContextManager[None]:
        """Keep the calls of functions in a block too."""
        return self._mode.active()

    @contextmanager
    def inside(self) -> Iterator[None]:
        """Keep nothing that is called in the block in this thread."""
        with super().inside(), self._mode.aside():
            yield

    def begin(self) -> None:
        """Begin another step; its calls may use results of the last one, but no older ones."""
        self._turn()
        self.ends, self.written, self.made_bad, self._num_copied = [], None, None, 0
        self._evaluated.clear()
        self._models.clear()
        self._writes = ByMemory()

    def _turn(self) -> None:
        _forget(self._old)
        self._old, self._new = self._new, []
        self._first = next(self._numbers)
        self._given.clear()

    # --- calls ------------------------------------------------------------------------------------

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a module, and keep the call."""
        if not _counts():
            return original(module, *args, **kwargs)
        if is_grad_enabled() and is_model(module):
            self._before_model()
        kept = self._call(module, args, kwargs)
        with self.inside():
            return self._done(kept, partial(original, module), args, kwargs)

    def call_function(
        self, function: Callable[..., Any], kind: Kind, args: Any, kwargs: Any
    ) -> Any:
        """Call a function of PyTorch, and keep the call if it returns or writes to a tensor."""
        if is_called_by_a_scaler():
            return function(*args, **kwargs)
        if kind is Kind.READS:
            result = function(*args, **kwargs)
            with _books():
                self._note_read(args[0], result)
            return result
        if kind is Kind.WRITES or "out" in kwargs:
            with _books():
                self._keep_values(args[:1] if kind is Kind.WRITES else [kwargs["out"]])
        if kind is Kind.WRITES and self._is_of_more_than_a_step(function, args, kwargs):
            return function(*args, **kwargs)
        kept = self._call(function, args, kwargs, is_drawing=kind is Kind.DRAWS)
        if kept is not None and autograd.goes_backward(function):
            self.ends.append(kept.call)
            self._before_backward(args[0] if args else kwargs.get("tensors", kwargs.get("outputs")))
        is_effect = kind is Kind.WRITES and function.__name__ != "__get__"
        return self._done(kept, function, args, kwargs, is_effect=is_effect)

    def _is_of_more_than_a_step(self, function: Callable[..., Any], args: Any, kwargs: Any) -> bool:
        """Return whether a function writes to what no call of this step has made."""
        is_found = False
        with _books():
            if args and isinstance(args[0], Tensor):
                if self.made_by(args[0]) is None:
                    is_found = True
                    self._note_write(function, args, kwargs)
                if any(map(_is_bad_number, args[1:])):
                    self.made_bad = user_place()
                    # A batch that the loop itself makes bad: its values are data from now on.
                    is_found |= args[0].grad_fn is None
        return is_found

    def _around_transform(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or self.is_left_out():
            return original(*args, **kwargs)
        if is_grad_enabled():
            self._before_model()
        kept = self._call(original, args, kwargs, is_drawing=True)
        if kept is not None and original.__name__ in transforms.GRADIENTS:
            self.ends.append(kept.call)
        with self.inside():
            return self._done(kept, original, args, kwargs)

    def _around_scale(
        self, original: Callable[..., Any], scaler: GradScaler, outputs: Any, *args: Any, **kw: Any
    ) -> Any:
        if torch.compiler.is_compiling() or self.is_left_out():
            return original(scaler, outputs, *args, **kw)
        kept = self._call(scale, (outputs,), {})
        with self.inside():
            return self._done(kept, partial(original, scaler), (outputs, *args), kw)

    def _around_batch(self, original: Callable[..., Any], loader: Any) -> Any:
        with self.inside():
            return original(loader)

    def _apply(self) -> Callable[..., Any]:
        """Return ``apply`` of the classes of ``torch.autograd.Function``."""
        base = autograd.FUNCTION_BASE

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            original = getattr(super(base, cls), "apply")  # noqa: B009 - of PyTorch's C++
            is_compiled = autograd.is_compiled_function(cls)
            if torch.compiler.is_compiling() or self.is_left_out() or is_compiled:
                return original(*args, **kwargs)
            kept = self._call(cls.apply, args, kwargs)
            with self.inside():
                return self._done(kept, original, args, kwargs)

        return apply

    def is_left_out(self) -> bool:
        """Return whether calls in this thread are no calls of the loop."""
        is_off = self._inside.is_inside or self._is_paused or not self._is_here()
        return is_off or not _counts()

    # --- keeping ----------------------------------------------------------------------------------

    @compiler.do_not_compile_alone
    def _call(
        self, function: Callable[..., Any], args: Any, kwargs: Any, *, is_drawing: bool = False
    ) -> _Kept | None:
        """Return a call with placeholders for its tensors, None if it cannot be kept."""
        with _books():
            kept = self._placed(function, args, kwargs)
            if isinstance(function, nn.Module):
                self._note_module(kept.call, function)
            elif is_drawing:
                kept.call.random = RandomStates(accelerators())
            return kept
        return None  # an object of the user's has raised an error

    def _placed(self, function: Callable[..., Any], args: Any, kwargs: Any) -> _Kept:
        call, arguments = KeptCall(next(self._numbers), function, user_place()), list[_Argument]()
        call.has_grad = is_grad_enabled()

        def kept(value: Any) -> Any:
            return self._kept(value, call, arguments)

        call.args, call.kwargs = map_plain(kept, args), map_plain(kept, kwargs) if kwargs else None
        for device in _devices():
            if is_autocast_enabled(device):
                call.settings += (current_settings(device),)
        return _Kept(call, arguments)

    def _note_module(self, call: KeptCall, module: nn.Module) -> None:
        """Note the state of a module that is called."""
        if module not in self._wholes and is_model(module):
            self._wholes[module] = weakref.ref(whole_model(module))
        if call.has_grad or module.training:
            call.random = RandomStates(accelerators())
        call.is_training = module.training
        call.forward = vars(replicated(module)).get("forward")
        call.buffers = self._buffers.of(module)
        if not is_model(module):
            return
        if not call.has_grad:
            self._forget_evaluated()
            return
        self._models.append(weakref.ref(call))
        if len(self._models) > MOST_MODELS:  # an evaluation that forgets no_grad
            _forget([self._models.popleft()])

    def _forget_evaluated(self) -> None:
        """Let go of calls without gradients, but those of the last evaluations of a model."""
        self._evaluated.append([])
        if len(self._evaluated) > MOST_EVALUATED:
            _forget(self._evaluated.popleft())

    def _kept(self, value: Any, call: KeptCall, arguments: list[_Argument]) -> Any:
        """Return a placeholder for what is no container."""
        if isinstance(value, Tensor):
            made, version = self.made_by(value), autograd.version_of(value)
            if made is not None and self.is_old(made.call) and _detaches(call):
                made = None  # its value counts, not what has computed it
            arguments.append(_Argument(value, made, version))
            return self._placeholder(value, made, version, call)
        if type(value) in _SIMPLE:
            return value
        if isinstance(value, torch.Generator):
            call.generators += ((value, value.get_state()),)
            return value
        arguments += [_Argument(each, None, 0) for each in tensors_in([value])]
        return self._inside_of(value, call)

    def _placeholder(
        self, tensor: Tensor, made: Made | None, version: int, call: KeptCall
    ) -> Made | Given:
        if made is not None:
            written = self._writes.get(tensor)
            call.of += (made.call,) if written is None else (made.call, written)
            return made
        if tensor.grad_fn is not None:
            is_used = call.has_grad and not _detaches(call)
            call.gap = _gap_at(tensor) if is_used else call.gap
            tensor = tensor.detach().requires_grad_(is_used)
        known = self._given.setdefault(_number_of(tensor), [])
        found = known[-1]() if known else None
        if found is None or found.tensor is not tensor or found.version != version:
            found = Given(tensor, version)
            known.append(weakref.ref(found))
        call.given += (found,)
        return found

    def _inside_of(self, whole: Any, call: KeptCall) -> Any:
        """Return a placeholder for an object; itself if no call has made a part of it."""
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

    @compiler.do_not_compile_alone
    def _done(
        self,
        kept: _Kept | None,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        *,
        is_effect: bool = False,
    ) -> Any:
        """Make a call, note which tensors it has made, and return its result."""
        result = function(*args, **kwargs)
        if kept is not None:
            with _books():
                self._note_made(kept, result, is_effect=is_effect)
        return result

    def _note_made(self, kept: _Kept, result: Any, *, is_effect: bool) -> None:
        call, arguments = kept
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
        for index, tensor in made:
            entry = _Entry(tensor, self._drop)
            entry.key, entry.made = id(tensor), Made(call, index)
            entry.version = autograd.version_of(tensor)
            self._entries[entry.key] = entry
            call.results += ((entry, entry.version),)
        if made:
            self._new.append(weakref.ref(call))
            if not call.has_grad and self._evaluated:
                self._evaluated[-1].append(self._new[-1])
            if len(self._new) > MOST_CALLS:
                self._turn()

    def _drop(self, entry: _Entry) -> None:
        if self._entries.get(entry.key) is entry:
            del self._entries[entry.key]

    def _note_write(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        """Note what the loop writes to a tensor from before the step, such as a gradient."""
        made = [found for a in args[1:] if isinstance(a, Tensor) and (found := self.made_by(a))]
        self.written = made[0] if made else self.written
        if any(map(_is_bad_number, args[1:])):
            copied = (args[0].detach().clone(), *args[1:])
            self.written = Made(self._placed(function, copied, kwargs).call, 0)

    def is_old(self, call: KeptCall) -> bool:
        """Return whether a call was made before this step."""
        return call.number < self._first

    def made_by(self, tensor: Tensor) -> Made | None:
        """Return the kept call that has made a tensor, None if there is none."""
        entry = self._entries.get(id(tensor))
        if entry is None or entry() is not tensor or entry.version != autograd.version_of(tensor):
            return None
        if tensor.grad_fn is not None and not entry.made.call.has_grad:
            return None  # inside of a function of autograd that was not seen as a whole
        is_value = tensor.grad_fn is None or not is_grad_enabled()
        is_old = self.is_old(entry.made.call) or entry.made.call.is_forgotten
        return None if is_old and is_value else entry.made

    def _keep_values(self, values: Iterable[Any]) -> None:
        """Copy what earlier calls were given and this one may overwrite."""
        for value in values:
            if isinstance(value, Tensor):
                for reference in self._given.get(_number_of(value), ()):
                    given = reference()
                    if given is not None and self._num_copied < MOST_COPIED:
                        self._num_copied += given.keep()

    def _note_read(self, tensor: Any, value: Any) -> None:
        """Note that the loop has read a value, if it says that something is not finite."""
        made = self.made_by(tensor) if isinstance(tensor, Tensor) else None
        if made is None:
            return
        if isinstance(value, bool):
            bad = found_bad(made, is_true=value)
            if bad is not None:
                self._after_read(bad)
        elif tensor.is_floating_point() and tensor.numel() <= MOST_READ and not is_finite(tensor):
            self._after_read(made)

    def model_of(self, calls: Iterable[KeptCall]) -> nn.Module | None:
        """Return the model that is trained: the first one called with gradients, or at all.

        That is the one that it is a part of, if a method of that called it.
        """
        called = [call for call in calls if is_model(call.function)]
        trained = (call.function for call in called if call.has_grad)
        model = next(trained, called[0].function if called else None)
        if not isinstance(model, nn.Module):
            return None
        reference = self._wholes.get(model)
        return (reference and reference()) or model

    def first_bad(self) -> Made | None:
        """Return the first value of this step that is not finite and still there. Sync: many."""
        with modes.unseen_by_modes():
            entries = sorted(self._entries.values(), key=lambda entry: entry.made.call.number)
            for entry in entries[-MOST_CHECKED:]:
                tensor = entry()
                if tensor is None or self.is_old(entry.made.call):
                    continue
                if not is_finite(tensor) and not is_mask(tensor):
                    return entry.made
        return None


@compiler.do_not_compile_alone
def _counts() -> bool:
    """Return whether a call now is part of a loop, not of a backward pass or of a tracer."""
    is_elsewhere = autograd.backward_number() >= 0 or modes.is_jit_tracing()
    return not is_elsewhere and not transforms.are_active()


@contextmanager
def _books() -> Iterator[None]:
    """Keep books in a block that the loop does not see.

    Objects and tensors of the user's own may raise any error when they are looked through; the call
    is then not kept. No mode or subclass of the user's sees what is asked of tensors.
    """
    with modes.no_function_modes(), modes.unseen_by_modes():
        try:
            yield
        except Exception as error:
            if _is_of_a_signal(error):
                raise


def _is_of_a_signal(error: Exception) -> bool:
    """Return whether a signal handler of the loop has raised an error, such as a time limit."""
    handlers = {getattr(signal.getsignal(n), "__code__", None) for n in signal.valid_signals()}
    return any(frame.f_code in handlers for frame, _ in traceback.walk_tb(error.__traceback__))


def _forget(references: Iterable[weakref.ref[KeptCall]]) -> None:
    for reference in references:
        call = reference()
        if call is not None:
            call.forget()


def _number_of(tensor: Tensor) -> int:
    """Return what tells the memory of a tensor from others, or the tensor if it has none."""
    return storages.number_of_memory(tensor) or id(tensor)


def _gap_at(tensor: Tensor) -> str:
    return _GAP_OF_COMPILED if autograd.is_made_by_compiled_code(tensor) else _GAP


def _is_bad_number(value: object) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _detaches(call: KeptCall) -> bool:
    return name_of(call.function) in ("detach", ".data")


@cache
def _devices() -> tuple[str, ...]:
    """Return the device types of this machine that have autocast."""
    kind = torch.accelerator.current_accelerator()
    found = ("cpu",) if kind is None or kind.type == "cpu" else ("cpu", kind.type)
    return tuple(filter(torch.amp.is_autocast_available, found))
