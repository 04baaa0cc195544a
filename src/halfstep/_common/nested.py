"""Traversal of nested values: lists, tuples and mappings."""

from __future__ import annotations

import copy
from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in nested tuples, lists and mappings."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(list(value.values()))


MOST_REACHED = 10_000  # maximum number of values that are searched for tensors


def values_reached(value: Any, leave_out: tuple[type, ...]) -> Iterator[Any]:
    """Yield the values in containers and in attributes of objects, each once, without containers.

    Python classes, functions and modules are not searched, nor are objects of ``leave_out``.
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


def items_of(holder: Any) -> dict[Any, Any]:
    """Return the items of a list, or of what has keys or attributes; a list's are by their end."""
    if type(holder) is list:
        return dict(enumerate(holder, -len(holder)))
    return holder if isinstance(holder, dict) else getattr(holder, "__dict__", {})


def parts_of(whole: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are items or attributes of an object, with their names."""
    for name, part in list(items_of(whole).items()):
        if isinstance(part, Tensor) and isinstance(name, str):
            yield name, part


def tensors_reached(value: Any) -> list[Tensor]:
    """Return the tensors in :func:`values_reached`, except those in modules."""
    if isinstance(value, Tensor):  # the most common result of a call
        return [value]
    reached = values_reached(value, leave_out=(torch.nn.Module,))
    return [each for each in reached if isinstance(each, Tensor)]


def map_leaves(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with ``function`` applied to the leaves of its lists, tuples and dicts.

    Everything else is a leaf, including mappings other than ``dict`` and ``UserDict``, because a
    copy of such a mapping may share its items. Unchanged containers are returned themselves;
    changed ones are new objects of the same class.
    """
    if isinstance(value, dict | UserDict):
        items = {key: map_leaves(function, item) for key, item in value.items()}
        return value if _is_same(items.values(), value.values()) else like(value, items)
    if isinstance(value, (list, tuple)):
        new = [map_leaves(function, item) for item in value]
        return value if _is_same(new, value) else like(value, new)
    return function(value)


def map_tensors(function: Callable[[Tensor], Any], value: Any) -> Any:
    """Return :func:`map_leaves` for a function of tensors; other leaves are unchanged."""
    return map_leaves(lambda item: function(item) if isinstance(item, Tensor) else item, value)


def _is_same(new: Iterable[Any], old: Iterable[Any]) -> bool:
    # torch.compile cannot trace this comparison; there, every container is recreated.
    if torch.compiler.is_compiling():
        return False
    return all(item is before for item, before in zip(new, old, strict=True))


def like(container: Any, items: Any) -> Any:
    """Return a container of the same class with other items.

    For mappings other than ``dict`` and ``UserDict``, and for other iterables, return the items
    themselves.
    """
    if isinstance(container, (list, tuple)):
        # A subclass of a named tuple may take other arguments.
        return getattr(container, "_make", type(container))(items)
    if type(container) is OrderedDict:
        return OrderedDict(items)
    if type(container) is dict or not isinstance(container, dict | UserDict):
        return items
    # Copy what the class adds: attributes, the default_factory of a defaultdict.
    result = copy.copy(container)
    for key, item in items.items():
        result[key] = item
    return result


def map_plain(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with ``function`` applied to everything but tuples, lists and dicts.

    Instances of subclasses of these are not treated as containers, since it may be impossible to
    recreate them.
    """
    if type(value) is dict:
        return {key: map_plain(function, item) for key, item in value.items()}
    if type(value) in (list, tuple) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return like(value, [map_plain(function, item) for item in value])
    return function(value)
