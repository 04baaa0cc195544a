"""What one rank has written: its events, one by one, become values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from halfstep.errors import RecordError
from halfstep.numerics.statistics import Statistics
from halfstep.recording.diagnoses import diagnosis_of
from halfstep.recording.lines import Event, to_float
from halfstep.recording.run import Culprits, Diagnosed, Measured, Note, Sample, Step


@dataclass
class Rank:
    """What one file holds, with the steps and times of its segments one after the other.

    Attributes:
        path: The file.
        number: Of the rank.
        header: The ``run`` event of the last segment.
        num_segments: How many there are so far.
        models: The ``model`` events.
        policies: The ``policy`` events.
        steps: In order.
        samples: The sampled steps.
        culprits: Of skipped steps.
        diagnoses: Of steps that went bad.
        notes: The recorder's, and one for each line that is cut.
        end: The ``end`` event of the last segment, None if it has none.
    """

    path: Path
    number: int
    header: Event = field(default_factory=dict)
    num_segments: int = 0
    models: list[Event] = field(default_factory=list)
    policies: list[Event] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    culprits: list[Culprits] = field(default_factory=list)
    diagnoses: list[Diagnosed] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    end: Event | None = None
    _steps_before: int = 0
    _last_step: int = 0
    _begun: datetime | None = None
    _seconds_before: float = 0.0

    def take(self, line: int, event: Event | None) -> None:
        """Add the event of a line; None stands for a line that is cut.

        Raises:
            RecordError: The line begins a segment and lacks when it was started.
        """
        if event is None:
            text = f"line {line} of {self.path.name} is cut and was skipped"
            self.notes.append(Note(self._last_step, text))
        elif event["event"] == "run":
            self._begin_segment(line, event)
        else:
            try:
                self._take(self._numbered_on(event))
            except (KeyError, TypeError, ValueError):
                text = f"line {line} of {self.path.name} lacks a part and was skipped"
                self.notes.append(Note(self._last_step, text))

    def require_begun(self) -> None:
        """Refuse a file in which no segment has begun.

        Raises:
            RecordError: It names the file.
        """
        if not self.num_segments:
            raise RecordError(
                f"{self.path}: no line of it begins a record; is it another program's file?"
            )

    def _begin_segment(self, line: int, event: Event) -> None:
        try:
            started = datetime.fromisoformat(event["started"])
            begun = self._begun or started
            self._seconds_before = (started - begun).total_seconds()
        except (KeyError, TypeError, ValueError):
            raise RecordError(
                f"{self.path}: line {line} begins a run, but started is "
                f"{event.get('started')!r} where a date and time belong; is it damaged?"
            ) from None
        self._begun = begun
        self._steps_before = self._last_step
        self.header, self.end = event, None
        self.num_segments += 1

    def _numbered_on(self, event: Event) -> Event:
        if "step" in event:
            event["step"] += self._steps_before
            self._last_step = max(self._last_step, event["step"])
        if "time" in event:
            event["time"] += self._seconds_before
        return event

    def _take(self, event: Event) -> None:
        match event["event"]:
            case "step":
                self.steps.append(_step(event))
            case "sample":
                self.samples.append(_sample(event))
            case "culprits":
                self.culprits.append(_culprits(event, self.number))
            case "diagnosis":
                found = Diagnosed(self.number, event["step"], diagnosis_of(event))
                self.diagnoses.append(found)
            case "device":
                self.header |= {key: event[key] for key in ("device", "machine")}
            case "model":
                self.models.append(_whole(event, "name", "parameters", "modules"))
            case "policy":
                self.policies.append(_whole(event, "device", "dtype", "text"))
            case "note":
                self.notes.append(Note(event["step"], event["text"]))
            case "end":
                self.end = _whole(event, "error")


def _whole(event: Event, *parts: str) -> Event:
    """Return an event; a KeyError names a part that it lacks."""
    for part in parts:
        event[part]
    return event


def _step(event: Event) -> Step:
    scale, scale_after, norm, loss = (
        to_float(event[key]) for key in ("scale", "scale_after", "norm", "loss")
    )
    return Step(
        event["step"],
        event["time"],
        event["optimizer"],
        event["taken"],
        event["reason"],
        scale,
        scale_after,
        norm,
        loss,
        event.get("rank"),
    )


def _sample(event: Event) -> Sample:
    tensors = tuple(
        Measured(row["kind"], row["name"], row["dtype"], _statistics(row))
        for row in event["tensors"]
    )
    return Sample(event["step"], float(event["scale"]), tensors)


def _statistics(row: Mapping[str, Any]) -> Statistics:
    numbers = {key: to_float(row[key]) for key in ("amax", "amin", "square_sum")}
    return Statistics.from_json({**row, **numbers})


def _culprits(event: Event, rank: int) -> Culprits:
    return Culprits(
        event["step"],
        event["optimizer"],
        event["began_in"],
        tuple(event["parameters"]),
        event["num_parameters"],
        rank,
    )
