"""The search for casts that a rule, or a line of code, would save.

Pure functions over rows. Bytes that a cure saves are those of :mod:`halfstep._trace.prediction`: a
cure that is not predicted to save any is none.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from halfstep._trace.cures import Cure, Cures, use
from halfstep._trace.dataflow import Dataflow
from halfstep._trace.dimensions import odd_dimensions
from halfstep._trace.findings import Finding, Kind, Waste
from halfstep._trace.prediction import Prediction, is_small
from halfstep._trace.rows import Cast, Row, grouped, is_lower, pattern, short
from halfstep._trace.table import bytes_text, seconds_text

# Matrix products, which are why one lowers at all.
_PRODUCTS = ("mm", "matmul", "linear", "conv", "attention")


def find(rows: Sequence[Row], policy: str) -> Waste:
    """Return what a trace wastes.

    Args:
        rows: The trace.
        policy: The text of the policy it ran under: cures are that and more rules.
    """
    return Waste([*_Search(rows, policy).findings(), *odd_dimensions(rows)], rows)


class _Search:
    """The search through one trace."""

    def __init__(self, rows: Sequence[Row], policy: str) -> None:
        self._all, self._policy = rows, policy
        self._prediction = Prediction(rows)
        self._rows = self._prediction.forward
        self._flow = Dataflow(self._rows)
        self._cures = Cures(self._flow, self._prediction, policy)

    def findings(self) -> Iterator[Finding]:
        """Yield them, each policy once."""
        seen = set()
        found = (*self._repeated(), *self._chains(), *self._stragglers(), *self._costly())
        for finding in found:
            if finding.bytes > 0 and (finding.policy is None or finding.policy not in seen):
                seen.add(finding.policy)
                yield finding

    # --- one tensor, cast again -------------------------------------------------------------------

    def _repeated(self) -> Iterator[Finding]:
        def same(pair: tuple[Row, Cast]) -> tuple[object, ...]:
            row, cast = pair  # what is recomputed is cast again by intention: by phase
            part = (cast.source.storage, cast.source.version, cast.source.offset, cast.source.shape)
            return row.phase, part, cast.to

        def alike(pairs: list[tuple[Row, Cast]]) -> tuple[object, ...]:
            cast = pairs[0][1]
            by_hand = any(each.by_hand for _, each in pairs)
            return _pattern(cast.source.name), cast.to, len(pairs), by_hand

        casts = ((row, cast) for row in self._rows for cast in row.casts)
        again = [pairs for pairs in grouped(casts, same).values() if _is_again(pairs)]
        for groups in grouped(again, alike).values():
            yield self._repetition(groups)

    def _repetition(self, groups: list[list[tuple[Row, Cast]]]) -> Finding:
        pairs = [pair for group in groups for pair in group]
        row, first = pairs[0]
        cure = self._of_weight(row, groups) if first.source.is_weight else self._of_value(groups)
        names = {group[0][1].source.name for group in groups}
        name = first.source.name if len(names) == 1 else _pattern(first.source.name)
        name = name or f"a tensor {list(first.source.shape)} from outside the model"
        what = f"{name}: cast {first} {len(groups[0])} times"
        if len(groups) > 1:
            what += f", {len(groups)} tensors"
        producer = self._flow.writers.get(first.source.storage)
        op = producer.name if producer and cure.policy else ""
        return _finding("repeated", [row for row, _ in pairs], op, what, len(pairs), cure)

    def _of_weight(self, row: Row, groups: list[list[tuple[Row, Cast]]]) -> Cure:
        cast = groups[0][0][1]
        if cast.by_hand:
            return Cure(self._bytes_again(groups), f"cast it once, to torch.{cast.to}", None)
        hold = "halfstep.hold_casts(model), which keeps casts from one context to the next"
        if row.rule is None:
            text = f"halfstep.autocast inside of {hold}"
        elif row.cache:
            text = f"{hold}, unless other tensors share the storage of the weight"
            return Cure(self._bytes_again(groups), text, None)
        else:
            text = f"autocast(cache_enabled=True) inside of {hold}"
        return Cure(sum(cast.bytes for group in groups for _, cast in group), text, None)

    def _of_value(self, groups: list[list[tuple[Row, Cast]]]) -> Cure:
        cast = groups[0][0][1]
        sources = (self._flow.writers.get(group[0][1].source.storage) for group in groups)
        producers = [row for row in sources if row is not None]
        best = self._cures.best(producers, ("lower", "leave")) if producers else None
        by_hand = f"cast it once: x = x.to(torch.{cast.to})"
        return best or Cure(self._bytes_again(groups), by_hand, None)

    def _bytes_again(self, groups: list[list[tuple[Row, Cast]]]) -> int:
        casts = [cast for group in groups for _, cast in group[1:]]
        gradients = self._prediction.gradients
        return sum(cast.bytes + gradients.get(cast.number, 0) for cast in casts)

    # --- up and down again, or left in float32 ----------------------------------------------------

    def _chains(self) -> Iterator[Finding]:
        for rows in grouped(filter(self._is_in_chain, self._rows), lambda row: row.name).values():
            row = rows[0]
            low = next(v.dtype for v in row.inputs if is_lower(v.dtype))
            what = (
                f"{row.name}: {short(low)} -> {short(row.compute)} -> {short(low)} by {row.rule}, "
                f"{_times(len(rows))}"
            )
            best = self._cures.best(rows, ("leave", "lower"))
            if best is not None:
                yield _finding("chain", rows, row.name, what, len(rows), best)

    def _is_in_chain(self, row: Row) -> bool:
        is_raised = row.action in ("fp32", "fp32-dtype") and row.compute == "float32"
        return (
            is_raised and any(is_lower(v.dtype) for v in row.inputs) and self._flow.flows_down(row)
        )

    def _stragglers(self) -> Iterator[Finding]:
        for rows in grouped(filter(self._is_straggler, self._rows), lambda row: row.name).values():
            row = rows[0]
            what = (
                f"{row.name}: runs in {short(row.compute)} {_times(len(rows))}, and what follows "
                f"lowers its output"
            )
            best = self._cures.best(rows, ("lower",)) or self._cures.with_neighbour(rows)
            if best is not None:
                yield _finding("straggler", rows, row.name, what, len(rows), best)

    def _is_straggler(self, row: Row) -> bool:
        is_wide = row.action in (None, "leave", "promote") and row.compute == "float32"
        is_meant = is_wide and row.autocast is not None and not self._flow.is_fixed(row)
        return is_meant and self._flow.flows_down(row)

    # --- much cast for little ---------------------------------------------------------------------

    def _costly(self) -> Iterator[Finding]:
        every = sum(row.cast_bytes for row in self._all)
        lowered = (row for row in self._all if row.action == "lower")
        for name, rows in grouped(lowered, lambda row: row.name).items():
            size = sum(row.cast_bytes for row in rows)
            if 2 * size > every and not any(product in name for product in _PRODUCTS):
                what = (
                    f"{name}: its casts are {bytes_text(size)} of {bytes_text(every)} and take "
                    f"{seconds_text(sum(row.cast_seconds for row in rows))}, the op "
                    f"{seconds_text(sum(row.seconds for row in rows))}"
                )
                policy = f"{self._policy}; {name}:leave"
                cure = Cure(size, f"measure whether it is faster without: {use(policy)}", policy)
                yield _finding("costly", rows, name, what, len(rows), cure)


def _is_again(pairs: list[tuple[Row, Cast]]) -> bool:
    """Return whether casts of one tensor are more than a context makes by intention."""
    row, cast = pairs[0]
    if not cast.source.is_weight or cast.by_hand:
        return len(pairs) > 1
    return len(pairs) > (2 if row.cache else 1) and not is_small(cast.source)


def _pattern(name: str) -> str:
    """Return the name of a tensor, ``"output of 0.norm mul"``, without indices."""
    return " ".join(map(pattern, name.split(" ")))


def _finding(kind: Kind, rows: list[Row], op: str, what: str, count: int, cure: Cure) -> Finding:
    modules = tuple(dict.fromkeys(row.module for row in rows))
    return Finding(kind, modules, op, what, count, cure.bytes, 0.0, cure.text, cure.policy)


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"
