"""A trace as text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from halfstep.tracing.rows import PHASES, Row, short

_RIGHT = ("cast bytes", "cast time", "time")
_HEAD = ("op", "n", "inputs", "compute", "output", "rule", "casts", *_RIGHT)

Key = tuple[Any, ...]


def table(ops: Sequence[Row], environment: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the ops by phase and module, those that are alike in one line."""
    lines: list[str | tuple[str, ...]] = [_HEAD]
    for phase in PHASES:
        of_phase = [row for row in ops if row.phase == phase]
        if of_phase:
            lines.append(f"{phase}: {total(of_phase)}")
        for module, rows in _grouped(of_phase, lambda row: (row.module,)):
            lines.append(f"  {module[0] or '(in no submodule)'}")
            lines += [_cells(alike) for _, alike in _grouped(rows, _alike)]
    footer = [f"total: {total(ops)}", *notes]
    footer.append(", ".join(f"{key} {value}" for key, value in environment.items()))
    return "\n".join([*aligned(lines, indent=4), *footer])


def _grouped(rows: Iterable[Row], key: Callable[[Row], Key]) -> list[tuple[Key, list[Row]]]:
    groups: dict[Key, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.items())


def _alike(row: Row) -> Key:
    inputs = tuple(value.dtype for value in row.inputs)
    casts = tuple(sorted(map(str, row.casts)))
    return row.op, inputs, row.compute, row.output, row.rule, casts, _by_hand(row)


def _by_hand(row: Row) -> bool:
    return any(cast.by_hand for cast in row.casts)


def _cells(rows: Sequence[Row]) -> tuple[str, ...]:
    """Return the line for rows that are alike."""
    row = rows[0]
    is_cast = not row.outputs
    return (
        "cast" if is_cast else row.op,
        str(len(rows)),
        in_short(value.dtype for value in row.inputs),
        short(row.compute) or "-",
        short(row.output) or "-",
        row.rule or ("by hand" if _by_hand(row) else "-"),
        in_short(map(str, row.casts)) or "-",
        bytes_text(sum(row.cast_bytes for row in rows)) if row.casts else "-",
        seconds_text(sum(row.cast_seconds for row in rows)) if row.casts else "-",
        "-" if is_cast else seconds_text(sum(row.seconds for row in rows)),
    )


def total(rows: Sequence[Row]) -> str:
    """Return what some ops are and cost together."""
    num_ops = sum(bool(row.outputs) for row in rows)
    seconds = seconds_text(sum(row.seconds for row in rows))
    casts = f"{sum(len(row.casts) for row in rows)} casts"
    moved = bytes_text(sum(row.cast_bytes for row in rows))
    return f"{num_ops} ops in {seconds}, {casts} of {moved} in " + seconds_text(
        sum(row.cast_seconds for row in rows)
    )


# --- text -----------------------------------------------------------------------------------------


def aligned(
    lines: Sequence[str | tuple[str, ...]], indent: int = 0, right: Iterable[str] = ("n", *_RIGHT)
) -> list[str]:
    """Return lines with the cells of each in columns; the first line is the head.

    Lines that are text stay as they are. Columns whose head is in ``right`` end in one line.
    """
    cells = [line for line in lines if isinstance(line, tuple)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    ends = [head in right for head in cells[0]]
    return [
        line
        if isinstance(line, str)
        else " " * indent
        + "  ".join(
            f"{cell:>{width}}" if end else f"{cell:{width}}"
            for cell, width, end in zip(line, widths, ends, strict=True)
        ).rstrip()
        for line in lines
    ]


def in_short(words: Iterable[str]) -> str:
    """Return words with those that follow each other counted: ``"2 bf16, int64"``."""
    runs = [(word, len(list(run))) for word, run in groupby(map(short, words))]
    return ", ".join(word if num == 1 else f"{num} {word}" for word, num in runs)


def bytes_text(num: float) -> str:
    """Return ``"1.5 KiB"`` for 1536."""
    for unit in ("B", "KiB", "MiB"):
        if abs(num) < 1024:
            return f"{num:.0f} B" if unit == "B" else f"{num:.1f} {unit}"
        num /= 1024
    return f"{num:.1f} GiB"


def seconds_text(seconds: float) -> str:
    """Return ``"12.0 us"`` for 0.000012."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.1f} us"
    return f"{seconds * 1e3:.1f} ms" if seconds < 1 else f"{seconds:.2f} s"
