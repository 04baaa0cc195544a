"""Kept calls of a training loop, and their repetition in a replay.

halfstep cannot run an iteration of a loop again. Instead, it keeps the loop's calls of models, of
PyTorch functions and of ``backward``, and repeats those that computed the loss. Other code in the
loop (reading a batch, printing, an optimizer step) is not repeated; its results are arguments.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, is_autocast_enabled, nn

from halfstep._autocast import Region, Settings, autocast
from halfstep._common.machine import RandomStates, accelerators
from halfstep._common.module_names import replicated
from halfstep._common.nested import items_of, map_plain, tensors_in, tensors_reached
from halfstep._pytorch import autograd, modes
from halfstep._scaler import GradScaler, Static
from halfstep._tools.measure import bytes_of
from halfstep._tools.replay.observer import restoring
from halfstep._tools.user_code import CALLED_AGAIN, Place

LARGEST_COPY = 2**26
"""The size in bytes of the largest tensor that is copied before the loop writes to it."""
VIEWS = {".T", ".mT", ".H", ".mH", ".real", ".imag", ".data"}
"""Tensor properties whose values are tensors."""


def name_of(function: Any) -> str:
    """Return the name of a function; for a property's getter, ``.`` and the property's name."""
    name: str = getattr(function, "__name__", "")
    if name == "__get__":
        return f".{function.__self__.__name__}"
    return ".data=" if name == "__set__" and function.__self__.__name__ == "data" else name


@dataclass(frozen=True, slots=True)
class Made:
    """Placeholder for an argument: a tensor by its position in the results of an earlier call."""

    call: KeptCall
    position: int


@dataclass(eq=False, slots=True, weakref_slot=True)
class Given:
    """Placeholder for an argument: a tensor that no kept call made."""

    tensor: Tensor  # tensor; detached if code that was not kept computed it
    version: int  # version counter of the tensor at the time of the call
    copy: Tensor | None = None  # a copy of the values, made before the loop overwrites the tensor
    whole: weakref.ref[Tensor] | None = None  # what was detached
    # Where a call may have put it: a list or dictionary, the key there, and a copy of that.
    places: Sequence[tuple[Any, Any, Any]] = ()

    @property
    def has_changed(self) -> bool:
        """Whether the tensor was overwritten without a copy."""
        is_read_only = self.tensor.is_inference()
        return self.copy is None and not is_read_only and self.tensor._version != self.version

    def keep(self) -> int:
        """Copy the values before they change; return the number of bytes copied."""
        if self.copy is not None or bytes_of(self.tensor) > LARGEST_COPY or self.has_changed:
            return 0
        with torch.no_grad():
            self.copy = self.tensor.clone().requires_grad_(self.tensor.requires_grad)
        return bytes_of(self.tensor)

    def value(self) -> Tensor:
        return self.tensor if self.copy is None else self.copy

    def original(self) -> Tensor | None:
        return self.tensor if self.whole is None else self.whole()

    def again(self) -> Tensor:
        """Return what a repeated call has put in place of the tensor, or else its value."""
        for holder, key, before in self.places:
            now = items_of(holder).get(key)
            if isinstance(now, Tensor) and all(now is not v for v in items_of(before).values()):
                return now
        return self.value()


@dataclass(frozen=True, slots=True)
class Inside:
    """Placeholder for an argument: an object of a user's class, with placeholders for its parts."""

    like: Any
    parts: dict[str, Made]


@dataclass(eq=False, slots=True, weakref_slot=True)
class KeptCall:
    """Call of a model, of a function, of ``scale`` or of ``backward``."""

    number: int  # number of the call; later calls have larger numbers
    # The function or module; for any scaler's scale, the scale of this module.
    function: Callable[..., Any]
    at: Place | None
    args: Any = ()  # arguments, with placeholders for tensors
    kwargs: Any = None
    of: tuple[KeptCall, ...] = ()  # calls that made the tensors it uses, or wrote to them
    given: tuple[Given, ...] = ()  # other tensors it uses
    settings: tuple[Settings, ...] = ()  # settings of autocast around it
    has_grad: bool = True
    random: RandomStates | None = None  # states of random generators, if it draws numbers
    # The generators among its arguments, with their states.
    generators: tuple[tuple[torch.Generator, Tensor], ...] = ()
    # The buffers of the model: module, name, tensor, its version, and a copy of the values.
    buffers: Sequence[tuple[nn.Module, str, Tensor, int, Tensor]] = ()
    # The replacement of the model's own forward, if there was one at the call.
    forward: Callable[..., Any] | None = None
    is_training: bool = True
    writes: tuple[int, ...] = ()  # positions of the tensor arguments that it wrote to
    gap: str | None = None  # reason why it cannot be repeated exactly; None if it can
    is_forgotten: bool = False
    makes_floats: bool = True  # whether a result of it may have a gradient
    # References to its results, each with its version.
    results: tuple[tuple[weakref.ref[Tensor], int], ...] = ()

    @property
    def name(self) -> str:
        return name_of(self.function)

    @property
    def is_constant(self) -> bool:
        """Whether it makes a tensor from numbers alone, as ``torch.tensor`` does."""
        return not (self.of or self.given or isinstance(self.function, nn.Module))

    def still_there(self) -> list[Tensor] | None:
        """Return its results if all are alive and none was written to, else None."""
        found = [(reference(), version) for reference, version in self.results]
        same = [t for t, version in found if t is not None and t._version == version]
        return same if len(same) == len(found) else None

    def placeholders(self) -> list[Any]:
        """Return all that it was given, out of containers."""
        found: list[Any] = []
        map_plain(found.append, (self.args, self.kwargs))
        return found

    def arguments(self) -> Iterator[tuple[Tensor, KeptCall | None]]:
        """Yield its tensor arguments that are alive, each with the call that made it, if any."""
        for each in self.placeholders():
            tensor = _tensor_of(each)
            if tensor is not None:
                yield tensor, each.call if type(each) is Made else None

    def forget(self) -> None:
        """Drop everything that it references, so that chains of calls cannot grow without limit."""
        self.args, self.kwargs, self.of, self.given = (), None, (), ()
        self.random, self.buffers = None, ()
        self.is_forgotten = True

    def tensors(self, result: Any, args: Any, kwargs: Any) -> list[Tensor]:
        """Return the tensors that positions refer to: results, then arguments written to."""
        found = tensors_reached(result)
        if self.writes:
            arguments = list(tensors_in([args, kwargs]))
            found += [arguments[position] for position in self.writes]
        return found


def _tensor_of(placeholder: Any) -> Tensor | None:
    """Return the tensor that a placeholder stands for, if it is alive."""
    if type(placeholder) is Made and placeholder.position < len(placeholder.call.results):
        return placeholder.call.results[placeholder.position][0]()
    return placeholder.value() if type(placeholder) is Given else None


@contextmanager
def given_others(
    calls: Sequence[KeptCall], pairs: Sequence[tuple[Tensor | KeptCall, Tensor]]
) -> Iterator[None]:
    """Give calls the second of each pair in the block, in place of the first, or of its result."""
    others = {id(each): Given(other, 0) for each, other in pairs}
    before = [(call, call.args, call.kwargs) for call in calls]

    def other(placeholder: Any) -> Any:
        tensor = _tensor_of(placeholder)
        known = getattr(placeholder, "call", None) if tensor is None else tensor
        return others.get(id(known), placeholder)

    for call, *given in before:
        call.args, call.kwargs = map_plain(other, given)
    try:
        yield
    finally:
        for call, args, kwargs in before:
            call.args, call.kwargs = args, kwargs


def is_model(function: object) -> TypeGuard[nn.Module]:
    return isinstance(function, nn.Module) and any(True for _ in function.parameters())


def needed_for(ends: Sequence[KeptCall]) -> list[KeptCall]:
    """Return ``ends`` and all calls that they depend on, in order."""
    found = set(ends)
    stack = list(ends)
    while stack:
        for call in stack.pop().of:
            if call not in found:
                found.add(call)
                stack.append(call)
    return sorted(found, key=lambda call: call.number)


def may_learn_from(call: KeptCall) -> bool:
    """Return whether a trained model made what a call returns, with no whole numbers in between.

    Else it is a metric, such as the accuracy of ``logits.argmax(1)``.
    """
    seen, stack = set[KeptCall](), [call]
    while stack:
        call = stack.pop()
        if call.makes_floats and call not in seen:
            if call.has_grad and is_model(call.function):
                return True
            stack += call.of
        seen.add(call)
    return False


def weights_of(calls: Iterable[KeptCall]) -> list[Tensor]:
    """Return the parameters and buffers of the called modules and the tensors given to calls.

    Of those that calls made, weights are returned, as in the first step. There may be duplicates.
    """
    found: list[Tensor] = []
    for call in calls:
        found += [given.tensor for given in call.given]
        made = (reference() for reference, _ in call.results)
        found += [each for each in made if each is not None and each.is_leaf and each.requires_grad]
        if isinstance(call.function, nn.Module):
            found += [*call.function.parameters(), *(buffer for _, _, buffer, *_ in call.buffers)]
    return found


def trained_by(calls: Iterable[KeptCall]) -> set[int]:
    """Return the ids of the weights that calls train."""
    return {id(each) for each in weights_of(calls) if each.requires_grad and each.is_leaf}


def gap_in(calls: Sequence[KeptCall]) -> str | None:
    """Return why a part of the calls is not repeated, or None if everything is."""
    return next((call.gap for call in calls if call.gap is not None), None)


def why_not_again(calls: Sequence[KeptCall]) -> str | None:
    """Return why calls cannot be repeated at all, or None if they can."""
    if not calls:
        return "no loss was seen"
    for call in calls:
        if call.is_forgotten:
            return "it uses a tensor from more than one optimizer step before, too old to repeat"
        for given in call.given:
            if given.has_changed and _reads_values(call, given):
                shape = ", ".join(map(str, given.tensor.shape))
                return f"an input of shape [{shape}] was written to in place afterwards"
    return None


def _reads_values(call: KeptCall, given: Given) -> bool:
    """Return whether a call reads the values of a tensor, as ``x.view_as(given)`` does not."""
    is_shape = call.name.endswith(("_as", "_like"))
    return not (is_shape and given in call.args[call.name.endswith("_as") :][:1])


def scale(outputs: Any) -> Any:
    """Stand in for the ``scale`` of a scaler in kept calls; a replay has its own scaler."""
    return outputs


_SAYS_BAD = {"isnan", "isinf", "isneginf", "isposinf", "ne", "__ne__"}
_SAYS_GOOD = {"isfinite", "eq", "__eq__"}
_SAME = {
    *("any", "all", "sum", "max", "min", "stack", "cat"),
    *("logical_or", "__or__", "bitwise_or", "_is_all_true"),
}
_COPIES = {"detach", "clone", "float", "double", "to", "cpu", *VIEWS}
_OPPOSITE = {"logical_not", "__invert__", "bitwise_not"}


def found_bad(answer: Made, *, is_true: bool) -> Made | None:
    """Return the tensor that is not finite according to an answer, or None.

    If ``torch.isnan(loss).any()`` ``is_true``, that is ``loss``.
    """
    call = answer.call
    name = call.name
    asked = [each for each in call.placeholders() if type(each) is Made]
    if name in _SAYS_BAD | _SAYS_GOOD:
        is_comparison = name.strip("_") in ("ne", "eq")
        if is_comparison and (len(asked) != 2 or asked[0] != asked[1]):
            return None  # only ``loss != loss`` tests for NaN
        return asked[0] if asked and is_true == (name in _SAYS_BAD) else None
    if name in _SAME | _OPPOSITE:
        is_true = is_true != (name in _OPPOSITE)
        return next(filter(None, (found_bad(part, is_true=is_true) for part in asked)), None)
    return None


def copied_from(made: Made) -> Made:
    """Return the source of a copy, such as ``loss`` for ``loss.detach().cpu()``."""
    while made.call.name in _COPIES:
        source = made.call.args[0]
        if type(source) is not Made:
            break
        made = source
    return made


# --- repetition -----------------------------------------------------------------------------------


@cache
def _devices() -> tuple[str, ...]:
    """Return the device types of this machine that have autocast."""
    kind = torch.accelerator.current_accelerator()
    found = ("cpu",) if kind is None or kind.type == "cpu" else ("cpu", kind.type)
    return tuple(filter(torch.amp.is_autocast_available, found))


def devices_of_autocast() -> list[str]:
    """Return the device types for which autocast is enabled."""
    return [device for device in _devices() if is_autocast_enabled(device)]


@contextmanager
def outside_of_contexts() -> Iterator[None]:
    """Run a block outside of the loop's current autocast and checkpoint.

    Each kept call has its own settings, and a replay may run in the middle of a later step.
    """
    with ExitStack() as stack:
        stack.enter_context(autograd.saving_as_always())
        for device in devices_of_autocast():
            stack.enter_context(autocast(device, enabled=False))
        yield


def step_of(
    calls: Sequence[KeptCall],
    root: Made | None,
    scale: float | None,
    results: Callable[[], Sequence[Tensor]] = tuple,
) -> Callable[[], object]:
    """Return a function that runs :func:`call_again` at a scale, with its own scaler.

    It also returns ``results``, such as buffers, as they are then.
    """
    called = dict.fromkeys(c.function for c in calls if isinstance(c.function, nn.Module))

    def step(*modules: nn.Module) -> object:
        # Make the scaler inside the replay; outside, it would count as a scaler of the script.
        ours: GradScaler | None = None
        if scale:
            ours = GradScaler(init_scale=scale, schedule=Static(), process_group="local")
        return call_again(calls, root, ours, modules), results()

    return partial(step, *called)  # a replay saves the state of modules in the arguments


def call_again(
    calls: Sequence[KeptCall],
    root: Made | None,
    scaler: GradScaler | None,
    modules: Sequence[nn.Module],
) -> object:
    """Repeat calls in order; return the value of ``root``, or else the results of the last call.

    If ``root`` is a loss, ``backward`` is called on it. The scaler scales losses where the run did;
    it is None if losses are not scaled. The gradients of the modules are cleared first.
    """
    made: dict[KeptCall, list[Tensor]] = {}
    for module in modules:
        module.zero_grad()
    is_scaled = any(call.function is scale for call in calls)
    for call in calls:
        by_run = scaler if call.function is scale else None
        if by_run is None and call.name == "backward" and not is_scaled:
            by_run = scaler  # `halfstep run --amp` scales inside backward
        made[call] = _again(call, made, by_run)
    if root is None:
        return made[calls[-1]]
    value = made[root.call][root.position]
    if value.requires_grad and value.ndim == 0:  # a loss that the loop dropped before backward
        torch.autograd.backward(value)
    return value


def _again(
    call: KeptCall, made: dict[KeptCall, list[Tensor]], scaler: GradScaler | None
) -> list[Tensor]:
    """Repeat one call with its autocast settings and random states; return its tensors."""
    at = call.at  # noqa: F841 - read from the frame, see CALLED_AGAIN
    if call.random is not None:
        call.random.restore()
    for module, name, buffer, version, values in call.buffers:
        if autograd.version_of(buffer) != version:
            with torch.no_grad(), restoring.on():
                buffer.copy_(values)
        if getattr(module, name) is not buffer:  # call replaced the buffer
            setattr(module, name, buffer)
    function: Callable[..., Any] = call.function
    if isinstance(function, nn.Module) and function.training != call.is_training:
        function.train(call.is_training)
    args, kwargs = map_plain(lambda value: _value(value, made), (call.args, call.kwargs or {}))
    if scaler is not None:
        args = (scaler.scale(args[0]), *args[1:])
    with ExitStack() as stack:
        for generator, state in call.generators:
            stack.callback(generator.set_state, generator.get_state())
            generator.set_state(state)
        stack.enter_context(torch.set_grad_enabled(call.has_grad))
        if call.is_constant:  # observers treat it as a value from before the step
            there = call.still_there()
            if there is not None:
                return there
            function = modes.on_default_device(function)
            stack.enter_context(modes.unseen_by_modes())
        for settings in call.settings:
            stack.enter_context(Region(settings))
        if isinstance(function, nn.Module) and call.forward is not None:
            # Lightning replaces forward to route one call of DDP to training_step.
            vars(replicated(function))["forward"] = call.forward
        return call.tensors(function(*args, **kwargs), args, kwargs)


CALLED_AGAIN.add(_again.__code__)


def data_again(argument: object) -> Tensor | None:
    """Return a tensor argument of a call, made again if it is gone; None if a model made it.

    It may be drawn; random states are restored.
    """
    tensor = _tensor_of(argument)
    if tensor is not None or type(argument) is not Made:
        return tensor
    calls, made = needed_for([argument.call]), dict[KeptCall, list[Tensor]]()
    # What a list or an array holds may have changed since a tensor was made of it.
    is_other = any(each.is_constant and each.random is None for each in calls)
    is_other |= any(isinstance(each.function, nn.Module) for each in calls)
    if is_other or why_not_again(calls):
        return None
    states = RandomStates(accelerators())
    try:
        with modes.unseen_by_modes():
            for call in calls:
                made[call] = _again(call, made, None)
    finally:
        states.restore()
    return made[argument.call][argument.position]


def _value(placeholder: Any, made: dict[KeptCall, list[Tensor]]) -> Any:
    if type(placeholder) is Made:
        return made[placeholder.call][placeholder.position]
    if type(placeholder) is Given:
        return placeholder.again()
    if type(placeholder) is Inside:
        whole = copy.copy(placeholder.like)
        for name, part in placeholder.parts.items():
            set_part(whole, name, made[part.call][part.position])
        return whole
    return placeholder


def set_part(whole: Any, name: str, part: Tensor) -> None:
    """Set a part that :func:`parts_of` named."""
    if isinstance(whole, dict):
        whole[name] = part
    else:
        object.__setattr__(whole, name, part)
