"""The steps of a run as the page draws them: by optimizer, and few enough.

However many steps there are, they are drawn in so many columns, and of each of them the first, the
last, the smallest and the largest value, what is NaN or inf, and all skips are kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from halfstep._record.run import Step
from halfstep._report.svg import Axis

COLUMNS = 500


@dataclass(frozen=True)
class Track:
    """The steps of one optimizer of one run.

    Attributes:
        name: Of the run, of the optimizer, or of both.
        steps: In order.
    """

    name: str
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Mark:
    """A place on the axis of steps at which something happened.

    Attributes:
        x: In percent of the axis.
        title: What.
    """

    x: float
    title: str


def tracks_of(run: str, steps: Sequence[Step]) -> list[Track]:
    """Tell the optimizers of a run apart; those of one class by their order in the iteration."""
    found: dict[tuple[str, int], list[Step]] = {}
    iteration, names = 0, list[str]()
    for step in steps:
        if step.step != iteration:
            iteration, names = step.step, []
        names.append(step.optimizer)
        found.setdefault((step.optimizer, names.count(step.optimizer)), []).append(step)
    if len(found) == 1:
        return [Track(run, tuple(steps))]
    return [
        Track(f"{run} {name}{f' {number}' if number > 1 else ''}".strip(), tuple(alike))
        for (name, number), alike in found.items()
    ]


def columns_of(steps: Iterable[Step], x: Axis) -> list[int]:
    """Return the column in which each step is drawn."""
    return [min(COLUMNS - 1, int(COLUMNS * x.share(step.step))) for step in steps]


def kept(columns: Sequence[int], values: Sequence[float | None]) -> list[int]:
    """Return the indices of the values to draw.

    Args:
        columns: The column of each value, in order.
        values: The values; None where there is none.
    """
    chosen: set[int] = set()
    start = 0
    for index in range(1, len(columns) + 1):
        if index == len(columns) or columns[index] != columns[start]:
            chosen |= _kept_of_column(range(start, index), values)
            start = index
    return sorted(chosen)


def _kept_of_column(indices: Iterable[int], values: Sequence[float | None]) -> set[int]:
    known = [(value, i) for i in indices if (value := values[i]) is not None]
    finite = [(value, i) for value, i in known if math.isfinite(value)]
    others = {str(value): i for value, i in reversed(known) if not math.isfinite(value)}
    chosen = set(others.values())
    if finite:
        chosen |= {min(finite)[1], max(finite)[1], finite[0][1], finite[-1][1]}
    return chosen


def marks(steps: Sequence[Step], x: Axis, what: str) -> list[Mark]:
    """Return one mark for all steps that are in the same column."""
    steps = sorted(steps, key=lambda step: step.step)
    by_column: dict[int, list[Step]] = {}
    for column, step in zip(columns_of(steps, x), steps, strict=True):
        by_column.setdefault(column, []).append(step)
    return [Mark(x.percent(alike[0].step), _title(alike, what)) for alike in by_column.values()]


def _title(steps: Sequence[Step], what: str) -> str:
    first, last = steps[0].step, steps[-1].step
    if len(steps) == 1:
        return f"step {first:,}: {what}"
    return f"{len(steps):,} steps from {first:,} to {last:,}: {what}"
