"""Seeing what goes into modules and what comes out, forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

from halfstep._autocast.casts import tensors_in
from halfstep._pytorch import modes
from halfstep._tune.task import Task


class Place(NamedTuple):
    """Where a tensor was seen.

    Attributes:
        module: The name of the module.
        call: Which call of it, from 0.
        kind: ``"input"`` or ``"output"``; of their gradients ``"input_gradient"`` and
            ``"output_gradient"``.
        position: Which of its floating-point tensors.
    """

    module: str
    call: int
    kind: str
    position: int


See: TypeAlias = Callable[[Place, Tensor], None]
Before: TypeAlias = Callable[[str, int, Any], None]
After: TypeAlias = Callable[[str, int, Any], None]


@dataclass
class Phase:
    """Which part of a step runs; in the backward pass modules run for checkpointing only."""

    is_backward: bool = False


@contextmanager
def hooked(task: Task, before: Before, after: After) -> Iterator[Phase]:
    """Call functions before and after each call of a module in the forward pass.

    Args:
        task: Its model.
        before: Given the module's name, the number of the call, and the arguments.
        after: Given the same two, and the output.

    Yields:
        What is to be told when the backward pass begins.
    """
    phase, calls, running = Phase(), dict[str, int](), list[tuple[str, int]]()

    def enter(name: str, args: Any, kwargs: Any) -> None:
        if not phase.is_backward:
            call = calls[name] = calls.get(name, -1) + 1
            running.append((name, call))
            before(name, call, (args, kwargs))

    def leave(name: str, output: Any) -> None:
        if not phase.is_backward:
            opened, call = running.pop()
            while opened != name:  # that one raised, and somebody caught it
                opened, call = running.pop()
            after(name, call, output)

    with ExitStack() as stack:
        for name, module in task.named_modules():
            hooks = (
                module.register_forward_pre_hook(
                    lambda _, args, kwargs, name=name: enter(name, args, kwargs), with_kwargs=True
                ),
                module.register_forward_hook(lambda _, __, output, name=name: leave(name, output)),
            )
            for hook in hooks:
                stack.callback(hook.remove)
        yield phase


@contextmanager
def watching(task: Task, see: See) -> Iterator[Phase]:
    """Call ``see`` with each floating-point tensor that a module is given or returns.

    And, in the backward pass, with its gradient. What activation checkpointing computes again is
    left out.
    """
    places_of: dict[tuple[int, int], list[Place]] = {}
    held: list[Tensor] = []  # so that no other tensor gets the id of one of them

    def look(kind: str, name: str, call: int, values: Any) -> None:
        found = [each for each in tensors_in([values]) if each.is_floating_point()]
        for position, tensor in enumerate(found):
            if modes.is_inside_functorch(tensor):
                continue
            see(Place(name, call, kind, position), tensor)
            if tensor.requires_grad:
                key = id(tensor), tensor._version
                if key not in places_of:
                    held.append(tensor)
                    places = places_of[key] = []
                    hook = tensor.register_hook(partial(seen, places))  # type: ignore[no-untyped-call]
                    stack.callback(hook.remove)
                places_of[key].append(Place(name, call, f"{kind}_gradient", position))

    def seen(places: list[Place], gradient: Tensor) -> None:
        for place in places:
            see(place, gradient)

    with ExitStack() as stack:
        before, after = partial(look, "input"), partial(look, "output")
        yield stack.enter_context(hooked(task, before, after))
