"""Weights whose dimensions miss the matrix units."""

from __future__ import annotations

import math
from collections.abc import Sequence

from halfstep._trace.findings import Finding
from halfstep._trace.rows import Row, Value, folded, grouped, is_lower, short

MULTIPLE = 8
"""What the dimensions of a product in two-byte dtypes are to be multiples of."""

# What a model chooses. How many rows go through a weight, batch x tokens, is up to the data.
_Dimensions = dict[str, int]


def odd_dimensions(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding for each shape of a weight in the forward pass, with all its modules."""

    def key(row: Row) -> tuple[object, ...]:
        return row.op, row.compute, tuple(_odd(row).items()), _weight(row).shape

    meant = [row for row in rows if row.phase == "forward" and _odd(row)]
    return [_finding(alike) for alike in grouped(meant, key).values()]


def _finding(rows: list[Row]) -> Finding:
    row, odd = rows[0], _odd(rows[0])
    modules = tuple(dict.fromkeys(each.module for each in rows))
    what = (
        f"{', '.join(folded(modules)) or 'model'}: {row.op} in {short(row.compute)} with "
        f"{list(_weight(row).shape)}, " + ", ".join(f"{name} {size}" for name, size in odd.items())
    )
    cure = "pad " + ", ".join(
        f"{name} to {-(-size // MULTIPLE) * MULTIPLE}" for name, size in odd.items()
    )
    seconds = sum(each.seconds for each in rows)
    return Finding("dimension", modules, row.op, what, len(rows), 0, seconds, cure, None)


def _odd(row: Row) -> _Dimensions:
    """Return the dimensions of a product in lower precision that are no multiples of 8."""
    if not is_lower(row.compute) or not all(math.prod(value.shape) for value in row.inputs):
        return {}
    return {name: size for name, size in _dimensions(row).items() if size % MULTIPLE}


def _weight(row: Row) -> Value:
    return next((value for value in row.inputs if _is_matrix(value)), row.inputs[0])


def _is_matrix(value: Value) -> bool:
    return value.is_weight and len(value.shape) > 1


def _dimensions(row: Row) -> _Dimensions:
    shapes = [value.shape for value in row.inputs]
    if "scaled_dot_product" in row.op and shapes and len(shapes[0]) > 1:
        return {"head width": shapes[0][-1]}
    if row.op in ("mm", "bmm", "addmm", "baddbmm"):
        left, right = row.inputs[-2:]
        if _is_matrix(right):
            return {"features in": right.shape[-2], "features out": right.shape[-1]}
        if _is_matrix(left):
            return {"features in": left.shape[-1], "features out": left.shape[-2]}
    if row.op == "convolution":
        channels = {"channels in": shapes[0][1], "channels out": row.outputs[0].shape[1]}
        # A weight of another shape has groups, which are computed in another way.
        if sorted(shapes[1][:2]) == sorted(channels.values()):
            return channels
    return {}
