"""Reading of records: the file of each rank line by line, and the ranks joined into one run."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import reduce
from operator import or_
from pathlib import Path
from reprlib import repr as shown
from statistics import fmean
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from halfstep._common.numbers import count, power, step_list
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.json import decoded
from halfstep._tools.record.files import files_in, is_being_written, require_schema
from halfstep._tools.record.run import (
    LINES,
    NOT_WRITTEN,
    RANKS_DISAGREE,
    BadBuffers,
    Culprits,
    Device,
    Diagnosed,
    DiagnosisLine,
    End,
    Header,
    Measured,
    Model,
    Note,
    PolicySeen,
    Products,
    Run,
    Sample,
    Step,
    share_lost,
)
from halfstep._tools.statistics import merged
from halfstep._tools.trace.rows import grouped
from halfstep.errors import RecordError

LONGEST_REASON = 120

_Values = TypeVar("_Values", bound=Struct)
_Dated = TypeVar("_Dated", Sample, Culprits, BadBuffers, Diagnosed)


_LINE: Any = reduce(or_, LINES)
_KNOWN = {kind.__struct_config__.tag for kind in LINES}


class _LineHead(Struct, frozen=True):
    """The keys of a line that are needed even if the rest is damaged or of another version."""

    event: str
    schema: Any = None
    halfstep: Any = None
    started: Any = None


class _LeftOut(NamedTuple):
    """A line that was left out: its number, the reason, and the last step before it."""

    line: int
    why: str
    step: int
    is_whole: bool  # else it is cut


@dataclass
class RankRecord:
    """The contents of one file, with steps and times continued across its segments.

    ``header`` and ``end`` belong to the last segment; ``starts`` are the first steps of all
    segments.
    """

    path: Path
    number: int
    header: Header = field(default_factory=Header)
    starts: list[int] = field(default_factory=list)
    end: End | None = None
    _events: dict[type[Struct], list[Any]] = field(default_factory=dict)
    _left_out: list[_LeftOut] = field(default_factory=list)
    _steps_before: int = 0
    _last_step: int = 0
    _begun: datetime | None = None
    _seconds_before: float = 0.0

    def of(self, kind: type[_Values]) -> list[_Values]:
        """Return the events of one kind in order, as a list to add to."""
        return self._events.setdefault(kind, [])

    def take(self, number: int, line: bytes) -> None:
        """Add the event of a line; cut and damaged lines are counted and left out."""
        try:
            event = self._event_of(line)
            head = decoded(_LineHead, line) if isinstance(event, Header) else None
        except ValueError as error:
            self._leave_out(number, line, str(error))
            return
        if isinstance(event, Header) and head is not None:
            self._begin_segment(number, head, event)
        elif event is not None:
            self._take(self._numbered_on(event))

    @property
    def left_out(self) -> list[Note]:
        """One note on all lines that are cut, and one on all that are damaged."""
        cut_first = sorted(self._left_out, key=lambda line: line.is_whole)
        return [*map(self._told, grouped(cut_first, lambda line: line.is_whole).values())]

    def _event_of(self, line: bytes) -> Struct | None:
        """Return the event of a line, None for one of a later version; ValueError if damaged."""
        try:
            event: Struct = decoded(_LINE, line)
        except ValueError:
            beginning = _line_head(line)
            if beginning is not None and beginning.event not in _KNOWN:
                return None
            raise
        if isinstance(event, DiagnosisLine):
            return Diagnosed(self.number, event.step, decoded(Diagnosis, line))
        return event

    def _leave_out(self, number: int, line: bytes, why: str) -> None:
        is_whole = line.rstrip().endswith(b"}")
        self._left_out.append(_LeftOut(number, why[:LONGEST_REASON], self._last_step, is_whole))
        beginning = _line_head(line)
        if beginning is not None and beginning.event == "run":  # of a new segment
            self._begin_segment(number, beginning, Header())

    def _told(self, lines: Sequence[_LeftOut]) -> Note:
        name, first, why = self.path.name, lines[0], lines[0].why
        what, done = ("damaged", "left out") if first.is_whole else ("cut", "skipped")
        if len(lines) == 1:
            text = f"line {first.line} of {name} is {what} and was {done}"
        else:
            which, why = step_list(line.line for line in lines), f"the first: {why}"
            text = f"{count(len(lines))} lines of {name} are {what} and were {done}: {which}"
        return Note(first.step, f"{text} ({why})" if first.is_whole else text)

    def _begin_segment(self, line: int, beginning: _LineHead, header: Header) -> None:
        require_schema(self.path, beginning.schema, beginning.halfstep)
        try:
            started = datetime.fromisoformat(beginning.started)
            begun = self._begun or started
            self._seconds_before = (started - begun).total_seconds()
        except (TypeError, ValueError):
            raise RecordError(
                f"{self.path}: line {line} begins a run, but started is "
                f"{shown(beginning.started)} where a date and time belong; is it damaged?"
            ) from None
        self._begun = begun
        self._steps_before = self._last_step
        self.header, self.end = replace(header, started=str(beginning.started)), None
        self.starts.append(self._last_step + 1)
        buffers = self.of(BadBuffers)
        if buffers and buffers[-1].names:
            # A checkpoint may have repaired them. If not, the recorder writes them again.
            buffers.append(BadBuffers(self._last_step, (), 0, self.number))

    def _numbered_on(self, event: _Values) -> _Values:
        if self._steps_before or self._seconds_before:
            before = {"step": self._steps_before, "time": self._seconds_before}
            here = {key: getattr(event, key, None) for key in before}
            on = {key: before[key] + value for key, value in here.items() if value is not None}
            event = replace(event, **on)
        self._last_step = max(self._last_step, getattr(event, "step", 0))
        return event

    def _take(self, event: Struct) -> None:
        match event:
            case Device():
                self.header = replace(self.header, **asdict(event))
            case End():
                self.end = event
                num, total = self._last_step - self._steps_before, event.steps or 0
                if total > num and not self._left_out:
                    text = f"{count(num)} of {count(total)} steps are in {self.path.name}"
                    self.of(Note).append(Note(0, f"{text}: the others {NOT_WRITTEN}"))
            case Culprits() | BadBuffers():
                self.of(type(event)).append(replace(event, rank=self.number))
            case Model():
                self.of(Model).append(replace(event, rank=None))
            case _:
                self.of(type(event)).append(event)


def _line_head(line: bytes) -> _LineHead | None:
    try:
        return decoded(_LineHead, line)
    except ValueError:
        return None


def read_rank(path: Path, number: int) -> RankRecord:
    """Read the file of a rank; raise ``RecordError`` if it is impossible."""
    rank = RankRecord(path, number)
    try:
        with path.open("rb") as file:
            for place, line in enumerate(file, start=1):
                if not line.isspace():
                    rank.take(place, line)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    if not rank.starts:
        found = "; ".join(note.text for note in rank.left_out)
        raise RecordError(
            f"{path}: none of its lines begins a record; is it a file of another program?"
            f"{found and f' ({found})'}"
        )
    return rank


# --- several ranks --------------------------------------------------------------------------------


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the record in a folder, also while it is being written."""
    folder = Path(path)
    files = files_in(folder)
    if not files:
        what = "holds no record (rank0.jsonl)" if folder.is_dir() else "does not exist"
        raise RecordError(
            f"{folder} {what}: give the folder that `halfstep run` or `halfstep.record` has written"
        )
    return _joined(folder, [read_rank(file, number) for number, file in files.items()])


def _joined(folder: Path, ranks: Sequence[RankRecord]) -> Run:
    first, *others = ranks
    left_out = [note for rank in ranks for note in rank.left_out]
    notes = [*first.of(Note), *left_out]
    for rank in others:
        new = [note for note in rank.of(Note) if note not in first.of(Note)]
        notes += [Note(note.step, f"rank {rank.number}: {note.text}") for note in new]
    differ = (_first_disagreement(first.of(Step), other) for other in others)
    notes += [note for note in differ if note is not None]
    error, error_rank = _first_error(ranks)
    return Run(
        path=folder,
        header=first.header,
        starts=tuple(first.starts),
        ranks=tuple(rank.number for rank in ranks),
        models=tuple(_joined_models(ranks)),
        policies=tuple(first.of(PolicySeen)),
        products=tuple(each for rank in ranks for each in rank.of(Products)),
        steps=tuple(_joined_steps(ranks)),
        samples=tuple(_joined_samples(ranks)),
        culprits=_by_step(ranks, Culprits),
        buffers=_by_step(ranks, BadBuffers),
        diagnoses=_by_step(ranks, Diagnosed),
        notes=tuple(notes),
        left_out=tuple(left_out),
        error=error,
        error_rank=error_rank,
        without_end=tuple(rank.number for rank in ranks if rank.end is None),
        is_running=any(is_being_written(rank.path) for rank in ranks if rank.end is None),
    )


def _by_step(ranks: Iterable[RankRecord], kind: type[_Dated]) -> tuple[_Dated, ...]:
    events = (event for rank in ranks for event in rank.of(kind))
    return tuple(sorted(events, key=lambda event: event.step))


# --- steps ----------------------------------------------------------------------------------------


def _joined_steps(ranks: Iterable[RankRecord]) -> Iterator[Step]:
    """Yield the first rank's steps, joined with the losses of all ranks.

    In a pipeline only the last stage has a loss; each replica of a model has the loss of its batch.
    """
    first, *others = ranks
    waiting = {other.number: deque(other.of(Step)) for other in others}
    for step in first.of(Step):
        alike = {first.number: step}
        for other, its in waiting.items():
            while its and its[0].step < step.step:
                its.popleft()
            if its and its[0].step == step.step:
                alike[other] = its.popleft()
        yield _joined_step(step, alike)


def _joined_step(first: Step, alike: Mapping[int, Step]) -> Step:
    if len(alike) == 1 and (first.loss is None or math.isfinite(first.loss)):
        return first
    losses = {rank: step.loss for rank, step in alike.items() if step.loss is not None}
    norms = (step.norm for step in alike.values() if step.norm is not None)
    ranks = (step.rank for step in alike.values() if step.rank is not None)
    return replace(
        first,
        norm=next(norms, None),
        loss=_mean(list(losses.values())),
        share_lost_updates=share_lost(alike.values()),
        updates=sum(step.updates or 0 for step in alike.values()) or None,
        rank=next(ranks, None),
        bad_losses=tuple(rank for rank, loss in losses.items() if not math.isfinite(loss)),
    )


def _mean(values: list[float]) -> float | None:
    if not values or len(set(values)) == 1:
        return values[0] if values else None
    if not all(map(math.isfinite, values)):
        return sum(values)  # inf or NaN, as in the gradients
    return fmean(values)


def _first_disagreement(first: Sequence[Step], other: RankRecord) -> Note | None:
    """Return the first step that another rank has made in another way than the first rank."""
    for mine, its in zip(first, other.of(Step), strict=False):
        if (mine.taken, mine.scale_after) != (its.taken, its.scale_after):
            text = (
                f"{RANKS_DISAGREE} from step {mine.step} on: rank {other.number} {_verdict(its)}, "
                f"the first rank {_verdict(mine)}"
            )
            return Note(mine.step, text)
    return None


def _verdict(step: Step) -> str:
    return f"{'took' if step.taken else 'skipped'} it, scale {power(step.scale_after)}"


# --- models, ends ---------------------------------------------------------------------------------


def _joined_models(ranks: Iterable[RankRecord]) -> list[Model]:
    """Return the models of the first rank, and those that only others have."""
    first, *others = ranks
    known = [(model.name, model.parameters, model.modules) for model in first.of(Model)]
    own = ((rank.number, model) for rank in others for model in rank.of(Model))
    new = (
        replace(model, rank=rank)
        for rank, model in own
        if (model.name, model.parameters, model.modules) not in known
    )
    return [*first.of(Model), *new]


def _first_error(ranks: Iterable[RankRecord]) -> tuple[str | None, int | None]:
    """Return the earliest error and its rank: it may have caused the others."""
    found = [
        (rank.end.time or 0.0, rank.number, rank.end.error)
        for rank in ranks
        if rank.end is not None and rank.end.error is not None
    ]
    _, number, error = min(found, default=(0.0, None, None))
    return error, number


# --- samples --------------------------------------------------------------------------------------


def _joined_samples(ranks: Iterable[RankRecord]) -> Iterator[Sample]:
    for first, *others in grouped(_by_step(ranks, Sample), lambda sample: sample.step).values():
        if others:
            measured = (tensor for sample in (first, *others) for tensor in sample.tensors)
            tensors = grouped(measured, lambda each: (each.kind, each.name, each.dtype))
            together = (Measured.of(*key, merged(alike)) for key, alike in tensors.items())
            first = replace(first, tensors=tuple(together))
        yield first
