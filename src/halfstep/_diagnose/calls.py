"""Calls of models and loss functions that were kept, and making them again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

from halfstep._autocast.casts import tensors_in
from halfstep._autocast.region import Region, Settings
from halfstep._common.random_states import RandomStates
from halfstep._diagnose.diagnosis import Line
from halfstep._diagnose.lines import CALLED_AGAIN
from halfstep._pytorch import autograd

# Nodes of autograd whose result has the entries of its input in the same order.
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
"""The number of a node of autograd, and which of its results a tensor is. Keeps no graph alive."""


@dataclass(frozen=True)
class Output:
    """Stands for an argument that an earlier call has returned.

    Attributes:
        call: Which call.
        index: Which of its tensors.
        shape: The shape of the argument.
        dtype: Its dtype.
    """

    call: int
    index: int
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(eq=False)
class Call:
    """One call of a model or of a loss function.

    Attributes:
        function: What was called.
        args: With :class:`Output` in place of tensors that earlier calls have returned.
        kwargs: The same by name.
        given: The other tensors, and how often they had been written to.
        settings: The autocast around it.
        line: The line of the user's code that called it.
        random: The states of random generators; None for a loss, which needs none.
        buffers: The buffers of the model as they were.
        is_training: Whether it was in training mode.
        links: What made the tensors that it returned; a tensor may be gone when it counts.
        seeds: The gradients of those that have no dimensions, when they have arrived.
    """

    function: Callable[..., Any]
    args: Any
    kwargs: Any
    given: list[tuple[Tensor, int]]
    settings: list[Settings]
    line: Line | None
    random: RandomStates | None = None
    buffers: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    is_training: bool = True
    links: list[Link | None] = field(default_factory=list)
    seeds: dict[int, Tensor] = field(default_factory=dict)


def call_again(
    calls: Sequence[Call],
    roots: Sequence[tuple[int, int]],
    scale: Callable[[Tensor], Tensor],
    at: float,
) -> object:
    """Make all calls again, and go backward from the losses; return what the calls return.

    Args:
        calls: In their order.
        roots: The outputs that went into ``backward``, for those that got no gradient.
        scale: Multiplies a loss as the scaler of the run does.
        at: The scale that the gradients which have arrived were multiplied by.
    """
    made: list[list[Tensor]] = []
    losses: list[Tensor] = []
    for module in {call.function for call in calls if is_model(call.function)}:
        module.zero_grad()
    for number, call in enumerate(calls):
        if losses and is_model(call.function):  # the next batch of an accumulation
            _backward(scale, losses)
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
        _backward(scale, losses)
    return made


class Seed:
    """Keeps the gradient of a number that a call has returned."""

    def __init__(self, call: Call, index: int) -> None:
        self._call, self._index = call, index

    def __call__(self, gradient: Tensor) -> None:
        """Keep it."""
        self._call.seeds[self._index] = gradient


def _backward(scale: Callable[[Tensor], Tensor], losses: list[Tensor]) -> None:
    total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
    losses.clear()
    torch.autograd.backward(scale(total))


def is_model(function: object) -> TypeGuard[nn.Module]:
    """Say whether what was called is a module with parameters."""
    return isinstance(function, nn.Module) and any(True for _ in function.parameters())


def _again(call: Call, made: list[list[Tensor]]) -> Any:
    """Make one call again, under the autocast and with the random numbers that it had."""
    line = call.line  # noqa: F841 - read from this frame, see CALLED_AGAIN
    if call.random is not None:
        call.random.restore()
    for buffer, values in call.buffers:
        with torch.no_grad():
            buffer.copy_(values)
    if isinstance(call.function, nn.Module) and call.function.training != call.is_training:
        call.function.train(call.is_training)
    args, kwargs = _filled((call.args, call.kwargs), made)
    with ExitStack() as stack:
        for settings in call.settings:
            stack.enter_context(Region(settings))
        return call.function(*args, **kwargs)


CALLED_AGAIN.add(_again.__code__)


def _filled(value: Any, made: list[list[Tensor]]) -> Any:
    if isinstance(value, Output):
        output = made[value.call][value.index]
        is_cast = output.dtype is not value.dtype and value.dtype is torch.float32
        output = output.float() if is_cast else output
        return output if tuple(output.shape) == value.shape else output.reshape(value.shape)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_filled(item, made) for item in value))
    if type(value) in (list, tuple):
        return type(value)(_filled(item, made) for item in value)
    if type(value) is dict:
        return {key: _filled(item, made) for key, item in value.items()}
    return value


def same_entries(tensor: Tensor) -> Iterator[Link]:
    """Yield what made a tensor, as far back as only its shape or its dtype was changed."""
    node, number = tensor.grad_fn, tensor.output_nr
    while node is not None:
        yield autograd.sequence_number(node), number
        following = node.next_functions[0] if node.name() in _SAME_ENTRIES else (None, 0)
        node, number = following
