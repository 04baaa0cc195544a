"""What a trace shows that costs speed for nothing, and the rule that would cure it.

Pure functions over rows. Bytes that a rule saves are those of :mod:`halfstep.tracing.prediction`.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, overload

from halfstep.casting.policy import Policy
from halfstep.casting.rule import Action
from halfstep.casting.weight_cache import SMALL
from halfstep.tracing.dimensions import odd_dimensions
from halfstep.tracing.prediction import Prediction
from halfstep.tracing.rows import Cast, Row, is_lower, itemsize, short
from halfstep.tracing.table import bytes_text, seconds_text

Kind = Literal["repeated", "chain", "straggler", "dimension"]


@dataclass(frozen=True)
class Finding:
    """One thing that costs speed.

    Attributes:
        kind: ``"repeated"``: one tensor cast to one dtype several times. ``"chain"``: an op that
            is given a lower precision, computes in float32, and whose output is lowered again.
            ``"straggler"``: an op that no rule lowers and whose float32 output is lowered by
            what follows. ``"dimension"``: a matrix product in lower precision with a dimension
            that is no multiple of 8, which is what matrix units take.
        modules: Where; paths.
        op: The op that a rule would name, or that has the dimension.
        what: What happens, in words.
        count: How many casts, or ops, are meant.
        bytes: Read and written by casts that the cure saves, backward pass included.
        seconds: How long those ops took; only for ``"dimension"``.
        cure: What to do.
        policy: The text of the policy that does it, or None where no rule does.
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


class Waste(Sequence[Finding]):
    """What :meth:`halfstep.trace.casts` returns: findings, the most bytes first. Prints as text.

    Attributes:
        cast_bytes: What all casts of the trace read and write.
        cast_seconds: How long they took.
        seconds: How long everything took.
    """

    def __init__(self, findings: Sequence[Finding], rows: Sequence[Row]) -> None:
        self._findings = tuple(findings)
        self.cast_bytes = sum(row.cast_bytes for row in rows)
        self.cast_seconds = sum(row.cast_seconds for row in rows)
        self.seconds = sum(row.seconds for row in rows) + self.cast_seconds

    def __len__(self) -> int:
        return len(self._findings)

    @overload
    def __getitem__(self, index: int) -> Finding: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Finding]: ...
    def __getitem__(self, index: int | slice) -> Finding | Sequence[Finding]:
        return self._findings[index]

    def __str__(self) -> str:
        share = self.cast_seconds / self.seconds if self.seconds else 0.0
        head = (
            f"casts read and write {bytes_text(self.cast_bytes)} and take {share:.0%} of the time"
        )
        lines = [head, *map(str, self)]
        if not self:
            lines.append("nothing that a rule or a line of code would save")
        if any(each.policy for each in self):
            lines.append(
                "A rule that lowers an op rounds its results: look at the loss before keeping it. "
                "Savings of several cures do not add up."
            )
        return "\n".join(lines)


def find(rows: Sequence[Row], policy: str) -> Waste:
    """Return what a trace wastes.

    Args:
        rows: The trace.
        policy: The text of the policy it ran under: cures are that and one more rule.
    """
    found = [*_Search(rows, policy).findings()]
    ranked = sorted(found, key=lambda each: -each.bytes)
    return Waste([*ranked, *_odd_dimensions(rows)], rows)


class _Search:
    """The search for casts that can be saved."""

    def __init__(self, rows: Sequence[Row], policy: str) -> None:
        self._rows = [row for row in rows if row.phase != "backward"]
        self._policy = policy
        self._all = rows
        self._bytes = Prediction(rows, {}).bytes
        self._producers = {v.storage: row for row in self._rows for v in row.outputs}
        self._gradients = {
            cast.gradient_of: cast.bytes
            for row in rows
            for cast in row.casts
            if row.phase == "backward"
        }
        self._lowered: set[int] = set()
        self._readers: dict[int, list[Row]] = defaultdict(list)
        for row in self._rows:
            for value in row.inputs:
                self._readers[value.storage].append(row)
            for cast in row.casts:
                if is_lower(cast.to):
                    self._lowered.add(cast.source.storage)
        self._wide = dict.fromkeys(
            row.name
            for row in self._rows
            if row.action in ("fp32", "fp32-dtype") or self._is_straggler(row)
        )

    def findings(self) -> Iterator[Finding]:
        """Yield them, each cure once."""
        seen = set()
        for finding in (*self._repeated(), *self._chains(), *self._stragglers()):
            if finding.bytes > 0 and (finding.policy is None or finding.policy not in seen):
                seen.add(finding.policy)
                yield finding

    # --- one tensor, cast again -------------------------------------------------------------------

    def _repeated(self) -> Iterator[Finding]:
        # What is recomputed is cast again by intention: by phase.
        groups: dict[tuple[object, ...], list[Cast]] = defaultdict(list)
        where: dict[int, str] = {}
        for row in self._rows:
            for cast in row.casts:
                source = cast.source
                part = (source.storage, source.version, source.offset, source.shape)
                groups[row.phase, part, cast.to].append(cast)
                where[cast.number] = row.module
        for casts in groups.values():
            source = casts[0].source
            is_small = source.is_weight and math.prod(source.shape) * itemsize(source.dtype) < SMALL
            if len(casts) > 1 and not is_small:  # the cache leaves small weights alone
                modules = tuple(dict.fromkeys(where[cast.number] for cast in casts))
                yield self._repetition(casts, modules)

    def _repetition(self, casts: list[Cast], modules: tuple[str, ...]) -> Finding:
        first, source = casts[0], casts[0].source
        name = source.name or f"a tensor {list(source.shape)} from outside the model"
        what = f"{name}: cast {first} {_times(len(casts))}"
        op, policy = "", None
        if source.is_weight and not any(cast.by_hand for cast in casts):
            size = sum(cast.bytes for cast in casts)
            cure = "autocast(cache_enabled=True), which keeps a cast from its second use on"
        else:
            size = sum(cast.bytes + self._gradients.get(cast.number, 0) for cast in casts[1:])
            cure = f"cast it once: x = x.to(torch.{first.to}); a weight belongs in an nn.Parameter"
            producer = self._producers.get(source.storage)
            best = self._best(producer, ("lower", "leave")) if producer else None
            if producer is not None and best is not None:
                op, size, policy = producer.name, best[0], best[1]
                cure = _use(policy)
        return Finding("repeated", modules, op, what, len(casts), size, 0.0, cure, policy)

    # --- up and down again ------------------------------------------------------------------------

    def _chains(self) -> Iterator[Finding]:
        for rows in self._by_name(self._is_in_chain):
            row = rows[0]
            best = self._best(row, ("leave", "lower"))
            low = next(v.dtype for v in row.inputs if is_lower(v.dtype))
            what = (
                f"{row.name}: {short(low)} -> {short(row.compute)} -> {short(low)} by {row.rule}, "
                f"{_times(len(rows))}"
            )
            if best is not None:
                yield self._finding("chain", rows, what, *best)

    def _is_in_chain(self, row: Row) -> bool:
        is_raised = row.action in ("fp32", "fp32-dtype") and row.compute == "float32"
        return is_raised and any(is_lower(v.dtype) for v in row.inputs) and self._is_lowered(row)

    # --- left in float32 --------------------------------------------------------------------------

    def _stragglers(self) -> Iterator[Finding]:
        for rows in self._by_name(self._is_straggler):
            row = rows[0]
            best = self._best(row, ("lower",)) or self._best_together(row)
            what = (
                f"{row.name}: runs in {short(row.compute)} {_times(len(rows))}, and what follows "
                f"lowers its output"
            )
            if best is not None:
                yield self._finding("straggler", rows, what, *best)

    def _is_straggler(self, row: Row) -> bool:
        is_wide = row.action in (None, "leave", "promote") and row.compute == "float32"
        return is_wide and row.autocast is not None and self._flows_into_lower(row)

    def _flows_into_lower(self, row: Row) -> bool:
        """Say whether the output is lowered: at once, or after ops that keep its dtype."""
        readers = (other for value in row.outputs for other in self._readers[value.storage])
        return self._is_lowered(row) or any(map(self._is_lowered, readers))

    # --- cures ------------------------------------------------------------------------------------

    def _is_lowered(self, row: Row) -> bool:
        return any(value.storage in self._lowered for value in row.outputs[:1])

    def _by_name(self, is_meant: Callable[[Row], bool]) -> Iterator[list[Row]]:
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in self._rows:
            if is_meant(row):
                groups[row.name].append(row)
        yield from groups.values()

    def _best(self, row: Row, actions: tuple[Action, ...]) -> tuple[int, str] | None:
        """Return what a rule for one op saves, and the policy with it; None if it saves nothing."""
        found = [self._saved([row.name], action) for action in actions]
        return _most(found)

    def _best_together(self, row: Row) -> tuple[int, str] | None:
        """Return the same for it and one or two others in float32, such as the norm behind it."""
        others = [name for name in self._wide if name != row.name]
        for size in (1, 2):
            sets = combinations(others, size)
            best = _most([self._saved(sorted([row.name, *names]), "lower") for names in sets])
            if best is not None:
                return best
        return None

    def _saved(self, ops: list[str], action: Action) -> tuple[int, str] | None:
        policy = f"{self._policy}; {','.join(ops)}:{action}"
        try:
            Policy.parse(policy)
        except ValueError:  # an op in place, say, that no such rule is about
            return None
        return self._bytes - Prediction(self._all, dict.fromkeys(ops, action)).bytes, policy

    def _finding(self, kind: Kind, rows: list[Row], what: str, size: int, policy: str) -> Finding:
        modules = tuple(dict.fromkeys(row.module for row in rows))
        cure = _use(policy)
        return Finding(kind, modules, rows[0].name, what, len(rows), size, 0.0, cure, policy)


def _most(found: Sequence[tuple[int, str] | None]) -> tuple[int, str] | None:
    best = max((each for each in found if each), key=lambda each: each[0], default=None)
    return best if best and best[0] > 0 else None


def _times(num: int) -> str:
    return "once" if num == 1 else f"{num} times"


def _use(policy: str) -> str:
    return f'autocast(policy="{policy}")'


# --- dimensions -----------------------------------------------------------------------------------


def _odd_dimensions(rows: Sequence[Row]) -> list[Finding]:
    """Return a finding for each module and shape, those that took longest first."""
    groups: dict[tuple[object, ...], list[Row]] = defaultdict(list)
    for row in rows:
        if odd_dimensions(row):
            shapes = tuple(value.shape for value in row.inputs)
            groups[row.module, row.op, shapes].append(row)
    found = [_of_dimension(alike) for alike in groups.values()]
    return sorted(found, key=lambda each: -each.seconds)


def _of_dimension(rows: list[Row]) -> Finding:
    row = rows[0]
    odd = odd_dimensions(row)
    shapes = " x ".join(str(list(value.shape)) for value in row.inputs)
    what = f"{row.module or 'model'}: {row.op} of {shapes} in {short(row.compute)}, " + ", ".join(
        f"{each.name} {each.size}" for each in odd
    )
    cure = "pad " + ", ".join(f"{each.name} to {each.next_multiple}" for each in odd)
    seconds = sum(row.seconds for row in rows)
    return Finding("dimension", (row.module,), row.op, what, len(rows), 0, seconds, cure, None)
