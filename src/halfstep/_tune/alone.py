"""Recording of the module calls in a step, and replay of single modules."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from halfstep._autocast.region import Region, current_settings
from halfstep._autocast.scopes import Settings
from halfstep._common.machine import RandomStates, accelerators
from halfstep._common.nested import map_tensors, tensors_in
from halfstep._pytorch import modes
from halfstep._tune.passes import StepRunner, TensorPlace, module_hooks, tensor_hooks
from halfstep._tune.tolerances import SPREAD, Depths


@dataclass
class ModuleCall:
    """A recorded call of a module in a step.

    Attributes:
        args: A copy of its positional arguments.
        kwargs: A copy of its keyword arguments.
        settings: The autocast settings around the call.
        gradients: The gradients of its floating-point outputs, by position; some may be missing.
    """

    args: Any
    kwargs: Any
    settings: Settings
    gradients: dict[int, Tensor] = field(default_factory=dict)

    def tensors(self) -> list[Tensor]:
        """Return the tensors among its arguments."""
        return list(tensors_in([self.args, self.kwargs]))


def calls_of(runner: StepRunner, scale: float) -> dict[str, list[ModuleCall]]:
    """Run a step in lower precision and return its module calls by name, outer modules first."""
    calls: dict[str, list[ModuleCall]] = {}
    device = runner.task.device(runner.batch)

    def before(name: str, _: int, given: Any) -> None:
        args, kwargs = _copied(given)
        call = ModuleCall(args, kwargs, current_settings(device))
        calls.setdefault(name, []).append(call)

    def after(name: str, call: int, output: Any) -> None:
        pass

    def see(place: TensorPlace, tensor: Tensor) -> None:
        if place.kind == "output_gradient":
            calls[place.module][place.call].gradients[place.position] = tensor.detach().clone()

    @contextmanager
    def kept() -> Iterator[None]:
        hooks = module_hooks(runner.task.named_modules(), before, after)
        with hooks, tensor_hooks(runner.task, see):
            yield

    runner.step(kept(), lowered=True, scale=scale)
    return calls


def _copied(given: Any) -> Any:
    """Return a copy of arguments; a tensor that occurs several times is copied once."""
    copies: dict[int, Tensor] = {}

    def copy(tensor: Tensor) -> Tensor:
        if modes.is_inside_functorch(tensor):
            return tensor
        if id(tensor) not in copies:
            copies[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
        return copies[id(tensor)]

    return copied(given, copy)


def copied(values: Any, copy: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of arguments in which ``copy(tensor)`` replaces each tensor.

    Objects that modules write to, such as a cache, are copied too; modules are not. If something
    cannot be pickled, only containers and tensors are copied.
    """
    file, kept = io.BytesIO(), list[Any]()
    try:
        _Pickler(file, kept).dump(values)
        copies = [copy(each) if isinstance(each, Tensor) else each for each in kept]
        return _Unpickler(io.BytesIO(file.getvalue()), copies).load()
    except (pickle.PickleError, TypeError, AttributeError):
        return map_tensors(copy, values)


class _Pickler(pickle.Pickler):
    """A pickler that puts tensors and modules into a list instead."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_id(self, value: Any) -> int | None:
        """Return the index of a tensor or module, None for values to pickle."""
        if not isinstance(value, (Tensor, nn.Module)):
            return None
        self._kept.append(value)
        return len(self._kept) - 1


class _Unpickler(pickle.Unpickler):
    """An unpickler that takes tensors and modules from a list."""

    def __init__(self, file: io.BytesIO, kept: list[Any]) -> None:
        super().__init__(file)
        self._kept = kept

    def persistent_load(self, number: int) -> Any:
        return self._kept[number]


class Repetition(NamedTuple):
    """The results of a module that ran alone; a missing gradient is None."""

    outputs: list[Tensor]
    input_gradients: list[Tensor | None]
    parameter_gradients: list[Tensor | None]
    depth: int  # the largest depth of an output, in ops
    random: list[Tensor]  # the states of the random number generators after the run


def repeat(
    runner: StepRunner,
    module: nn.Module,
    call: ModuleCall,
    run: Callable[..., Any],
    *,
    lowered: bool = True,
    change: Callable[[Tensor], Tensor] | None = None,
) -> Repetition:
    """Replay a call of a module, forward and backward, from the state before the step.

    Args:
        runner: The runner of the step.
        module: The module for whose parameters gradients are computed.
        call: The recorded call.
        run: The module, or its compiled code.
        lowered: Whether to run under the autocast of the call; otherwise in float32.
        change: A function that is applied to each floating-point input.
    """
    leaves: list[Tensor] = []
    given: dict[int, Tensor] = {}

    def fresh(tensor: Tensor) -> Tensor:
        if id(tensor) not in given:
            leaf = tensor.detach().clone()
            if change is not None and leaf.is_floating_point():
                leaf = change(leaf)
            if tensor.requires_grad:
                leaves.append(leaf.requires_grad_())
                leaf = leaf.clone()  # leaves cannot be modified in place
            given[id(tensor)] = leaf
        return given[id(tensor)]

    args, kwargs = copied((call.args, call.kwargs), fresh)
    runner.reset()
    with ExitStack() as stack:
        if lowered:
            stack.enter_context(Region(call.settings))
        found = run(*args, **kwargs)
    outputs = [each for each in tensors_in([found]) if each.is_floating_point()]
    depth = max((Depths().of(each) for each in outputs), default=0)
    values = [each.detach().clone() for each in outputs]
    parameters = [each for each in module.parameters() if each.requires_grad]
    gradients = _gradients(outputs, call.gradients, [*leaves, *parameters])
    states = RandomStates(accelerators()).tensors
    num = len(leaves)
    return Repetition(values, gradients[:num], gradients[num:], depth, states)


def _gradients(
    outputs: list[Tensor], arrived: dict[int, Tensor], leaves: list[Tensor]
) -> list[Tensor | None]:
    roots = [
        (output, arrived[position].to(output.dtype))
        for position, output in enumerate(outputs)
        if position in arrived and output.requires_grad
    ]
    if not roots or not leaves:
        return [None] * len(leaves)
    tensors, seeds = zip(*roots, strict=True)
    found = torch.autograd.grad(tensors, leaves, seeds, allow_unused=True)
    return [None if each is None else each.detach() for each in found]


def float32(tensor: Tensor) -> Tensor:
    return tensor.float()


def perturbed(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 with each entry off by SPREAD roundings, randomly up or down."""
    off = SPREAD * torch.finfo(torch.float32).eps / 2
    signs = torch.rand_like(tensor, dtype=torch.float32).round() * 2 - 1
    return tensor.float() * (1 + off * signs)
