"""Avoidable costs in a trace: casts that a rule or a line of code would save, and odd dimensions.

All functions take rows. A finding about casts requires a saving that is predicted to save bytes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from halfstep._tools.trace.rows import (
    Cast,
    Row,
    Value,
    bytes_text,
    folded,
    grouped,
    is_lower,
    pattern,
    seconds_text,
    short,
)
from halfstep._tools.trace.savings import Dataflow, Prediction, Saving, Savings, is_small, use

Kind = Literal["repeated", "chain", "straggler", "costly", "dimension"]

MOST = 10
"""Maximum number of printed findings of each kind."""


@dataclass(frozen=True)
class WasteFinding:
    """A cause of lost speed.

    Attributes:
        kind: ``"repeated"``: one tensor is cast to one dtype several times. ``"chain"``: an op
            reads a lower precision and computes in float32, and its output is lowered again.
            ``"straggler"``: no rule lowers the op, and the ops that follow lower its float32
            output. ``"costly"``: a rule lowers the op, and its casts are over half of all.
            ``"dimension"``: a product in lower precision has a weight with a dimension that is
            not a multiple of 8, as matrix units need it.
        modules: The paths of the modules.
        op: The op that a rule would name, or that has the dimension.
        what: The problem, in words.
        count: Number of casts, or of ops.
        bytes: The bytes of the casts that the cure saves, including the backward pass; for
            ``"costly"`` those of all casts of the op.
        seconds: Total time of those ops; only for ``"dimension"``.
        cure: The remedy.
        policy: The text of the policy that applies it, None if no rule does. One with rules for
            modules needs ``autocast(..., module=model)``.
    """

    kind: Kind
    modules: tuple[str, ...]
    op: str
    what: str
    count: int
    bytes: int
    seconds: float
    cure: str
    policy: str | None

    def __str__(self) -> str:
        size = seconds_text(self.seconds) if self.kind == "dimension" else bytes_text(self.bytes)
        return f"{size:>10}  {self.kind:9}  {self.what}\n{'':10}  cure: {self.cure}"


class Waste(tuple[WasteFinding, ...]):
    """The result of :meth:`halfstep.trace.casts`: findings, most bytes first. It prints as text.

    Attributes:
        cast_bytes: Bytes that all casts of the trace read and write.
        cast_seconds: Total time of the casts.
        seconds: Total time of all ops.
    """

    cast_bytes: int
    cast_seconds: float
    seconds: float

    def __new__(cls, findings: Iterable[WasteFinding], rows: Sequence[Row] = ()) -> Waste:
        """Sort the findings of a trace. A copy has no rows, and gets its attributes afterwards."""
        made = super().__new__(cls, sorted(findings, key=lambda each: (-each.bytes, -each.seconds)))
        made.cast_bytes = sum(row.cast_bytes for row in rows)
        made.cast_seconds = sum(row.cast_seconds for row in rows)
        made.seconds = sum(row.seconds for row in rows) + made.cast_seconds
        return made

    def __str__(self) -> str:
        share = self.cast_seconds / self.seconds if self.seconds else 0.0
        lines = [
            f"casts read and write {bytes_text(self.cast_bytes)} and take {share:.0%} of the time"
        ]
        for kind, found in grouped(self, lambda each: each.kind).items():
            lines += map(str, found[:MOST])
            if len(found) > MOST:
                lines.append(f"{'':10}  {kind:9}  and {len(found) - MOST} more")
        if not self:
            lines.append("no casts that a rule or a line of code would save")
        if any(each.policy and each.kind != "costly" for each in self):
            lines.append(
                "A rule that lowers an op rounds its results: check the loss before you keep it. "
                "The savings of several cures do not add up."
            )
        return "\n".join(lines)


# Matrix products, which are the reason for lower precision.
_PRODUCTS = ("mm", "matmul", "linear", "conv", "attention")


def find_waste(rows: Sequence[Row], policy: str) -> Waste:
    """Return the avoidable costs of a trace; cures add rules to the text of its policy."""
    return Waste([*_Search(rows, policy).findings(), *odd_dimensions(rows)], rows)


class _Search:
    """A search of one trace for avoidable casts."""

    def __init__(self, rows: Sequence[Row], policy: str) -> None:
        self._all, self._policy = rows, policy
        self._prediction = Prediction(rows)
        self._rows = self._prediction.forward
        self._flow = Dataflow(self._rows)
        self._savings = Savings(self._flow, self._prediction, policy)

    def findings(self) -> Iterator[WasteFinding]:
        """Yield the findings, without repeating a policy."""
        seen = set()
        found = (*self._repeated(), *self._chains(), *self._stragglers(), *self._costly())
        for finding in found:
            if finding.bytes > 0 and (finding.policy is None or finding.policy not in seen):
                seen.add(finding.policy)
                yield finding

    # --- one tensor, cast again -------------------------------------------------------------------

    def _repeated(self) -> Iterator[WasteFinding]:
        def same(pair: tuple[Row, Cast]) -> tuple[object, ...]:
            row, cast = pair  # by phase, since a recomputation is intended to cast again
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

    def _repetition(self, groups: list[list[tuple[Row, Cast]]]) -> WasteFinding:
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
        return _finding("repeated", [row for row, _ in pairs], op, what, cure)

    def _of_weight(self, row: Row, groups: list[list[tuple[Row, Cast]]]) -> Saving:
        cast = groups[0][0][1]
        if cast.by_hand:
            return Saving(self._bytes_again(groups), f"cast it once, to torch.{cast.to}", None)
        text = "one context around all uses"
        if row.ruled_op is None:
            text = "halfstep.autocast"
        elif not row.cache:
            text = "autocast(cache_enabled=True)"
        text += ", which keeps the cast of a weight from its second use on"
        text += ", unless other tensors share the storage of the weight"
        return Saving(self._bytes_again(groups), text, None)

    def _of_value(self, groups: list[list[tuple[Row, Cast]]]) -> Saving:
        cast = groups[0][0][1]
        sources = (self._flow.writers.get(group[0][1].source.storage) for group in groups)
        producers = [row for row in sources if row is not None]
        best = self._savings.best(producers, ("lower", "leave")) if producers else None
        by_hand = f"cast it once: x = x.to(torch.{cast.to})"
        return best or Saving(self._bytes_again(groups), by_hand, None)

    def _bytes_again(self, groups: list[list[tuple[Row, Cast]]]) -> int:
        casts = [cast for group in groups for _, cast in group[1:]]
        gradients = self._prediction.gradients
        return sum(cast.bytes + gradients.get(cast.number, 0) for cast in casts)

    # --- up and down again, or left in float32 ----------------------------------------------------

    def _chains(self) -> Iterator[WasteFinding]:
        for rows in grouped(filter(self._is_in_chain, self._rows), lambda row: row.name).values():
            row = rows[0]
            low = next(v.dtype for v in row.inputs if is_lower(v.dtype))
            what = (
                f"{row.name}: {short(low)} -> {short(row.compute)} -> {short(low)} by {row.rule}, "
                f"{_times(len(rows))}"
            )
            best = self._savings.best(rows, ("leave", "lower"))
            if best is not None:
                yield _finding("chain", rows, row.name, what, best)

    def _is_in_chain(self, row: Row) -> bool:
        is_raised = row.action in ("fp32", "fp32-dtype") and row.compute == "float32"
        return (
            is_raised and any(is_lower(v.dtype) for v in row.inputs) and self._flow.flows_down(row)
        )

    def _stragglers(self) -> Iterator[WasteFinding]:
        for rows in grouped(filter(self._is_straggler, self._rows), lambda row: row.name).values():
            row = rows[0]
            what = (
                f"{row.name}: runs in {short(row.compute)} {_times(len(rows))}, and what follows "
                f"lowers its output"
            )
            best = self._savings.best(rows, ("lower",)) or self._savings.with_neighbour(rows)
            if best is not None:
                yield _finding("straggler", rows, row.name, what, best)

    def _is_straggler(self, row: Row) -> bool:
        widest = (None, "leave", "promote", "fp32-sums")
        is_wide = row.action in widest and row.compute == "float32"
        is_meant = is_wide and row.autocast is not None and not self._flow.is_fixed(row)
        return is_meant and self._flow.flows_down(row)

    # --- much cast for little ---------------------------------------------------------------------

    def _costly(self) -> Iterator[WasteFinding]:
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
                cure = Saving(size, f"measure whether it is faster without: {use(policy)}", policy)
                yield _finding("costly", rows, name, what, cure)


def _is_again(pairs: list[tuple[Row, Cast]]) -> bool:
    """Return whether a tensor is cast more often than intended in a context."""
    row, cast = pairs[0]
    if not cast.source.is_weight or cast.by_hand:
        return len(pairs) > 1
    return len(pairs) > (2 if row.cache else 1) and not is_small(cast.source)


def _pattern(name: str) -> str:
    """Return the name of a tensor, ``"output of 0.norm mul"``, without indices."""
    return " ".join(map(pattern, name.split(" ")))


def _finding(kind: Kind, rows: list[Row], op: str, what: str, cure: Saving) -> WasteFinding:
    modules = tuple(dict.fromkeys(row.module for row in rows))
    return WasteFinding(kind, modules, op, what, len(rows), cure.bytes, 0.0, cure.text, cure.policy)


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"


# --- dimensions -----------------------------------------------------------------------------------

MULTIPLE = 8
"""The divisor that matrix units require of dimensions in two-byte dtypes."""

# The dimensions that a model determines. The number of rows, batch x tokens, depends on the data.
_Dimensions = dict[str, int]


def odd_dimensions(rows: Sequence[Row]) -> list[WasteFinding]:
    """Return a finding for each shape of a weight in the forward pass, with all its modules."""

    def key(row: Row) -> tuple[object, ...]:
        return row.op, row.compute, tuple(_odd(row).items()), _weight(row).shape

    meant = [row for row in rows if row.phase == "forward" and _odd(row)]
    return [_dimension_finding(alike) for alike in grouped(meant, key).values()]


def _dimension_finding(rows: list[Row]) -> WasteFinding:
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
    return WasteFinding("dimension", modules, row.op, what, len(rows), 0, seconds, cure, None)


def _odd(row: Row) -> _Dimensions:
    """Return the dimensions of a product in lower precision that are not multiples of 8."""
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
        # A weight of another shape has groups, which are computed differently.
        if sorted(shapes[1][:2]) == sorted(channels.values()):
            return channels
    return {}
