"""What a model returns, in float32."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import MutableMapping
from typing import Any

import torch

from halfstep._pytorch import compiler


@compiler.do_not_compile_alone
def in_float32(value: Any, lower: torch.dtype) -> Any:
    """Return ``value`` with every tensor in it that has the dtype ``lower`` as float32.

    Looks into lists, tuples, named tuples, mappings (a transformers ``ModelOutput`` is one) and
    dataclasses, nested in any way. What holds no such tensor is returned itself, not a copy, and
    what is of any other class (a cache of keys and values, say) stays as it is. Sync: none.
    """
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype is lower else value
    if isinstance(value, MutableMapping):
        return _mapping(value, lower)
    if isinstance(value, list | tuple):
        return _sequence(value, lower)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, lower)
    return value


def _sequence(value: Any, lower: torch.dtype) -> Any:
    items = [in_float32(item, lower) for item in value]
    if all(item is old for item, old in zip(items, value, strict=True)):
        return value
    make = getattr(type(value), "_make", type(value))  # a named tuple takes its fields one by one
    return make(items)


def _mapping(value: MutableMapping[Any, Any], lower: torch.dtype) -> Any:
    items = {key: in_float32(item, lower) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    result = copy.copy(value)  # keeps what the class adds
    for key, item in items.items():
        result[key] = item
    return result


def _dataclass(value: Any, lower: torch.dtype) -> Any:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    changed = {name: in_float32(item, lower) for name, item in fields.items()}
    if all(changed[name] is item for name, item in fields.items()):
        return value
    result = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(result, name, item)  # it may be frozen
    return result
