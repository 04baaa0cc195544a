"""Task of a check: a model and its loss, run on a batch, and restored."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep._autocast.modules import replicated, without_wrappers
from halfstep._common.nested import tensors_in, values_reached
from halfstep._common.random_states import RandomStates, accelerators
from halfstep._pytorch.autograd import version_of
from halfstep._pytorch.modules import registers_of

LossFn: TypeAlias = Callable[[Any, Any], Any]
"""``loss_fn(model, batch)`` calls the model in any way and returns a scalar, or outputs."""


@dataclass(frozen=True)
class Task:
    """Model with float32 parameters, and the function of its loss.

    Raises:
        TypeError: ``model`` is not a module, or ``loss_fn`` not a function.
        ValueError: A parameter is in another dtype, or has no shape yet.
    """

    model: nn.Module
    loss_fn: LossFn | None = None  # None to call the model with the batch

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise TypeError(f"model must be a torch.nn.Module, got {type(self.model).__name__}")
        if self.loss_fn is not None and not callable(self.loss_fn):
            raise TypeError(f"loss_fn(model, batch) must be a function, got {self.loss_fn!r}")
        for name, parameter in self.model.named_parameters():
            if is_lazy(parameter):
                raise ValueError(f"parameter {name} has no shape yet: run the model on a batch")
            if parameter.is_floating_point() and parameter.dtype is not torch.float32:
                raise ValueError(
                    f"results are compared with those in float32, and parameter {name} is "
                    f"{parameter.dtype}: pass model.float(). To train with parameters of "
                    f"{parameter.dtype} and lose no updates: halfstep.master_weights(optimizer)"
                )

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the names, as in policies, and the modules; the model itself is ``""``."""
        for name, module in replicated(self.model).named_modules():
            yield without_wrappers(name), module

    def device(self, batch: Any) -> str:
        """Return the device type that the model computes on."""
        tensors = [*self.model.parameters(), *tensors_in([batch])]
        return tensors[0].device.type if tensors else "cpu"

    def loss(self, batch: Any) -> Tensor:
        """Run the model on a batch, and return its loss, or a number for its outputs.

        Raises:
            TypeError: The result contains no floating-point numbers.
        """
        if self.loss_fn is None:
            return _loss_of(called_with(self.model, batch), "the model")
        return _loss_of(self.loss_fn(self.model, batch), "loss_fn(model, batch)")


def called_with(function: Callable[..., Any], batch: Any) -> Any:
    """Call a model: with a tensor, a tuple of arguments, or a dictionary of keyword arguments."""
    if isinstance(batch, Mapping):
        return function(**batch)
    if isinstance(batch, (tuple, list)):
        return function(*batch)
    return function(batch)


def _loss_of(output: Any, of: str) -> Tensor:
    """Return the loss of an output, the output itself, or the mean of its squares."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    values = (each for each in values_reached(output, (nn.Module,)) if isinstance(each, Tensor))
    outputs = [each for each in values if each.is_floating_point()]
    if not outputs:
        raise TypeError(
            f"{of} returns {type(output).__name__} without a floating-point tensor: pass a "
            "loss_fn(model, batch) that returns the loss or, for inference, the outputs as tensors"
        )
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    # In float32, so that squares do not overflow float16.
    return torch.stack([each.float().square().mean() for each in outputs]).sum()


def is_leaf(module: nn.Module) -> bool:
    """Return whether a module contains no modules."""
    return not any(True for _ in module.children())


# --- restoring a model ----------------------------------------------------------------------------

SEED = 0
"""The seed of all random number generators in each pass."""


@contextmanager
def restored(
    model: nn.Module, batch: Iterable[Tensor], device: str
) -> Iterator[Callable[[], None]]:
    """Keep a model, the tensors of a batch and the random numbers unchanged by the block.

    Of the model are kept parameters, buffers, gradients, and the attributes of its modules; the
    contents of lists and dictionaries among these are not. Yields a function that restores all of
    it without gradients, and seeds the random numbers of the CPU and of a type of device, so that
    a pass starts from the same state. Sync: one for each tensor.
    """
    held = [each for module in model.modules() for each in (vars(module), *registers_of(module))]
    attributes = [(each, dict(each)) for each in held]
    tensors = list({id(tensor): tensor for tensor in [*tensors_in(held), *batch]}.values())
    values = [_Value(tensor) for tensor in tensors]
    gradients = [(tensor, tensor.grad) for tensor in tensors if tensor.is_leaf]

    @torch.no_grad()
    def restore() -> None:
        for each, before in attributes:
            if list(each) != list(before) or any(each[key] is not before[key] for key in each):
                each.clear()
                each.update(before)
        for value in values:
            value.restore()

    def reset() -> None:
        restore()
        for tensor, _ in gradients:
            tensor.grad = None
        torch.default_generator.manual_seed(SEED)
        if device != "cpu":
            torch.get_device_module(device).manual_seed_all(SEED)
        random.seed(SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED)

    states = RandomStates(accelerators())
    reset()
    try:
        yield reset
    finally:
        restore()
        for tensor, gradient in gradients:
            tensor.grad = gradient
        states.restore()


class _Value:
    """Copy of the values of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._before = tensor, tensor.detach().clone()
        self._version = version_of(tensor)

    def restore(self) -> None:
        # A tensor that was not changed is not written to, so that its version stays.
        same_version = version_of(self._tensor) == self._version
        if not (same_version and torch.equal(self._tensor.detach(), self._before)):
            self._tensor.detach().copy_(self._before)
            self._version = version_of(self._tensor)
