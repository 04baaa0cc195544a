"""Capture of the calls in an iteration of a training loop, and their repetition in a replay.

halfstep cannot run a loop again, so it repeats the calls made in it outside of other modules: those
of models and loss functions. Arguments are kept by reference. An argument that an earlier call
returned, or a view of one, is kept as a reference to that call. Nothing is computed, and only
buffers and the states of random generators are copied.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from halfstep._autocast.modules import replicated
from halfstep._autocast.region import Region, Settings, current_settings
from halfstep._common.nested import map_plain, tensors_in
from halfstep._common.random_states import RandomStates, accelerators
from halfstep._common.top_level_calls import TopLevelCalls, not_compiled
from halfstep._diagnose.diagnosis import Line
from halfstep._diagnose.user_code import CALLED_AGAIN, user_line
from halfstep._numerics.measure import is_finite
from halfstep._pytorch import autograd, compiler, modes
from halfstep._scaler.rules import Static
from halfstep._scaler.scaler import GradScaler

# Nodes of autograd whose results have the entries of their inputs in the same order.
_SAME_ENTRIES = (
    "ViewBackward0",
    "UnsafeViewBackward0",
    "ReshapeAliasBackward0",
    "ToCopyBackward0",
    "SqueezeBackward0",
    "SqueezeBackward1",
    "UnsqueezeBackward0",
    "CloneBackward0",
    "AliasBackward0",
)


Link = tuple[int, int]
"""The number of a node of autograd, and the index of one of its results. Keeps no graph alive."""


@dataclass(frozen=True)
class EarlierOutput:
    """Placeholder of an argument: a tensor by its index among the results of an earlier call."""

    call: int
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class KeptCall:
    """Call of a model or of a loss function.

    Attributes:
        args: Its arguments, with :class:`EarlierOutput` for tensors that earlier calls returned.
        given: The other tensors, with their versions.
        settings: The settings of autocast around it.
        random: The states of random generators; None for a loss, which needs none.
        buffers: The buffers of the model, with their values.
        forward: What was put in place of the model's own ``forward``, for this call or for good.
        links: The links of its results; a tensor may be gone when they are needed.
        seeds: The gradients of its results without dimensions, once they have arrived.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    given: list[tuple[Tensor, int]]
    settings: list[Settings]
    line: Line | None
    random: RandomStates | None = None
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    forward: Callable[..., Any] | None = None
    is_training: bool = True
    links: list[Link | None] = field(default_factory=list)
    seeds: dict[int, Tensor] = field(default_factory=dict)


def call_again(
    calls: Sequence[KeptCall],
    roots: Sequence[tuple[int, int]],
    scaler: GradScaler | None,
    at: float,
) -> object:
    """Repeat all calls and go backward from the losses; return the results of the calls.

    Args:
        calls: The calls, in order.
        roots: The outputs that went into ``backward``, for those without a gradient.
        scaler: Multiplies a loss as the scaler of the run does; None for losses without a scale.
        at: The scale of the gradients that have arrived.
    """
    made: list[list[Tensor]] = []
    losses: list[Tensor] = []
    for module in {call.function for call in calls if is_model(call.function)}:
        module.zero_grad()
    for number, call in enumerate(calls):
        if losses and is_model(call.function):  # the next batch of accumulation
            _backward(scaler, losses)
        made.append(list(tensors_in([_again(call, made)])))
        for index, output in enumerate(made[-1]):
            seed = call.seeds.get(index)
            if not output.requires_grad:
                continue
            if seed is not None:
                losses.append(output * (seed.float() / at))
            elif (number, index) in roots:
                losses.append(output)
    if losses:
        _backward(scaler, losses)
    return made


def _backward(scaler: GradScaler | None, losses: list[Tensor]) -> None:
    total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    losses.clear()
    torch.autograd.backward(total if scaler is None else scaler.scale(total))


def is_model(function: object) -> TypeGuard[nn.Module]:
    """Return whether a function is a module with parameters."""
    return isinstance(function, nn.Module) and any(True for _ in function.parameters())


def _again(call: KeptCall, made: list[list[Tensor]]) -> Any:
    """Repeat one call, with its autocast and its random numbers."""
    line = call.line  # noqa: F841 - read from this frame, see CALLED_AGAIN
    if call.random is not None:
        call.random.restore()
    for buffer, values in call.buffers:
        with torch.no_grad():
            buffer.copy_(values)
    if isinstance(call.function, nn.Module) and call.function.training != call.is_training:
        call.function.train(call.is_training)
    args, kwargs = map_plain(
        lambda value: _output(value, made) if isinstance(value, EarlierOutput) else value,
        (call.args, call.kwargs),
    )
    with ExitStack() as stack:
        for settings in call.settings:
            stack.enter_context(Region(settings))
        if isinstance(call.function, nn.Module) and call.forward is not None:
            # That of Lightning sends one call of DistributedDataParallel to training_step.
            vars(replicated(call.function))["forward"] = call.forward
        return call.function(*args, **kwargs)


CALLED_AGAIN.add(_again.__code__)


def _output(earlier: EarlierOutput, made: list[list[Tensor]]) -> Tensor:
    output = made[earlier.call][earlier.index]
    is_cast = output.dtype is not earlier.dtype and earlier.dtype is torch.float32
    output = output.float() if is_cast else output
    return output if tuple(output.shape) == earlier.shape else output.reshape(earlier.shape)


def same_entries(tensor: Tensor) -> Iterator[Link]:
    """Yield the links of a tensor, back to the op that made its entries."""
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None:
        yield autograd.sequence_number(node), number
        following = node.next_functions[0] if node.name() in _SAME_ENTRIES else (None, 0)
        node, number = following


MOST_CALLS = 256
"""The most calls of an iteration that are kept."""


class Capture(TopLevelCalls):
    """Keeps the calls of an iteration.

    Args:
        is_here: Returns whether a call now is part of the watched training.

    Attributes:
        gap: Why a part of the iteration cannot be replayed, None if all of it can.
    """

    def __init__(self, is_here: Callable[[], bool]) -> None:
        super().__init__()
        self._is_here = is_here
        self.gap: str | None = None
        self._calls: list[KeptCall] = []
        self._roots: list[tuple[int, int]] = []
        self._buffers: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._owners: weakref.WeakKeyDictionary[nn.Module, list[tuple[nn.Module, str]]] = (
            weakref.WeakKeyDictionary()
        )

    @property
    def is_on(self) -> bool:
        """Whether calls are kept."""
        return self._is_here()

    def begin(self) -> None:
        """Begin another iteration, without calls."""
        self._calls, self._roots, self.gap = [], [], None

    @property
    def model(self) -> nn.Module | None:
        """The first module with parameters that was called."""
        models = (call.function for call in self._calls if is_model(call.function))
        return next(models, None)

    # --- keeping ----------------------------------------------------------------------------------

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        """Call a module, and keep the call."""
        if not _counts():
            return original(module, *args, **kwargs)
        call = self._before(module, args, kwargs)
        call.random = RandomStates(accelerators())
        call.is_training = module.training
        call.forward = vars(replicated(module)).get("forward")
        call.buffers = [(buffer, self._kept(buffer)) for buffer in self._buffers_of(module)]
        with self.inside():
            return self._after(call, original(module, *args, **kwargs))

    @not_compiled
    def call_loss(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Call a loss function, and keep the call."""
        if not _counts():
            return original(*args, **kwargs)
        call = self._before(original, args, kwargs)
        with self.inside():
            return self._after(call, original(*args, **kwargs))

    @compiler.do_not_compile_alone
    def _before(self, function: Callable[..., Any], args: Any, kwargs: Any) -> KeptCall:
        given: list[tuple[Tensor, int]] = []
        kept_args, kept_kwargs = map_plain(lambda value: self._linked(value, given), (args, kwargs))
        devices = dict.fromkeys(tensor.device.type for tensor in tensors_in((args, kwargs)))
        settings = [current_settings(device) for device in devices if _has_autocast(device)]
        call = KeptCall(function, kept_args, kept_kwargs, given, settings, user_line())
        if len(self._calls) < MOST_CALLS:
            self._calls.append(call)
        else:
            self.gap = f"only the first {MOST_CALLS} calls of models and losses were replayed"
        return call

    @compiler.do_not_compile_alone
    def _after(self, call: KeptCall, result: Any) -> Any:
        for index, tensor in enumerate(tensors_in((result,))):
            call.links.append(autograd.made_as(tensor))
            if tensor.requires_grad and tensor.ndim == 0:
                tensor.register_hook(partial(call.seeds.__setitem__, index))  # type: ignore[no-untyped-call]
        return result

    def _buffers_of(self, model: nn.Module) -> list[Tensor]:
        """Return the present buffers of a model; the modules that have some are looked up once."""
        if model not in self._owners:
            # Not `_buffers`: in a module of torch.jit it is not a dictionary.
            self._owners[model] = [
                (module, name)
                for module in model.modules()
                for name, _ in module.named_buffers(recurse=False)
            ]
        found = (getattr(module, name, None) for module, name in self._owners[model])
        return [buffer for buffer in found if isinstance(buffer, Tensor)]

    def _kept(self, buffer: Tensor) -> Tensor:
        """Return a copy of a buffer; a new one only if the buffer was written to."""
        known = self._buffers.get(id(buffer))
        if known is None or known[0]() is not buffer or known[1] != buffer._version:
            known = (weakref.ref(buffer), buffer._version, buffer.detach().clone())
            self._buffers[id(buffer)] = known
        return known[2]

    def _linked(self, value: Any, given: list[tuple[Tensor, int]]) -> Any:
        """Return an :class:`EarlierOutput` for a tensor of an earlier call, or the value."""
        found = self._made_by(value) if isinstance(value, Tensor) else None
        if found is not None:
            return found
        for tensor in tensors_in([value]):  # also those in a container of the user's own
            if tensor.grad_fn is not None:
                self.gap = "computations between a model and a loss cannot be replayed"
            elif not tensor.is_inference():
                given.append((tensor, tensor._version))
        is_computed = isinstance(value, Tensor) and value.grad_fn is not None
        return value.detach() if is_computed else value

    def _made_by(self, tensor: Tensor) -> EarlierOutput | None:
        """Return the earlier output that is a tensor, or has the same entries in the same order."""
        for link in same_entries(tensor):
            for number in range(len(self._calls) - 1, -1, -1):
                if link in self._calls[number].links:
                    index = self._calls[number].links.index(link)
                    return EarlierOutput(number, index, tuple(tensor.shape), tensor.dtype)
        return None

    def note_root(self, root: Tensor) -> None:
        """Note a loss that is given to ``backward``."""
        found = self._made_by(root)
        if found is not None:
            self._roots.append((found.call, found.index))

    # --- repetition -------------------------------------------------------------------------------

    def step(self, scale: float | None) -> Callable[[], object]:
        """Return a function that does :func:`call_again` at a scale, with a scaler of its own."""
        calls, roots = self._calls, list(self._roots)
        scaler: GradScaler | None = None
        if scale is not None:
            scaler = GradScaler(init_scale=scale, rule=Static(), process_group="local")
        at = 1.0 if scale is None else scale
        return lambda: call_again(calls, roots, scaler, at)

    def why_not(self) -> str | None:
        """Return why the iteration cannot be replayed, None if it can.

        Sync: one for each loss.
        """
        for call in self._calls:
            if not all(map(is_finite, call.seeds.values())):
                return "its loss went bad between the loss function and backward"
        for call in self._calls:
            for tensor, version in call.given:
                if tensor._version != version:
                    shape = ", ".join(map(str, tensor.shape))
                    return f"an input of shape [{shape}] was written to in place afterwards"
        return None


def _counts() -> bool:
    """Return whether a call now is part of training, and not of evaluation or checkpointing."""
    return torch.is_grad_enabled() and autograd.backward_number() < 0 and not modes.is_jit_tracing()


def _has_autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
