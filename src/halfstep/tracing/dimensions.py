"""Matrix products whose dimensions miss the matrix units."""

from __future__ import annotations

from typing import NamedTuple

from halfstep.tracing.rows import Row, is_lower

MULTIPLE = 8
"""What the dimensions of a product in two-byte dtypes are to be multiples of."""


class Dimension(NamedTuple):
    """A dimension of an op that is no multiple of 8."""

    name: str
    size: int

    @property
    def next_multiple(self) -> int:
        """The smallest multiple that holds it."""
        return -(-self.size // MULTIPLE) * MULTIPLE


def odd_dimensions(row: Row) -> list[Dimension]:
    """Return the dimensions of a product in lower precision that are no multiples of 8."""
    if not is_lower(row.compute):
        return []
    return [each for each in _dimensions(row) if each.size % MULTIPLE]


def _dimensions(row: Row) -> list[Dimension]:
    shapes = [value.shape for value in row.inputs]
    if row.op in ("mm", "bmm"):
        (rows, inner), columns = shapes[0][-2:], shapes[1][-1]
    elif row.op in ("addmm", "baddbmm"):
        (rows, inner), columns = shapes[1][-2:], shapes[2][-1]
    elif row.op in ("convolution", "convolution_backward"):
        weight = shapes[1] if row.op == "convolution" else shapes[2]
        return [Dimension("channels out", weight[0]), Dimension("channels in", weight[1])]
    elif "scaled_dot_product" in row.op and len(shapes) > 1 and len(shapes[0]) > 1:
        query, key = shapes[0], shapes[1]
        return [
            Dimension("queries", query[-2]),
            Dimension("keys", key[-2]),
            Dimension("head width", query[-1]),
        ]
    else:
        return []
    return [Dimension("rows", rows), Dimension("inner", inner), Dimension("columns", columns)]
