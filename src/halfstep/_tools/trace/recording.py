"""A recorded trace: its ops, as a table and as JSON."""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from msgspec import Struct

from halfstep._common.numbers import things
from halfstep._common.text import TableLine, aligned, preformatted
from halfstep._tools.json import decoded
from halfstep._tools.trace.rows import (
    PHASES,
    Phase,
    Row,
    bytes_text,
    cut,
    folded,
    grouped,
    pattern,
    runs_text,
    seconds_text,
    short,
)

SCHEMA = "halfstep.trace/1"


class _Schema(Struct):
    """The part of the JSON that is decoded first."""

    schema: str | None = None


class _Whole(Struct):
    environment: dict[str, str]
    notes: tuple[str, ...]
    ops: tuple[Row, ...]


class Recording:
    """Ops that ran, in order: of a trace, or read from JSON.

    Attributes:
        environment: Versions, device and policy: ``halfstep``, ``torch``, ``device``, ``policy``.
        notes: Caveats for the reader about how it was recorded.
    """

    def __init__(
        self, ops: tuple[Row, ...], environment: Mapping[str, str], notes: tuple[str, ...] = ()
    ) -> None:
        self._ops = ops
        self.environment = dict(environment)
        self.notes = notes

    def __repr__(self) -> str:
        num_ops = sum(not row.is_cast_only for row in self.ops)
        policy = self.environment.get("policy")
        return f"<trace: {things(num_ops, 'op')}, {f'policy {policy}' if policy else 'no policy'}>"

    def _repr_html_(self) -> str:
        return preformatted(self.table())

    @property
    def ops(self) -> tuple[Row, ...]:
        """The ops, each with the tensors that it read and wrote, as plain data."""
        return self._ops

    def table(self) -> str:
        """Return the ops by phase and module as text; equal calls share a line."""
        lines: list[TableLine] = [_TABLE_HEAD]
        by_phase = grouped(self.ops, lambda row: row.phase)
        for phase in filter(by_phase.get, PHASES):
            lines += _phase_lines(phase, by_phase[phase])
        footer = [f"total: {total_text(self.ops)}", *self.notes]
        footer.append(", ".join(f"{key} {value}" for key, value in self.environment.items()))
        return "\n".join([*aligned(lines, indent=4), *footer])

    def rows(self) -> list[dict[str, Any]]:
        """Return a dictionary of plain values for each op: ``pandas.DataFrame(t.rows())``.

        Keys: ``module``, ``call``, ``phase``, ``op``, ``input_dtypes``, ``input_shapes``,
        ``compute_dtype``, ``output_dtype``, ``output_shapes``, ``rule``, ``autocast`` (the lower
        precision, None where autocast was off), ``casts`` (each with ``from``, ``to``, ``bytes``,
        ``source``, ``by_hand``, ``seconds``), ``num_casts``, ``cast_bytes``, ``device``,
        ``seconds`` (without the casts), ``cast_seconds``.
        """
        return [row.plain() for row in self.ops]

    def to_json(self) -> str:
        """Return everything as JSON, which :meth:`from_json` reads."""
        ops = [asdict(row) for row in self.ops]
        data = {"schema": SCHEMA, "environment": self.environment, "notes": self.notes, "ops": ops}
        return json.dumps(data)

    @staticmethod
    def from_json(text: str | bytes) -> Recording:
        """Return the recording that :meth:`to_json` wrote.

        Raises:
            ValueError: The text is not JSON or not a trace, or a part is missing or of another
                type.
        """
        try:
            schema = decoded(_Schema, text).schema
            if schema == SCHEMA:
                whole = decoded(_Whole, text)
                return Recording(whole.ops, whole.environment, whole.notes)
        except ValueError as error:
            raise ValueError(
                f"trace.from_json: the text is not a {SCHEMA}, or is damaged: {error}"
            ) from None
        raise ValueError(
            f"trace.from_json reads what t.to_json() of this version wrote, with the schema "
            f"{SCHEMA!r}; this text has {schema!r}"
        )


# --- the table ------------------------------------------------------------------------------------

_TABLE_HEAD = ("op", "n", "inputs", "compute", "rule", "bytes", "time")
_LONGEST_RULE = 26


def _phase_lines(phase: Phase, rows: Sequence[Row]) -> Iterator[TableLine]:
    """Yield the ops of a phase by module; equal ops share a line, equal modules a block."""
    yield f"{phase}: {total_text(rows)}"
    modules = grouped(rows, lambda row: row.module)
    for alike in grouped(modules.items(), _content).values():
        paths = [path for path, _ in alike]
        title = ", ".join(folded(paths)) or "(in no submodule)"
        yield f"  {title}" + (f"  x{len(paths)}" if len(paths) > 1 else "")
        for same in grouped((row for _, rows in alike for row in rows), _alike).values():
            yield from _cells(same)


def _content(module: tuple[str, list[Row]]) -> Hashable:
    """Return a key that is equal for modules that run the same ops and differ only in an index."""
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
    """Format the number and the total cost of some ops."""
    num_ops = sum(not row.is_cast_only for row in rows)
    seconds = seconds_text(sum(row.seconds for row in rows))
    casts = things(sum(len(row.casts) for row in rows), "cast")
    moved = bytes_text(sum(row.cast_bytes for row in rows))
    return f"{things(num_ops, 'op')} in {seconds}, {casts} of {moved} in " + seconds_text(
        sum(row.cast_seconds for row in rows)
    )
