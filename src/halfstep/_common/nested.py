"""Nested values: the tuples, lists and dictionaries in which arguments come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def map_nested(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a value with ``function`` applied to all that is no container.

    Containers are tuples, named tuples, lists and dictionaries. An object of a class derived from
    one is no container: it may not be possible to make it anew.
    """
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_nested(function, item) for item in value))
    if type(value) in (list, tuple):
        return type(value)(map_nested(function, item) for item in value)
    if type(value) is dict:
        return {key: map_nested(function, item) for key, item in value.items()}
    return function(value)
