"""What a person can paste: calls that keep a module in float32, and numbers in them."""

from __future__ import annotations

import math

from halfstep._common.text import Code
from halfstep._report.summary import Summary


def island(module: str | None, summary: Summary) -> Code | None:
    """Return the call that keeps a module in float32; None if no rule can name it."""
    from halfstep._autocast.policy import Policy  # PyTorch, which most reports do without

    policy = summary.policies[-1].text if summary.policies else "standard"
    text = f"{policy}; @{module}:fp32"
    # A second model has names with its number, which are not in it.
    if not module or "[" in module or "(" in module:
        return None
    try:
        Policy.parse(text)
    except ValueError:
        return None
    return Code(f'halfstep.autocast(..., policy="{text}", module=model)')


def literal(power: float) -> str:
    """Return a power of two as it is written in code."""
    return f"{power:g}" if power.is_integer() and power <= 65536 else f"2.0**{math.log2(power):g}"
