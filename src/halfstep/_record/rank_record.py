"""The record of one rank: its file, read line by line into values."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from reprlib import repr as shown
from typing import Any, NamedTuple, TypeAlias, TypeVar, get_args

from msgspec import Struct
from msgspec.structs import replace

from halfstep._common.json import Count, decoded
from halfstep._common.numbers import count, step_list
from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._record.files import has_checksum, require_schema
from halfstep._record.run import (
    BadBuffers,
    Culprits,
    Device,
    Diagnosed,
    End,
    Header,
    Model,
    Note,
    PolicySeen,
    RulesActed,
    Sample,
    Step,
)
from halfstep.errors import RecordError

LONGEST_REASON = 120

_Values = TypeVar("_Values", bound=Struct)


class _Diagnosis(Struct, frozen=True, tag_field="event", tag="diagnosis"):
    """The step of a diagnosis; the rest of the line is a :class:`Diagnosis`."""

    step: Count


_Line: TypeAlias = (
    Step
    | Sample
    | Culprits
    | BadBuffers
    | _Diagnosis
    | Header
    | Device
    | Model
    | PolicySeen
    | RulesActed
    | Note
    | End
)
_KNOWN = {kind.__struct_config__.tag for kind in get_args(_Line)}


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
    _cut: list[_LeftOut] = field(default_factory=list)
    _damaged: list[_LeftOut] = field(default_factory=list)
    _steps_before: int = 0
    _last_step: int = 0
    _begun: datetime | None = None
    _seconds_before: float = 0.0

    def of(self, kind: type[_Values]) -> list[_Values]:
        """Return the events of one kind in order, as a list to add to."""
        return self._events.setdefault(kind, [])

    @property
    def steps(self) -> list[Step]:
        return self.of(Step)

    def take(self, number: int, line: bytes) -> None:
        """Add the event of a line; cut and damaged lines are counted and left out.

        Raises:
            RecordError: The line begins a segment without a start time, or with another schema.
        """
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
        return [
            *self._told(self._cut, "cut", "skipped"),
            *self._told(self._damaged, "damaged", "left out"),
        ]

    def require_begun(self) -> None:
        """Raise ``RecordError`` for a file in which no segment begins."""
        if not self.starts:
            found = "; ".join(note.text for note in self.left_out)
            raise RecordError(
                f"{self.path}: none of its lines begins a record; is it a file of another program?"
                f"{found and f' ({found})'}"
            )

    def _event_of(self, line: bytes) -> Struct | None:
        """Return the event of a line, None for one of a later version; ValueError if damaged."""
        is_checked = has_checksum(line)
        try:
            event: Struct = decoded(_Line, line)  # type: ignore[arg-type]  # mypy: no type
        except ValueError:
            beginning = _line_head(line)
            if beginning is not None and beginning.event not in _KNOWN:
                return None
            raise
        if self.header.crc is not None and not (is_checked or isinstance(event, Header)):
            raise ValueError("it has lost its checksum")
        if isinstance(event, _Diagnosis):
            return Diagnosed(self.number, event.step, decoded(Diagnosis, line))
        return event

    def _leave_out(self, number: int, line: bytes, why: str) -> None:
        is_whole = line.rstrip().endswith(b"}")
        left_out = _LeftOut(number, why[:LONGEST_REASON], self._last_step)
        (self._damaged if is_whole else self._cut).append(left_out)
        beginning = _line_head(line)
        if beginning is not None and beginning.event == "run":  # of a new segment
            self._begin_segment(number, beginning, Header())

    def _told(self, lines: Sequence[_LeftOut], what: str, done: str) -> Iterator[Note]:
        if not lines:
            return
        name, why = self.path.name, lines[0].why
        if len(lines) == 1:
            text = f"line {lines[0].line} of {name} is {what} and was {done}"
        else:
            which, why = step_list(each.line for each in lines), f"the first: {why}"
            text = f"{count(len(lines))} lines of {name} are {what} and were {done}: {which}"
        yield Note(lines[0].step, f"{text} ({why})" if lines is self._damaged else text)

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
            case Device(device=device, machine=machine, is_diagnosing=is_diagnosing):
                self.header = replace(
                    self.header, device=device, machine=machine, is_diagnosing=is_diagnosing
                )
            case End():
                self.end = event
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
    """Read the file of a rank.

    Raises:
        RecordError: The file cannot be read, or is not a record.
    """
    rank = RankRecord(path, number)
    try:
        with path.open("rb") as file:
            for place, line in enumerate(file, start=1):
                if not line.isspace():
                    rank.take(place, line)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None
    rank.require_begun()
    return rank
