"""From the files of a record to a :class:`halfstep.recording.run.Run`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from halfstep.errors import RecordError
from halfstep.numerics.statistics import Statistics, merged
from halfstep.recording.lines import Event, files_in, read_lines, to_float
from halfstep.recording.run import Culprits, Kind, Measured, Note, Run, Sample, Step
from halfstep.tracing.recording import Recording


def read_run(path: str | os.PathLike[str]) -> Run:
    """Read the record in a folder, also while it is being written.

    Args:
        path: The folder, or one of its files.

    Raises:
        RecordError: There is no record, or it cannot be read.
    """
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    files = files_in(folder)
    if not files:
        what = "holds no record (rank0.jsonl)" if folder.is_dir() else "does not exist"
        raise RecordError(
            f"{folder} {what}: give the folder that `halfstep run` or `halfstep.record` has written"
        )
    return _joined(folder, {rank: _read_rank(file, rank) for rank, file in files.items()})


@dataclass
class _Rank:
    """What one file holds, with the steps and times of its segments one after the other."""

    header: Event = field(default_factory=dict)
    num_segments: int = 0
    models: list[Event] = field(default_factory=list)
    policies: list[Event] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    culprits: list[Culprits] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    end: Event | None = None


def _read_rank(path: Path, number: int) -> _Rank:
    rank = _Rank()
    steps_before, last_step, seconds_before = 0, 0, 0.0
    begun: datetime | None = None
    for line, event in read_lines(path):
        if event is None:
            rank.notes.append(Note(last_step, f"line {line} of {path.name} is cut and was skipped"))
            continue
        if event["event"] == "run":
            steps_before, started = last_step, datetime.fromisoformat(event["started"])
            begun = begun or started
            seconds_before = (started - begun).total_seconds()
            rank.header, rank.end = event, None
            rank.num_segments += 1
            continue
        if "step" in event:
            event["step"] += steps_before
            last_step = max(last_step, event["step"])
        if "time" in event:
            event["time"] += seconds_before
        _take(rank, event, number)
    if not rank.num_segments:
        raise RecordError(f"{path}: no line of it begins a record; is it another program's file?")
    return rank


def _take(rank: _Rank, event: Event, number: int) -> None:
    match event["event"]:
        case "step":
            rank.steps.append(_step(event))
        case "sample":
            rank.samples.append(_sample(event))
        case "culprits":
            rank.culprits.append(_culprits(event, number))
        case "device":
            rank.header |= {key: event[key] for key in ("device", "machine")}
        case "model":
            rank.models.append(event)
        case "policy":
            rank.policies.append(event)
        case "note":
            rank.notes.append(Note(event["step"], event["text"]))
        case "end":
            rank.end = event


def _step(event: Event) -> Step:
    return Step(
        event["step"],
        event["time"],
        event["optimizer"],
        event["taken"],
        event["reason"],
        *(to_float(event[key]) for key in ("scale", "scale_after", "norm", "loss")),
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


# --- several ranks --------------------------------------------------------------------------------


def _joined(folder: Path, ranks: Mapping[int, _Rank]) -> Run:
    first = next(iter(ranks.values()))
    others = {number: rank for number, rank in ranks.items() if rank is not first}
    notes = [*first.notes]
    for number, rank in others.items():
        notes += [Note(note.step, f"rank {number}: {note.text}") for note in rank.notes]
        notes += _disagreements(first.steps, rank.steps, number)
    ends = [rank.end for rank in ranks.values()]
    errors = [end["error"] for end in ends if end is not None and end["error"] is not None]
    return Run(
        path=folder,
        header=first.header,
        num_segments=first.num_segments,
        ranks=tuple(ranks),
        models=tuple(first.models),
        policies=tuple(first.policies),
        steps=tuple(first.steps),
        samples=_joined_samples(rank.samples for rank in ranks.values()),
        culprits=tuple(
            sorted((c for rank in ranks.values() for c in rank.culprits), key=lambda c: c.step)
        ),
        notes=tuple(notes),
        error=errors[0] if errors else None,
        has_ended=all(end is not None for end in ends),
        trace=_trace(folder / "trace.json"),
    )


def _disagreements(first: list[Step], other: list[Step], number: int) -> list[Note]:
    for mine, its in zip(first, other, strict=False):
        if (mine.taken, mine.scale_after) != (its.taken, its.scale_after):
            text = (
                f"ranks disagree from step {mine.step} on: rank {number} has "
                f"{_verdict(its)}, the first rank {_verdict(mine)}"
            )
            return [Note(mine.step, text)]
    return []


def _verdict(step: Step) -> str:
    return f"{'taken' if step.taken else 'skipped'} it, scale {step.scale_after}"


def _joined_samples(samples: Iterable[list[Sample]]) -> tuple[Sample, ...]:
    by_step: dict[int, list[Sample]] = {}
    for of_rank in samples:
        for sample in of_rank:
            by_step.setdefault(sample.step, []).append(sample)
    return tuple(_joined_sample(alike) for _, alike in sorted(by_step.items()))


def _joined_sample(samples: list[Sample]) -> Sample:
    if len(samples) == 1:
        return samples[0]
    tensors: dict[tuple[Kind, str, str], list[Statistics]] = {}
    for sample in samples:
        for kind, name, dtype, statistics in sample.tensors:
            tensors.setdefault((kind, name, dtype), []).append(statistics)
    together = (Measured(*key, merged(alike)) for key, alike in tensors.items())
    return Sample(samples[0].step, samples[0].scale, tuple(together))


def _trace(path: Path) -> Recording | None:
    try:
        return Recording.from_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise RecordError(f"{path}: cannot be read as a trace: {error}") from None
