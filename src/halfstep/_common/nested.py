"""Walks over nested values: what lies in lists, tuples and mappings."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
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


MOST_REACHED = 10_000
"""The most values that are looked through for tensors."""


def values_reached(value: Any, leave_out: tuple[type, ...] = ()) -> Iterator[Any]:
    """Yield what is no container, in containers and in the attributes of objects, each once.

    Args:
        value: Looked through: lists, tuples, sets, mappings, dataclasses, and any other objects
            with attributes. Not classes, functions and modules of Python.
        leave_out: The classes of objects that are not looked into.
    """
    waiting, seen = deque([value]), set[int]()
    while waiting and len(seen) < MOST_REACHED:
        each = waiting.popleft()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, (*leave_out, type, FunctionType, MethodType, ModuleType)):
            continue
        elif isinstance(each, Mapping):
            waiting.extend(each.values())
        elif isinstance(each, (list, tuple, set, frozenset, deque)):
            waiting.extend(each)
        else:
            yield each
            slots = (name for cls in type(each).__mro__ for name in getattr(cls, "__slots__", ()))
            waiting.extend(getattr(each, "__dict__", {}).values())
            waiting.extend(getattr(each, name, None) for name in slots)


def tensors_reached(value: Any) -> list[Tensor]:
    """Return the tensors of :func:`values_reached`, without those that modules hold."""
    if isinstance(value, Tensor):  # as most results of calls are
        return [value]
    reached = values_reached(value, leave_out=(torch.nn.Module,))
    return [each for each in reached if isinstance(each, Tensor)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with ``function`` applied to what lies in its lists, tuples and dictionaries.

    Anything else is passed to ``function`` itself, also mappings that are no ``dict`` or
    ``UserDict``: a copy of one may share its items with it. A container in which nothing changes is
    returned as it is; else a new one is of the same class.
    """
    if isinstance(value, dict | UserDict):
        items = {key: map_leaves(function, item) for key, item in value.items()}
        return value if _is_same(items.values(), value.values()) else like(value, items)
    if isinstance(value, (list, tuple)):
        new = [map_leaves(function, item) for item in value]
        return value if _is_same(new, value) else like(value, new)
    return function(value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return what :func:`map_leaves` does for a function of tensors; all else stays as it is."""
    return map_leaves(lambda item: function(item) if isinstance(item, Tensor) else item, value)


def _is_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    # torch.compile cannot trace this comparison; there every container is a new one.
    if torch.compiler.is_compiling():
        return False
    return all(item is before for item, before in zip(new, old, strict=True))


def like(container: Any, items: Any) -> Any:
    """Return a container of the same class with other items.

    For mappings that are no ``dict`` or ``UserDict``, and for other iterables, these are the items
    themselves.
    """
    if isinstance(container, (list, tuple)):
        # A class derived from a named tuple may take other arguments.
        return getattr(container, "_make", type(container))(items)
    if type(container) is OrderedDict:
        return OrderedDict(items)
    if type(container) is dict or not isinstance(container, dict | UserDict):
        return items
    # What the class adds is copied: the factory of a defaultdict, attributes.
    result = copy.copy(container)
    for key, item in items.items():
        result[key] = item
    return result


def map_plain(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with ``function`` applied to all that is no tuple, list or dictionary.

    An object of a class derived from one is no container: it may not be possible to make it anew.
    """
    if type(value) is dict:
        return {key: map_plain(function, item) for key, item in value.items()}
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return like(value, [map_plain(function, item) for item in value])
    return function(value)
