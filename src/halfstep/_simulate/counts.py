"""Counts of the values that rounding loses, by module and phase; and their text."""

from __future__ import annotations

import math
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep._numerics.formats import Format
from halfstep._pytorch import modes
from halfstep._trace.rows import Phase
from halfstep._trace.text import aligned


@dataclass(frozen=True)
class RoundingCount:
    """Counts of the values that were rounded in a module.

    Attributes:
        module: Its path; empty for the model itself and for ops outside of it.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        values: How many values were rounded.
        saturated: How many finite values were too large: they became inf or the largest value.
        flushed: How many values that were not zero became zero.
        amax: The largest finite magnitude before rounding.
    """

    module: str
    phase: Phase
    values: int
    saturated: int
    flushed: int
    amax: float

    @property
    def share(self) -> float:
        """The share of values that were saturated or flushed, 0 to 1."""
        return (self.saturated + self.flushed) / self.values if self.values else 0.0

    def plain(self) -> dict[str, Any]:
        """Return plain values by name."""
        return {**asdict(self), "share": self.share}


class _Sum(NamedTuple):
    """Sums on a device, which are read only at the end."""

    values: int
    saturated: Tensor
    flushed: Tensor
    amax: Tensor

    def joined(self, other: _Sum) -> _Sum:
        # Not in place: a tensor made in inference mode must not be changed outside of it.
        return _Sum(
            self.values + other.values,
            self.saturated + other.saturated,
            self.flushed + other.flushed,
            torch.maximum(self.amax, other.amax),
        )


class RoundingCounts:
    """Running counts of values that are rounded to a format, to which several threads add."""

    def __init__(self, format: Format) -> None:
        self._format = format
        self._sums: dict[tuple[str, Phase, torch.device], _Sum] = {}
        self._lock = threading.Lock()

    def add(self, module: str, phase: Phase, values: Tensor) -> None:
        """Count values before they are rounded. Sync: none."""
        if not values.numel():
            return
        with modes.unseen_by_modes():
            counted = _counted(values, self._format)
            with self._lock:
                key = (module, phase, values.device)
                before = self._sums.get(key)
                self._sums[key] = counted if before is None else before.joined(counted)

    def rows(self) -> list[RoundingCount]:
        """Return the counts by module and phase. Sync: waits for the devices."""
        with self._lock:
            sums = dict(self._sums)
        rows: dict[tuple[str, Phase], RoundingCount] = {}
        for (module, phase, _), found in sums.items():
            before = rows.get((module, phase), RoundingCount(module, phase, 0, 0, 0, 0.0))
            rows[module, phase] = RoundingCount(
                module,
                phase,
                before.values + found.values,
                before.saturated + int(found.saturated),
                before.flushed + int(found.flushed),
                max(before.amax, float(found.amax)),
            )
        return list(rows.values())


def _counted(values: Tensor, format: Format) -> _Sum:
    sizes = values.detach().abs()
    finite = torch.where(sizes < math.inf, sizes, 0.0)  # without NaN too
    return _Sum(
        values.numel(),
        (finite > format.last_held).sum(),
        ((sizes > 0) & (sizes <= format.flushed_below)).sum(),
        finite.amax().float(),
    )


_OUTSIDE = "(in no submodule)"
_HEAD = ("module", "phase", "values", "saturated", "flushed", "share", "amax")


def counts_text(
    rows: Sequence[RoundingCount], format: Format, *, clips: bool, notes: Sequence[str]
) -> str:
    """Return the counts as a table between two lines of summary and the notes."""
    body = aligned([_HEAD, *map(_cells, rows)], right=_HEAD[2:]) if rows else []
    summary, worst = summary_text(rows, format), worst_text(rows, format, clips=clips)
    return "\n".join([summary, worst, *body, *notes])


def summary_text(rows: Sequence[RoundingCount], format: Format) -> str:
    """Return ``"fp16: 81,920 values rounded, 12 saturated, 3,004 flushed to zero"``."""
    values, saturated = sum(row.values for row in rows), sum(row.saturated for row in rows)
    lost = f"{saturated:,} saturated, {sum(row.flushed for row in rows):,} flushed to zero"
    return f"{format.name}: {values:,} values rounded, {lost}"


def worst_text(rows: Sequence[RoundingCount], format: Format, *, clips: bool) -> str:
    """Return a line about the first row, which is the worst."""
    if not rows:
        return "nothing was rounded: no product that the policy lowers ran in the block"
    row = rows[0]
    if not row.saturated + row.flushed:
        return f"worst: none; every value is in the range of {format.name}"
    parts = []
    if row.saturated:
        became = f"clipped to {format.largest:,g}" if clips else "became inf"
        parts.append(f"{_percent(row.saturated, row.values)} of its values {became}")
    if row.flushed:
        of = "" if parts else " of its values"
        parts.append(f"{_percent(row.flushed, row.values)}{of} became zero")
    ends = f"{format.name} ends at {format.largest:,g} and {format.smallest_subnormal:.3g}"
    place, lost = f"{row.module or _OUTSIDE}, {row.phase}", " and ".join(parts)
    return f"worst: {place}: {lost}; largest {row.amax:.3g}, {ends}"


def _cells(row: RoundingCount) -> tuple[str, ...]:
    return (
        row.module or _OUTSIDE,
        row.phase,
        f"{row.values:,}",
        f"{row.saturated:,}",
        f"{row.flushed:,}",
        _percent(row.saturated + row.flushed, row.values),
        f"{row.amax:.3g}",
    )


def _percent(count: int, of: int) -> str:
    share = 100 * count / of
    return f"{share:.3g} %" if share < 99.95 or count == of else f"{share:.5g} %"
