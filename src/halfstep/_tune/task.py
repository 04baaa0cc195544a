"""Task of a check: a model and its loss, run on a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from halfstep._autocast.casts import tensors_in
from halfstep._autocast.modules import replicated, without_wrappers

LossFn: TypeAlias = Callable[[Any, Any], Tensor]
"""``loss_fn(model, batch)`` calls the model in any way and returns a scalar."""


@dataclass(frozen=True)
class Task:
    """Model and the function of its loss.

    Args:
        model: The model, with float32 parameters.
        loss_fn: ``loss_fn(model, batch)``; None to call the model with the batch.

    Raises:
        TypeError: ``model`` is not a module, or ``loss_fn`` not a function.
        ValueError: A parameter is in another dtype, or has no shape yet.
    """

    model: nn.Module
    loss_fn: LossFn | None = None

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
                    f"{parameter.dtype}: autocast wants float32 parameters, model.float()"
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
        """Run the model on a batch.

        Raises:
            TypeError: The result is not a loss.
            ValueError: The loss is not a scalar.
        """
        if self.loss_fn is None:
            return _loss_of(_called(self.model, batch))
        loss = self.loss_fn(self.model, batch)
        if not isinstance(loss, Tensor) or not loss.is_floating_point():
            raise TypeError(f"loss_fn(model, batch) must return the loss as a tensor, got {loss!r}")
        if loss.numel() != 1:
            raise ValueError(
                f"loss_fn(model, batch) must return one number, got shape {list(loss.shape)}: "
                "take its mean()"
            )
        return loss


def _called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return model(**batch)
    if isinstance(batch, (tuple, list)):
        return model(*batch)
    return model(batch)


def _loss_of(output: Any) -> Tensor:
    """Return the loss of an output, the output itself, or the mean of its squares."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, Tensor) and found.numel() == 1:
        return found
    outputs = [each for each in tensors_in([output]) if each.is_floating_point()]
    if not outputs and hasattr(output, "__dict__"):  # a data class
        outputs = [each for each in tensors_in([vars(output)]) if each.is_floating_point()]
    if not outputs:
        raise TypeError(
            f"the model returns {type(output).__name__} without a floating-point tensor: pass "
            "loss_fn(model, batch)"
        )
    if isinstance(output, Tensor) and output.numel() == 1:
        return output
    # In float32, so that squares do not overflow float16.
    return torch.stack([each.float().square().mean() for each in outputs]).sum()
