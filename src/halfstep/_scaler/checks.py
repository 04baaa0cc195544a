"""Checks of scales, factors and counts that a user gives; bits of float32 numbers."""

from __future__ import annotations

import ctypes
import itertools
import math
import numbers
import struct

# Below the smallest normal number of float32 the reciprocal, which gradients are multiplied by,
# may be inf. Above the largest finite one the scale itself is inf.
SMALLEST_SCALE = 2.0**-126
LARGEST_SCALE = (2.0 - 2.0**-23) * 2.0**127

# PyTorch's kernels count in int32.
LARGEST_COUNT = 2**31 - 1


def round_to_float32(value: float) -> float:
    """Return the float32 number nearest to ``value`` (inf when it is too large)."""
    return ctypes.c_float(value).value


def float32_bits(value: float) -> int:
    """Return the bits of the float32 number nearest to ``value``, read as an int32."""
    bits: int = struct.unpack("=i", bytes(ctypes.c_float(value)))[0]
    return bits


def float32_from_bits(bits: int) -> float:
    """Return the float32 number with these bits."""
    return ctypes.c_float.from_buffer_copy(struct.pack("=i", bits)).value


def checked_number(
    name: str, value: object, *, at_least: float = -math.inf, at_most: float = math.inf
) -> float:
    """Return ``value`` as a finite float in the range; a bool is not a number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise TypeError(
            f"{name} is {value!r} ({type(value).__name__}): pass a number such as 65536.0"
        )
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise ValueError(f"{name} is {number}: pass a finite number")
    if not at_least <= number <= at_most:
        raise ValueError(f"{name} is {number}: it must lie between {at_least:g} and {at_most:g}")
    return number


def checked_scale(name: str, value: object) -> float:
    """Return ``value`` rounded to float32, if gradients can be multiplied and divided by it."""
    number = round_to_float32(checked_number(name, value))
    if not SMALLEST_SCALE <= number <= LARGEST_SCALE:
        raise ValueError(
            f"{name} is {value!r}: a scale must lie between {SMALLEST_SCALE:.3g} and "
            f"{LARGEST_SCALE:.3g} (the normal range of float32), for example 65536.0"
        )
    return number


def checked_count(name: str, value: object, *, at_least: int) -> int:
    """Return ``value`` as an int between ``at_least`` and the largest int32."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise TypeError(f"{name} is {value!r} ({type(value).__name__}): pass a whole number")
    count = int(value)
    if not at_least <= count <= LARGEST_COUNT:
        raise ValueError(f"{name} is {count}: it must lie between {at_least} and {LARGEST_COUNT}")
    return count


def check_ascending(**numbers: float) -> None:
    """Raise a ValueError that names two neighbours unless the numbers go up, or stay."""
    for (name, number), (next_name, next_number) in itertools.pairwise(numbers.items()):
        if number > next_number:
            raise ValueError(f"{name} is {number}, above {next_name}, which is {next_number}")
