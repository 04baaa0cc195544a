"""The state of a running training, as read from its record, in bounded memory."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from functools import reduce
from itertools import zip_longest
from typing import NamedTuple

from halfstep._record.read import RecordUpdate
from halfstep._record.run import Diagnosed, Measured, Note, Run, Sample, Step
from halfstep._report.layers import FormatFit, fitted

KEPT = 50
"""Number of the most recent steps, skips and notes that are kept."""
SILENT_SECONDS = 30.0
SILENT_STEPS = 10
"""A run is silent after this time without an event, or that of this many steps if longer."""


Column = float | None
"""The largest value of some steps; NaN if one was not finite, None if there was none."""


class Trail:
    """The values of all steps so far in a bounded number of columns; each has its steps' maximum.

    When the columns are used up, pairs are merged: the cost of adding a value does not grow.

    Args:
        capacity: Maximum number of columns, an even number.

    Attributes:
        low: The smallest finite value; None if there is none.
        high: The largest finite value.
    """

    low: float | None = None
    high: float | None = None

    def __init__(self, capacity: int = 1024) -> None:
        self._capacity = capacity
        self._columns: list[Column] = []
        self._steps_per_column = 1
        self._steps_in_last = 0

    def add(self, value: float | None) -> None:
        """Add the value of the next step; None if it has none."""
        column = value
        if value is not None and math.isfinite(value):
            self.low = value if self.low is None else min(self.low, value)
            self.high = value if self.high is None else max(self.high, value)
        elif value is not None:
            column = math.nan
        if self._columns and self._steps_in_last < self._steps_per_column:
            self._columns[-1] = _larger(self._columns[-1], column)
            self._steps_in_last += 1
            return
        if len(self._columns) == self._capacity:
            self._columns = _in_groups(self._columns, 2)
            self._steps_per_column *= 2
        self._columns.append(column)
        self._steps_in_last = 1

    def columns(self, width: int) -> list[Column]:
        """Return all steps in at most ``width`` columns."""
        # Groups of whole columns, so that finished columns stay the same while others are added.
        return _in_groups(self._columns, max(1, math.ceil(len(self._columns) / max(1, width))))


def _in_groups(columns: list[Column], size: int) -> list[Column]:
    groups = zip_longest(*(columns[first::size] for first in range(size)))
    return [reduce(_larger, group) for group in groups]


def _larger(first: Column, second: Column) -> Column:
    if first is None or second is None:
        return second if first is None else first
    return math.nan if math.isnan(first) or math.isnan(second) else max(first, second)


class WorstTensor(NamedTuple):
    """A tensor of the latest sample, with how well it fits its format."""

    measured: Measured
    fit: FormatFit

    @property
    def num_non_finite(self) -> int:
        """Number of entries that are NaN or inf."""
        return self.measured.nan + self.measured.inf

    @property
    def badness(self) -> tuple[bool, float]:
        """The sort key, largest for the worst.

        NaN and inf come first; then the fraction of entries that underflow, or amax relative to the
        largest value of the format.
        """
        headroom = self.fit.headroom
        used = 0.0 if headroom is None else 2.0**-headroom
        return self.num_non_finite > 0, max(used, self.fit.share_lost)


@dataclass
class LiveRun:
    """A run as known so far.

    Attributes:
        run: The current run, with only the newest steps, samples, culprits, diagnoses and notes.
        written: Time of the last write by any rank, in seconds since the epoch.
        num_steps: Number of optimizer steps.
        last_share_lost_updates: The value of the latest sampled step.
        began_in: The modules where the last skips began, by step, if known.
        diagnosed: The latest diagnosis.
        sample: The latest sample.
        losses: The losses of each optimizer and its last step, by class and number.
        norm: Norms of all steps, except inf and NaN in skipped steps, which are the reason for the
            skip.
        skipped: 1 for each skipped step.
    """

    run: Run
    written: float
    num_steps: int = 0
    last_share_lost_updates: float | None = None
    num_skipped: int = 0
    recent: deque[Step] = field(default_factory=lambda: deque(maxlen=KEPT))
    skips: deque[Step] = field(default_factory=lambda: deque(maxlen=KEPT))
    began_in: dict[int, str] = field(default_factory=dict)
    diagnosed: Diagnosed | None = None
    sample: Sample | None = None
    notes: deque[Note] = field(default_factory=lambda: deque(maxlen=KEPT))
    loss: Trail = field(default_factory=Trail)
    losses: dict[str, tuple[Trail, Step]] = field(default_factory=dict)
    scale: Trail = field(default_factory=Trail)
    norm: Trail = field(default_factory=Trail)
    lost_updates: Trail = field(default_factory=Trail)
    skipped: Trail = field(default_factory=Trail)

    def add(self, update: RecordUpdate) -> None:
        """Add an update."""
        self.run, self.written = update.new, update.written
        for step in update.new.steps:
            self._add_step(step)
        for culprits in update.new.culprits:
            if culprits.began_in is not None:
                on_rank = f" on rank {culprits.rank}" if len(self.run.ranks) > 1 else ""
                self.began_in[culprits.step] = f"{culprits.began_in}{on_rank}"
        while len(self.began_in) > KEPT:
            del self.began_in[min(self.began_in)]
        if update.new.diagnoses:
            self.diagnosed = update.new.diagnoses[-1]
        self.notes.extend(update.new.notes)
        if update.new.samples:
            self.sample = update.new.samples[-1]

    def _add_step(self, step: Step) -> None:
        self.num_steps += 1
        self.recent.append(step)
        self.loss.add(step.loss)
        name = name_of(step)
        trail, _ = self.losses.get(name, (Trail(), step))
        trail.add(step.loss)
        self.losses[name] = trail, step
        self.scale.add(step.scale)
        is_why = not step.taken and step.norm is not None and not math.isfinite(step.norm)
        self.norm.add(None if is_why else step.norm)
        self.lost_updates.add(step.share_lost_updates)
        if step.share_lost_updates is not None:
            self.last_share_lost_updates = step.share_lost_updates
        self.skipped.add(None if step.taken else 1.0)
        if not step.taken:
            self.num_skipped += 1
            self.skips.append(step)

    @property
    def has_own_losses(self) -> bool:
        """Whether optimizers have losses of their own, as in a GAN, instead of a common one."""
        trails = [trail for trail, _ in self.losses.values() if trail.low is not None]
        return len({trail.low for trail in trails}) > 1 and len({t.high for t in trails}) > 1

    @property
    def last(self) -> Step | None:
        """The last step."""
        return self.recent[-1] if self.recent else None

    @property
    def seconds_per_step(self) -> float | None:
        """Mean over the last iterations; None with fewer than two."""
        if not self.recent:
            return None
        first, last = self.recent[0], self.recent[-1]
        num = last.step - first.step
        return (last.time - first.time) / num if num else None

    def silent_for(self, now: float) -> float | None:
        """Return the seconds from the last event to ``now``; None while that is normal."""
        seconds = now - self.written
        patience = max(SILENT_SECONDS, SILENT_STEPS * (self.seconds_per_step or 0.0))
        return seconds if seconds > patience and not self.run.has_ended else None

    def worst(self) -> list[WorstTensor]:
        """Return the tensors of the latest sample, worst first."""
        if self.sample is None:
            return []
        found = (WorstTensor(*each) for each in fitted(self.sample, self.run.policies))
        return sorted(found, key=lambda worst: worst.badness, reverse=True)


def name_of(step: Step) -> str:
    """Return the class of the optimizer, with its number from the second on."""
    return step.optimizer if (step.number or 1) == 1 else f"{step.optimizer} {step.number}"


def live_run(before: LiveRun | None, update: RecordUpdate) -> LiveRun:
    """Return the run after an update; ``before`` is changed in place."""
    if before is None or update.is_anew:
        before = LiveRun(update.new, update.written)
    before.add(update)
    return before
