"""What reads what in a trace, and which values are lowered, raised or made from nothing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from halfstep._trace.rows import Row, is_float, is_lower


class Dataflow:
    """Who writes and who reads the memories of a forward pass.

    Attributes:
        writers: The last op that wrote to a memory, by its number.
        raised: The casts by hand from a lower precision, by the memories of their results.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.writers = {value.storage: row for row in rows for value in row.outputs}
        self.raised: dict[int, Row] = {}
        self._readers: dict[int, list[Row]] = defaultdict(list)
        self._lowered: set[tuple[int, int]] = set()  # by which row, which memory
        self._made: set[int] = set()  # memories whose values come from no tensor
        for row in rows:
            self._note(row)

    def _note(self, row: Row) -> None:
        for value in row.inputs:
            self._readers[value.storage].append(row)
        for cast in row.casts:
            if is_lower(cast.to):
                self._lowered.add((row.number, cast.source.storage))
            if cast.by_hand and is_lower(cast.source.dtype):
                self.raised[cast.result] = row
        floats = [value for value in row.inputs if is_float(value.dtype)]
        if row.op.endswith("_like") or all(value.storage in self._made for value in floats):
            self._made |= {value.storage for value in row.outputs}

    def readers(self, row: Row) -> list[Row]:
        """Return the ops that read what one returned."""
        return [reader for value in row.outputs for reader in self._readers[value.storage]]

    def is_lowered(self, row: Row, by: Callable[[Iterable[bool]], bool] = any) -> bool:
        """Say whether any reader, or ``all``, cast the output to a lower precision."""
        storage = row.outputs[0].storage if row.outputs else -1
        readers = self._readers[storage]
        return bool(readers) and by((each.number, storage) in self._lowered for each in readers)

    def flows_down(self, row: Row) -> bool:
        """Say whether the output is lowered: at once, or after an op that keeps its dtype."""
        return any(map(self.is_lowered, (row, *self.readers(row))))

    def is_fixed(self, row: Row) -> bool:
        """Say whether an op is not to be lowered: it makes values, or the loss."""
        if all(value.storage in self._made for value in row.outputs) or _is_loss(row):
            return True
        readers = self.readers(row)
        return row.op in ("sum", "mean") and bool(readers) and all(map(_is_loss, readers))


def _is_loss(row: Row) -> bool:
    is_number = any(is_float(v.dtype) and not v.shape for v in row.outputs[:1])
    return is_number or "loss" in row.op or "entropy" in row.op
