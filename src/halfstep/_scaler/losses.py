"""Losses as they are handed to ``scale``: a tensor, or many in nested containers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def for_each(function: Callable[[Tensor], Tensor], outputs: Any, where: str = "outputs") -> Any:
    """Return ``outputs`` with every tensor in it replaced.

    Args:
        function: What a tensor is replaced by.
        outputs: A tensor, or a (nested) list, tuple, named tuple, mapping or other iterable.
        where: The name of ``outputs`` in an error message.

    Returns:
        Lists, tuples, named tuples and mappings keep their type, other iterables become lists.

    Raises:
        TypeError: Something in it is not a tensor; the message says where it is.
    """
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, Mapping):
        items = {key: for_each(function, v, f"{where}[{key!r}]") for key, v in outputs.items()}
        return _like(outputs, items) if isinstance(outputs, MutableMapping) else items
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
        raise TypeError(
            f"{where} is {_shortly(outputs)} ({type(outputs).__name__}): scale() takes a "
            "tensor, or a list, tuple, mapping or other iterable of tensors"
        )
    values = [for_each(function, v, f"{where}[{index}]") for index, v in enumerate(outputs)]
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*values)
    return type(outputs)(values) if isinstance(outputs, list | tuple) else values


def _like(mapping: MutableMapping[Any, Any], items: dict[Any, Any]) -> MutableMapping[Any, Any]:
    # A copy keeps what the class adds: the factory of a defaultdict, the attributes of a
    # transformers ModelOutput.
    result = copy.copy(mapping)
    for key, item in items.items():
        result[key] = item
    return result


def tensors_in(scaled: Any) -> Iterator[Tensor]:
    """Yield all tensors in what :func:`for_each` has returned."""
    if isinstance(scaled, Tensor):
        yield scaled
        return
    for item in scaled.values() if isinstance(scaled, Mapping) else scaled:
        yield from tensors_in(item)


def _shortly(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
