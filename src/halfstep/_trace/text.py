"""Text of a trace: its table, and the formats of its cells."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby

from halfstep._trace.rows import PHASES, Phase, Row, grouped, short

_HEAD = ("op", "n", "inputs", "compute", "rule", "bytes", "time")
_LONGEST_OP, _LONGEST_RULE = 32, 26

TableLine = str | tuple[str, ...]


def trace_text(ops: Sequence[Row], environment: Mapping[str, str], notes: Sequence[str]) -> str:
    """Return the ops by phase and module; equal ops share a line, equal modules a block."""
    lines: list[TableLine] = [_HEAD]
    for phase, of_phase in sorted(grouped(ops, lambda row: row.phase).items(), key=_order):
        lines.append(f"{phase}: {total_text(of_phase)}")
        modules = grouped(of_phase, lambda row: row.module)
        for alike in grouped(modules.items(), _content).values():
            paths = [path for path, _ in alike]
            title = ", ".join(folded(paths)) or "(in no submodule)"
            lines.append(f"  {title}" + (f"  x{len(paths)}" if len(paths) > 1 else ""))
            rows = [row for _, of_module in alike for row in of_module]
            for same in grouped(rows, _alike).values():
                lines += _cells(same)
    footer = [f"total: {total_text(ops)}", *notes]
    footer.append(", ".join(f"{key} {value}" for key, value in environment.items()))
    return "\n".join([*aligned(lines, indent=4), *footer])


def _order(group: tuple[Phase, object]) -> int:
    return PHASES.index(group[0])


def _content(module: tuple[str, list[Row]]) -> Hashable:
    """Return a key that is equal for modules that differ only in an index and do the same."""
    path, rows = module
    return pattern(path), tuple((key, len(same)) for key, same in grouped(rows, _alike).items())


def _alike(row: Row) -> Hashable:
    inputs = tuple(value.dtype for value in row.inputs)
    casts = tuple(sorted(map(str, row.casts)))
    return row.op, inputs, row.compute, row.output, row.rule, casts, _by_hand(row)


def _by_hand(row: Row) -> bool:
    return any(cast.by_hand for cast in row.casts)


def _cells(rows: Sequence[Row]) -> Iterator[TableLine]:
    """Yield a line for equal rows, and one for each kind of cast made for them."""
    row = rows[0]
    rule = cut(row.rule, _LONGEST_RULE) if row.rule else "by hand" if _by_hand(row) else "-"
    dtypes = dict.fromkeys((row.compute, row.output or row.compute))
    computes = "->".join(map(short, dtypes))
    inputs = runs_text(sorted(value.dtype for value in row.inputs))
    if not row.is_cast_only:
        seconds = seconds_text(sum(row.seconds for row in rows))
        yield cut(row.op), str(len(rows)), inputs, computes, rule, "-", seconds
    for text, casts in grouped((cast for row in rows for cast in row.casts), str).items():
        size = bytes_text(sum(cast.bytes for cast in casts))
        seconds = seconds_text(sum(cast.seconds for cast in casts))
        name, by = (f"cast {text}", rule) if row.is_cast_only else (f"  cast {text}", "-")
        yield name, str(len(casts)), "-", "-", by, size, seconds


def total_text(rows: Sequence[Row]) -> str:
    """Return the number and the cost of some ops together."""
    num_ops = sum(not row.is_cast_only for row in rows)
    seconds = seconds_text(sum(row.seconds for row in rows))
    casts = f"{sum(len(row.casts) for row in rows)} casts"
    moved = bytes_text(sum(row.cast_bytes for row in rows))
    return f"{num_ops} ops in {seconds}, {casts} of {moved} in " + seconds_text(
        sum(row.cast_seconds for row in rows)
    )


# --- text -----------------------------------------------------------------------------------------


def aligned(
    lines: Sequence[TableLine], indent: int = 0, right: Iterable[str] = ("n", "bytes", "time")
) -> list[str]:
    """Return lines with their cells in columns; the first line is the head.

    Lines that are text stay as they are. Columns whose head is in ``right`` are aligned to the
    right; empty columns are left out.
    """
    columns = list(zip(*(line for line in lines if isinstance(line, tuple)), strict=True))
    shown = [index for index, (_, *cells) in enumerate(columns) if set(cells) - {"-"}]
    formats = [
        f"{'>' if columns[i][0] in right else '<'}{max(map(len, columns[i]))}" for i in shown
    ]

    def text(line: TableLine) -> str:
        if isinstance(line, str):
            return line
        cells = (f"{line[i]:{form}}" for i, form in zip(shown, formats, strict=True))
        return (" " * indent + "  ".join(cells)).rstrip()

    return [text(line) for line in lines if isinstance(line, str) or shown]


def cut(name: str, longest: int = _LONGEST_OP) -> str:
    """Return the name of an op or rule; a long one without its middle."""
    half = longest // 2 - 1
    return name if len(name) <= longest else f"{name[:half]}..{name[-half:]}"


def runs_text(words: Iterable[str]) -> str:
    """Return words with repetitions counted: ``"2 bf16, int64"``."""
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


def pattern(module: str) -> str:
    """Return a path with ``*`` for each index in it."""
    return ".".join("*" if part.isdigit() else part for part in module.split("."))


def folded(modules: Iterable[str]) -> list[str]:
    """Return paths, with one glob for those that differ only in an index."""
    alike = grouped(dict.fromkeys(modules), pattern)
    return [glob if len(paths) > 1 else paths[0] for glob, paths in alike.items()]
