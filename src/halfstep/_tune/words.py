"""How the numbers of a module are written."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from halfstep._common.numbers import percent
from halfstep._trace import rows
from halfstep._tune.row import Row

MODEL = "(the model)"
OUTSIDE = "ops outside of its modules, or the loss"
HEAD = ("module", "class", "output error", "gradient error", "overflow", "underflow", "")


def short(dtype: torch.dtype) -> str:
    """Return ``"fp16"`` or ``"bf16"``."""
    return rows.short(rows.dtype_name(dtype))


def name_of(module: str) -> str:
    """Return the name of a module; words for the model itself, whose name is empty."""
    return module or MODEL


def error_text(error: float, tolerance: float | None = None) -> str:
    """Return an error, and what it may be: ``"0.0012 of 0.01"``, ``"inf"``."""
    text = "inf" if math.isinf(error) else f"{error:.2g}"
    return text if tolerance is None else f"{text} of {tolerance:.2g}"


def cells(row: Row, origins: Collection[str]) -> tuple[str, ...]:
    """Return a line of the table."""
    result = "begins here" if row.module in origins else "ok" if row.passed else "FAIL"
    return (
        name_of(row.module),
        row.kind,
        error_text(row.output.error, row.output_tolerance),
        error_text(row.gradient_error, row.gradient_tolerance),
        percent(row.overflow_share) if row.overflow_share else "-",
        percent(row.underflow_share) if row.underflow_share else "-",
        result,
    )
