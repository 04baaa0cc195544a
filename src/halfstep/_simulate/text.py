"""What a simulation found, as text."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep._numerics.formats import Format
from halfstep._simulate.counts import Count
from halfstep._trace.table import Line, aligned

_HEAD = ("module", "phase", "values", "saturated", "flushed", "share", "amax")


def table(rows: Sequence[Count], format: Format, *, clips: bool, notes: Sequence[str]) -> str:
    """Return the counts as a table under two lines that sum it up, with notes under it."""
    lines: list[Line] = [_HEAD, *map(_cells, rows)]
    body = aligned(lines, right=_HEAD[2:]) if rows else []
    return "\n".join([summary(rows, format), worst(rows, format, clips=clips), *body, *notes])


def summary(rows: Sequence[Count], format: Format) -> str:
    """Return ``"fp16: 81,920 values rounded, 12 saturated, 3,004 flushed to zero"``."""
    values, saturated, flushed = (
        sum(getattr(row, name) for row in rows) for name in ("values", "saturated", "flushed")
    )
    return (
        f"{format.name}: {values:,} values rounded, {saturated:,} saturated, "
        f"{flushed:,} flushed to zero"
    )


def worst(rows: Sequence[Count], format: Format, *, clips: bool) -> str:
    """Return what is worst of rows that are sorted so, in a line."""
    if not rows:
        return "nothing was rounded: no product that the policy lowers ran in the block"
    row = rows[0]
    if not row.saturated + row.flushed:
        return f"worst: none; every value is in the range of {format.name}"
    parts = []
    if row.saturated:
        became = f"clipped to {format.largest:,g}" if clips else "became inf"
        parts.append(f"{_percent(row.saturated, row.values)} of its values {became}")
    if row.flushed:
        of = "" if parts else " of its values"
        parts.append(f"{_percent(row.flushed, row.values)}{of} became zero")
    ends = f"{format.name} ends at {format.largest:,g} and {format.smallest_subnormal:.3g}"
    lost = " and ".join(parts)
    return f"worst: {_name(row)}, {row.phase}: {lost}; largest {row.amax:.3g}, {ends}"


def _name(row: Count) -> str:
    return row.module or "(in no submodule)"


def _cells(row: Count) -> tuple[str, ...]:
    lost = row.saturated + row.flushed
    return (
        _name(row),
        row.phase,
        f"{row.values:,}",
        f"{row.saturated:,}",
        f"{row.flushed:,}",
        _percent(lost, row.values),
        f"{row.amax:.3g}",
    )


def _percent(count: int, of: int) -> str:
    share = 100 * count / of
    return f"{share:.3g} %" if share < 99.95 or count == of else f"{share:.5g} %"
