"""Formatting of numbers in reports."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

NONE = "-"  # the placeholder for a missing number


def count(value: int) -> str:
    """Format an integer: ``12,345``."""
    return f"{value:,}"


def number(value: float | None) -> str:
    """Format a number with four digits: ``2.543``, ``1.2e-07``, ``NaN``, ``-`` for None."""
    if value is None:
        return NONE
    if math.isnan(value):
        return "NaN"
    return f"{value + 0.0:.4g}"  # no -0


def percent(share: float | None) -> str:
    """Format a fraction so that only exactly 0 and 1 read as 0 % and 100 %; ``-`` for None."""
    if share is None:
        return NONE
    value = 100 * share
    if not math.isfinite(value):
        return number(value)
    if value in (0.0, 100.0):
        return f"{value:.0f} %"
    if 0 < value < 10:
        return f"{float(f'{value:.2g}'):.2g} %"
    if 99 <= value < 100:
        return f"{value:.{-math.floor(math.log10(100 - value))}f} %"
    return f"{value:.0f} %"


def power(scale: float | None) -> str:
    """Format a scale as a power of two, ``2^16``; ``1`` and other numbers are unchanged."""
    if scale is None or not math.isfinite(scale) or scale <= 0:
        return number(scale)
    mantissa, exponent = math.frexp(scale)
    if mantissa != 0.5 or exponent == 1:
        return f"{scale:g}"
    return f"2^{exponent - 1}"


def bits(value: float | None) -> str:
    """Format a headroom: ``3.2 bits``."""
    return NONE if value is None else f"{value:.1f} bits"


def seconds(value: float | None) -> str:
    """Format a duration: ``12 ms``, ``61.2 s``, ``3 min 5 s``, ``2 h 5 min``."""
    if value is None:
        return NONE
    if value < 0.9995:
        return f"{1000 * value:.3g} ms"
    if value < 120:
        return f"{value:.3g} s"
    minutes, rest = divmod(round(value), 60)
    if minutes < 120:
        return f"{minutes} min {rest} s"
    return f"{minutes // 60} h {minutes % 60} min"


def things(value: int, noun: str, plural: str = "") -> str:
    """Format a number with its noun: ``1 step``, ``2 steps``; ``2 diagnoses`` needs its plural."""
    return f"{count(value)} {noun if value == 1 else plural or noun + 's'}"


def listed(words: Sequence[str]) -> str:
    """Join words: ``a, b and c``."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def step_list(steps: Iterable[int]) -> str:
    """Format ascending step numbers, with consecutive ones combined: ``1, 5 to 9 and 3 more``.

    After six parts, the remaining steps are counted.
    """
    spans: list[list[int]] = []
    for step in steps:
        if spans and step == spans[-1][-1] + 1:
            spans[-1].append(step)
        else:
            spans.append([step])
    words = [", ".join(map(str, s)) if len(s) < 3 else f"{s[0]} to {s[-1]}" for s in spans[:6]]
    left = sum(map(len, spans[6:]))
    return listed([*words, f"{left} more"] if left else words)


def at_steps(steps: Iterable[int], noun: str = "step") -> str:
    """Format step or rank numbers after the noun: ``step 3``, ``steps 3 to 7``."""
    numbers = tuple(steps)
    return f"{noun}{'' if len(numbers) == 1 else 's'} {step_list(numbers)}"
