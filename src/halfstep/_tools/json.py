"""JSON as values of known types, with limits on their numbers.

JSON has no NaN and no inf: the strings "nan", "inf" and "-inf" are accepted as floats.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from msgspec import Meta, Struct
from msgspec.json import Decoder
from msgspec.structs import asdict

_Kind = TypeVar("_Kind")

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
"""A count; exact as a float too, for divisions and plots."""
Finite: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Magnitude: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
LARGEST = 2.0**128  # an upper bound of all finite float32 numbers
Scale: TypeAlias = Annotated[float, Meta(ge=2.0**-149, le=LARGEST)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]


def decoded(kind: type[_Kind], text: str | bytes) -> _Kind:
    """Return JSON as a value of a type; keys that the type does not have are ignored.

    Raises:
        ValueError: It is not JSON, or a part is missing, of another type or out of range. The
            message names the part.
    """
    try:
        value: _Kind = _decoder(kind).decode(text)  # type: ignore[arg-type]  # hashable
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


@cache
def _decoder(kind: Any) -> Decoder[Any]:
    return Decoder(kind, strict=False)  # strict decoding would reject "nan" as a float


_PLAIN = frozenset({str, int, bool, type(None)})


def to_plain(value: Any) -> Any:
    """Return a value with non-finite numbers as strings; a ``Struct`` becomes a dict."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {
            str(key): item if type(item) in _PLAIN else to_plain(item)
            for key, item in value.items()
        }
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return to_plain(asdict(value)) if isinstance(value, Struct) else value
