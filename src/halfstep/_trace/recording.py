"""Recorded trace: its ops, its JSON, and the methods that answer questions about it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from halfstep._common.json import decoded
from halfstep._common.text import preformatted
from halfstep._trace.diff import TraceDiff, diff
from halfstep._trace.rows import Row
from halfstep._trace.text import trace_text

if TYPE_CHECKING:
    from halfstep._trace.waste import Waste

SCHEMA = "halfstep.trace/1"


class _Schema(Struct):
    """The part of the JSON that is read first."""

    schema: str | None = None


class _Whole(Struct):
    """The JSON of a recording."""

    environment: dict[str, str]
    notes: tuple[str, ...]
    ops: tuple[Row, ...]


class Recording:
    """Ops that ran, in order: of a trace, or read from JSON.

    Attributes:
        environment: Versions, device and policy: ``halfstep``, ``torch``, ``device``, ``policy``.
        notes: What a reader should know about how it was made.
    """

    def __init__(
        self, ops: tuple[Row, ...], environment: Mapping[str, str], notes: tuple[str, ...] = ()
    ) -> None:
        self._ops = ops
        self.environment = dict(environment)
        self.notes = notes

    def __repr__(self) -> str:
        num_ops, policy = (
            sum(not row.is_cast_only for row in self.ops),
            self.environment.get("policy"),
        )
        return f"<trace: {num_ops} ops, {f'policy {policy}' if policy else 'no policy'}>"

    def _repr_html_(self) -> str:
        return preformatted(self.table())

    @property
    def ops(self) -> tuple[Row, ...]:
        """The ops, each with the tensors that it read and wrote, as plain data."""
        return self._ops

    def table(self) -> str:
        """Return the ops by phase and module as text; equal calls share a line."""
        return trace_text(self.ops, self.environment, self.notes)

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

    def diff(self, other: Recording) -> TraceDiff:
        """Return what ran differently in ``other``; it prints as a table.

        Args:
            other: A trace of the same model under another policy, on another device or with
                another version (:meth:`from_json`).

        Raises:
            TypeError: ``other`` is not a trace.
        """
        if not isinstance(other, Recording):
            raise TypeError(
                f"diff({type(other).__name__}): pass another trace, or trace.from_json(text)"
            )
        return diff(self.ops, other.ops)

    def casts(self) -> Waste:
        """Return the casts that a policy or a line of code would save, and other costs of speed.

        The result is a sequence of findings, the most bytes first; it prints as text.
        """
        from halfstep._trace.waste import find_waste  # PyTorch, which nothing else here needs

        return find_waste(self.ops, self.environment.get("policy", "standard"))
