"""Multiply losses by the scale: one tensor, or containers of tensors nested in any way."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

import torch


class Multiplier:
    """Multiplies by the scale on whichever device a loss is.

    Args:
        scale_for: Takes a loss; returns the scale, a float32 scalar, on the device of the loss.
    """

    def __init__(self, scale_for: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._scale_for = scale_for

    def __call__(self, outputs: Any, where: str = "outputs") -> Any:
        """Return ``outputs`` with every tensor in it multiplied by the scale.

        Args:
            outputs: A tensor, or a (nested) list, tuple, named tuple, mapping or other iterable.
            where: The name of ``outputs`` in an error message.

        Returns:
            Lists, tuples, named tuples and mappings keep their type, other iterables become lists.
            A float16 tensor with dimensions becomes float32, since 1.0 * 65536 is inf in float16;
            otherwise PyTorch's usual type promotion with a float32 scalar applies.

        Raises:
            TypeError: Something in it is not a tensor; the message says where it is.
        """
        if isinstance(outputs, torch.Tensor):
            return self._multiply(outputs)
        if isinstance(outputs, Mapping):
            return self._mapping(outputs, where)
        if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
            raise TypeError(
                f"{where} is {_shortly(outputs)} ({type(outputs).__name__}): scale() takes a "
                "tensor, or a list, tuple, mapping or other iterable of tensors"
            )
        items = [self(item, f"{where}[{index}]") for index, item in enumerate(outputs)]
        if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
            return type(outputs)(*items)
        return type(outputs)(items) if isinstance(outputs, list | tuple) else items

    def _mapping(self, outputs: Mapping[Any, Any], where: str) -> Mapping[Any, Any]:
        items = {key: self(item, f"{where}[{key!r}]") for key, item in outputs.items()}
        if not isinstance(outputs, MutableMapping):
            return items
        # A copy keeps what the class adds: the factory of a defaultdict, the attributes of a
        # transformers ModelOutput.
        result = copy.copy(outputs)
        for key, item in items.items():
            result[key] = item
        return result

    def _multiply(self, loss: torch.Tensor) -> torch.Tensor:
        scale = self._scale_for(loss)
        if loss.dtype == torch.float16 and loss.dim() > 0:
            # Type promotion lets the dtype of a tensor with dimensions win over that of a scalar.
            loss = loss.float()
        return loss * scale


def tensors_in(scaled: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in what a :class:`Multiplier` has returned."""
    if isinstance(scaled, torch.Tensor):
        yield scaled
        return
    for item in scaled.values() if isinstance(scaled, Mapping) else scaled:
        yield from tensors_in(item)


def _shortly(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
