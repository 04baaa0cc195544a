"""What a trace shows that costs speed for nothing, as text and data."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from halfstep._trace.rows import Row, grouped
from halfstep._trace.table import bytes_text, seconds_text

Kind = Literal["repeated", "chain", "straggler", "costly", "dimension"]

MOST = 10
"""How many findings of a kind are printed."""


@dataclass(frozen=True)
class Finding:
    """One thing that costs speed.

    Attributes:
        kind: ``"repeated"``: one tensor cast to one dtype several times. ``"chain"``: an op that
            is given a lower precision, computes in float32, and whose output is lowered again.
            ``"straggler"``: an op that no rule lowers and whose float32 output is lowered by
            what follows. ``"costly"``: an op that a rule lowers, and whose casts are over half of
            all. ``"dimension"``: a weight of a product in lower precision with a dimension that is
            no multiple of 8, which is what matrix units take.
        modules: Where; paths.
        op: The op that a rule would name, or that has the dimension.
        what: What happens, in words.
        count: How many casts, or ops, are meant.
        bytes: Read and written by casts that the cure saves, backward pass included; for
            ``"costly"`` by all casts of the op.
        seconds: How long those ops took; only for ``"dimension"``.
        cure: What to do.
        policy: The text of the policy that does it, or None where no rule does. One with rules for
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


class Waste(tuple[Finding, ...]):
    """What :meth:`halfstep.trace.casts` returns: findings, the most bytes first. Prints as text.

    Attributes:
        cast_bytes: What all casts of the trace read and write.
        cast_seconds: How long they took.
        seconds: How long everything took.
    """

    cast_bytes: int
    cast_seconds: float
    seconds: float

    def __new__(cls, findings: Iterable[Finding], rows: Sequence[Row] = ()) -> Waste:
        """Rank the findings of a trace; a copy has no rows, and is given the attributes."""
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
            lines.append("nothing that a rule or a line of code would save")
        if any(each.policy and each.kind != "costly" for each in self):
            lines.append(
                "A rule that lowers an op rounds its results: look at the loss before keeping it. "
                "Savings of several cures do not add up."
            )
        return "\n".join(lines)
