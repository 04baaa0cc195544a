"""Comparisons as plain values, for a file, and back."""

from __future__ import annotations

from dataclasses import astuple
from typing import Any

from halfstep._tune.difference import Difference
from halfstep._tune.passes import KINDS, Comparison
from halfstep._tune.row import Row

_NUMBERS = ("output_tolerance", "gradient_tolerance")


def to_values(comparison: Comparison) -> dict[str, Any]:
    """Return a dictionary of plain values that holds all of a comparison."""
    return {
        "scale": comparison.scale,
        "loss": comparison.loss,
        "loss32": comparison.loss32,
        "rows": [
            {
                "module": row.module,
                "kind": row.kind,
                "is_leaf": row.is_leaf,
                **{name: getattr(row, name) for name in _NUMBERS},
                **{kind: list(astuple(getattr(row, kind))) for kind in KINDS},
            }
            for row in comparison.rows
        ],
    }


def from_values(values: dict[str, Any]) -> Comparison:
    """Undo :func:`to_values`; non-finite numbers may be strings, as in a record."""
    rows = tuple(
        Row(**{**row, **{kind: _difference(row[kind]) for kind in KINDS}}) for row in values["rows"]
    )
    scale, loss, loss32 = (float(values[name]) for name in ("scale", "loss", "loss32"))
    return Comparison(rows, scale, loss, loss32)


def _difference(numbers: list[Any]) -> Difference:
    size, square_error, square_norm, *counts = numbers
    return Difference(size, float(square_error), float(square_norm), *counts)
