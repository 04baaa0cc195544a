"""JSON from a file as values of known types, and the numbers that such values may hold.

JSON has no NaN and no inf: where a float is expected, "nan", "inf" and "-inf" stand for them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, TypeAlias, TypeVar

from msgspec import Meta, Struct
from msgspec.json import Decoder
from msgspec.structs import asdict

_Kind = TypeVar("_Kind")

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
"""A number of things; to divide and to draw it is exact as a float too."""
Finite: TypeAlias = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
Magnitude: TypeAlias = Annotated[float, Meta(ge=0, le=sys.float_info.max)]
Positive: TypeAlias = Annotated[float, Meta(gt=0, le=sys.float_info.max)]
LARGEST = 2.0**128
"""No finite float32 is larger."""
Scale: TypeAlias = Annotated[float, Meta(ge=2.0**-149, le=LARGEST)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0, le=1e9)]


def decoded(kind: type[_Kind], text: str | bytes) -> _Kind:
    """Return JSON as a value of a type; keys that the type does not have are left out.

    Args:
        kind: A data class or a ``msgspec.Struct``, of such or of plain types.
        text: The JSON.

    Raises:
        ValueError: It is no JSON, or a part is missing, of another type or beyond its limits. The
            message says which.
    """
    try:
        value: _Kind = _decoder(kind).decode(text)  # type: ignore[arg-type]  # hashable
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    return value


@cache
def _decoder(kind: Any) -> Decoder[Any]:
    return Decoder(kind, strict=False)  # strict, it would take no "nan" for a float


def to_plain(value: Any, non_finite: Callable[[float], str | None] = str) -> Any:
    """Return a value with its non-finite numbers as strings or None; a ``Struct`` as a mapping."""
    if isinstance(value, float):
        return value if math.isfinite(value) else non_finite(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item, non_finite) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item, non_finite) for item in value]
    if isinstance(value, Struct):
        return to_plain(asdict(value), non_finite)
    return value
