"""Differences between two traces: by module, phase and op."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from halfstep._trace.rows import Phase, Row, grouped
from halfstep._trace.text import (
    TableLine,
    aligned,
    bytes_text,
    cut,
    runs_text,
    seconds_text,
    total_text,
)

_HEAD = ("phase", "module", "op", "n", "compute", "rule", "casts", "cast bytes", "time")


@dataclass(frozen=True)
class OpTotal:
    """All calls of one op in one module and phase, together.

    Attributes:
        num: How often it ran.
        compute: The dtypes it computed in.
        rules: The rules that decided; empty if none did.
        num_casts: The number of casts made for it.
        cast_bytes: The bytes they read and wrote.
        seconds: How long it took, casts included.
    """

    num: int
    compute: tuple[str, ...]
    rules: tuple[str, ...]
    num_casts: int
    cast_bytes: int
    seconds: float

    @staticmethod
    def of(rows: Sequence[Row]) -> OpTotal:
        """Return the total of some rows."""
        return OpTotal(
            num=sum(not row.is_cast_only for row in rows),
            compute=tuple(sorted({row.compute for row in rows if row.compute})),
            rules=tuple(sorted({row.rule for row in rows if row.rule})),
            num_casts=sum(len(row.casts) for row in rows),
            cast_bytes=sum(row.cast_bytes for row in rows),
            seconds=sum(row.seconds + row.cast_seconds for row in rows),
        )


@dataclass(frozen=True)
class TraceDifference:
    """Op in one module and phase, in two traces.

    Attributes:
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        module: The path of the module.
        op: The op.
        before: Its calls in the first trace.
        after: Its calls in the second.
    """

    phase: Phase
    module: str
    op: str
    before: OpTotal
    after: OpTotal

    @property
    def only_time(self) -> bool:
        """Whether only the time differs."""
        return replace(self.before, seconds=0.0) == replace(self.after, seconds=0.0)

    @property
    def seconds_apart(self) -> float:
        """The difference of the times."""
        return abs(self.after.seconds - self.before.seconds)

    def _cells(self) -> tuple[str, ...]:
        def both(text: Callable[[OpTotal], str]) -> str:
            one, other = text(self.before) or "-", text(self.after) or "-"
            return one if one == other else f"{one} -> {other}"

        return (
            self.phase,
            self.module or "-",
            "cast" if self.op == "_to_copy" else cut(self.op),
            both(lambda side: str(side.num or "")),
            both(lambda side: runs_text(side.compute)),
            both(lambda side: ", ".join(side.rules)),
            both(lambda side: str(side.num_casts)),
            both(lambda side: bytes_text(side.cast_bytes)),
            both(lambda side: seconds_text(side.seconds)),
        )


@dataclass(frozen=True)
class TraceDiff:
    """Result of :meth:`halfstep.trace.diff`; its ``str()`` is a table.

    It is true if anything but times differs.

    Attributes:
        every: Every op in every module and phase, whether it differs or not.
        totals: One line of text for each trace.
    """

    every: tuple[TraceDifference, ...]
    totals: tuple[str, str]

    @property
    def differences(self) -> tuple[TraceDifference, ...]:
        """The ops whose dtype, rule, casts, bytes or number of calls differ."""
        return tuple(each for each in self.every if not each.only_time)

    @property
    def slower_or_faster(self) -> tuple[TraceDifference, ...]:
        """The ops of which only the time differs, by over 1 % of all time, the largest first."""
        alike = [each for each in self.every if each.only_time]
        all_time = max(
            sum(each.before.seconds for each in self.every),
            sum(each.after.seconds for each in self.every),
        )
        found = [each for each in alike if each.seconds_apart > 0.01 * all_time]
        return tuple(sorted(found, key=lambda each: -each.seconds_apart))

    def __bool__(self) -> bool:
        return bool(self.differences)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        lines: list[TableLine] = [_HEAD]
        lines += [each._cells() for each in self.differences]
        if self.slower_or_faster:
            lines.append("only the time differs:")
            lines += [each._cells() for each in self.slower_or_faster]
        if len(lines) > 1:
            yield from aligned(lines, right=())
        yield f"before: {self.totals[0]}"
        yield f"after:  {self.totals[1]}"


def diff(before: Sequence[Row], after: Sequence[Row]) -> TraceDiff:
    """Compare two traces by phase, module and op."""
    one, other = _totals(before), _totals(after)
    nothing = OpTotal.of(())
    every = tuple(
        TraceDifference(*key, one.get(key, nothing), other.get(key, nothing))
        for key in dict.fromkeys([*one, *other])
    )
    return TraceDiff(every, (total_text(before), total_text(after)))


def _totals(rows: Sequence[Row]) -> dict[tuple[Phase, str, str], OpTotal]:
    groups = grouped(rows, lambda row: (row.phase, row.module, row.op))
    return {key: OpTotal.of(group) for key, group in groups.items()}
