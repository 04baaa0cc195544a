"""Data classes from the plain data that ``dataclasses.asdict`` makes of them, and JSON keeps."""

from __future__ import annotations

from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

_Kind = TypeVar("_Kind")


def decoded(kind: type[_Kind], data: Any) -> _Kind:
    """Return plain data as a value of a data class; what that does not know of is left out.

    Raises:
        KeyError: A part is missing.
        TypeError: A part is of another type.
        ValueError: A word is none of those that are known, or a text is no number.
    """
    value: _Kind = _value(kind, data)
    return value


def _value(kind: Any, data: Any) -> Any:
    """Return plain data as a value of a type, as the fields of a data class have them."""
    origin, args = get_origin(kind), get_args(kind)
    if origin is UnionType:  # of a type and None
        return None if data is None else _value(args[0], data)
    if origin is Literal:
        if data not in args:
            raise ValueError(f"{data!r} is none of {', '.join(args)}")
        return data
    if origin is tuple:
        items = _require(list, data)
        kinds = [args[0]] * len(items) if args[-1] is ... else args
        return tuple(_value(each, item) for each, item in zip(kinds, items, strict=True))
    if isinstance(kind, type) and is_dataclass(kind):
        parts = _require(dict, data)
        return kind(**{name: _value(hint, parts[name]) for name, hint in _hints(kind).items()})
    return _number(data) if kind is float else _require(kind, data)


_hints = cache(get_type_hints)


def _number(data: Any) -> float:
    """Return a number; "nan", "inf" and "-inf" stand for those that JSON does not have."""
    if isinstance(data, bool) or not isinstance(data, (int, float, str)):
        raise TypeError(f"{data!r} is no number")
    return float(data)


def _require(kind: Any, data: Any) -> Any:
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise TypeError(f"{data!r} is no {kind.__name__}")
    return data
