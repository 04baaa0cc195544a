"""Walks over nested values: what lies in lists, tuples and mappings."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any

from torch import Tensor


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in the tuples, lists and mappings among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(list(value.values()))


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with ``function`` applied to what lies in its lists, tuples and mappings.

    Anything else is passed to ``function`` itself. A container in which nothing changes is returned
    as it is, another as :func:`like` makes it.
    """
    if isinstance(value, Mapping):
        items = {key: mapped(function, item) for key, item in value.items()}
        is_same = all(items[key] is item for key, item in value.items())
        return value if is_same else like(value, items)
    if isinstance(value, (list, tuple)):
        new = [mapped(function, item) for item in value]
        is_same = all(item is old for item, old in zip(new, value, strict=True))
        return value if is_same else like(value, new)
    return function(value)


def like(container: Any, items: Iterable[Any]) -> Any:
    """Return a container of the same class with other items.

    Args:
        container: A mapping, list or tuple; of another iterable and of a mapping that cannot be
            written to, ``items`` are returned.
        items: A dictionary for a mapping, else a list.
    """
    if isinstance(container, MutableMapping) and type(container) is not dict:
        # What the class adds is copied: the factory of a defaultdict, attributes.
        result = copy.copy(container)
        for key, item in dict(items).items():
            result[key] = item
        return result
    if isinstance(container, (list, tuple)):
        # A named tuple takes its fields one by one.
        is_named = hasattr(container, "_fields")
        return type(container)(*items) if is_named else type(container)(items)
    return items


def mapped_plain(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with ``function`` applied to all that is no container.

    Containers are tuples, named tuples, lists and dictionaries. An object of a class derived from
    one is no container: it may not be possible to make it anew.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped_plain(function, item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(mapped_plain(function, item) for item in value)
    if type(value) is dict:
        return {key: mapped_plain(function, item) for key, item in value.items()}
    return function(value)
