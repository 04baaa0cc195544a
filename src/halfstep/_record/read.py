"""Reading of records, with the files of all ranks joined into one run."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import TypeVar

from msgspec import structs

from halfstep._common.numbers import power
from halfstep._numerics.statistics import merged
from halfstep._record.files import files_in
from halfstep._record.rank_record import RankRecord, read_rank
from halfstep._record.run import (
    BadBuffers,
    Culprits,
    Diagnosed,
    Measured,
    Model,
    Note,
    PolicySeen,
    RulesActed,
    Run,
    Sample,
    Step,
)
from halfstep._trace.recording import Recording
from halfstep._trace.rows import grouped
from halfstep.errors import RecordError

_Dated = TypeVar("_Dated", Sample, Culprits, BadBuffers, Diagnosed)


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
    return _joined(folder, [read_rank(file, number) for number, file in files.items()])


_RUN, _STEP, _END = (b'\n{"event":"%s"' % name for name in (b"run", b"step", b"end"))


def glance(folder: Path) -> RankRecord:
    """Read the first rank's segment starts, last steps and ends, for a list of runs.

    Nothing else in the file is decoded, however long it is.

    Raises:
        RecordError: It cannot be read, or is not a record.
    """
    number, path = next(iter(files_in(folder).items()))
    rank = RankRecord(path, number)
    try:
        data = b"\n" + path.read_bytes()
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None

    def take(place: int) -> None:
        rank.take(0, data[place + 1 : data.find(b"\n", place + 1) + 1])

    start, end = 0, data.rfind(b"\n")  # an unterminated last line is still being written
    while start >= 0:
        take(start)
        following = data.find(_RUN, start + 1, end)
        place = stop = end if following < 0 else following
        known = len(rank.steps)
        while len(rank.steps) == known and (place := data.rfind(_STEP, start, place)) >= 0:
            take(place)  # the previous one, if this is damaged
        if (place := data.rfind(_END, start, stop)) >= 0:
            take(place)
        start = following
    rank.require_begun()
    return rank


# --- several ranks --------------------------------------------------------------------------------


def _joined(folder: Path, ranks: Sequence[RankRecord]) -> Run:
    """Join the records of the ranks."""
    first, *others = ranks
    trace, damage = _trace(folder / "trace.json")
    left_out = [note for rank in ranks for note in rank.left_out]
    notes = [*first.of(Note), *left_out]
    for rank in others:
        new = [note for note in rank.of(Note) if note not in first.of(Note)]
        notes += [Note(note.step, f"rank {rank.number}: {note.text}") for note in new]
    differ = (_first_disagreement(first.steps, other) for other in others)
    notes += [*damage, *(note for note in differ if note is not None)]
    error, error_rank = _first_error(ranks)
    return Run(
        path=folder,
        header=first.header,
        starts=tuple(first.starts),
        ranks=tuple(rank.number for rank in ranks),
        models=tuple(_joined_models(ranks)),
        policies=tuple(first.of(PolicySeen)),
        rules=tuple(each for rank in ranks for each in rank.of(RulesActed)),
        steps=tuple(_joined_steps(ranks)),
        samples=tuple(_joined_samples(ranks)),
        culprits=_by_step(ranks, Culprits),
        buffers=_by_step(ranks, BadBuffers),
        diagnoses=_by_step(ranks, Diagnosed),
        notes=tuple(notes),
        left_out=(*left_out, *damage),
        error=error,
        error_rank=error_rank,
        without_end=tuple(rank.number for rank in ranks if rank.end is None),
        trace=trace,
    )


def _by_step(ranks: Iterable[RankRecord], kind: type[_Dated]) -> tuple[_Dated, ...]:
    events = (event for rank in ranks for event in rank.of(kind))
    return tuple(sorted(events, key=lambda event: event.step))


def _trace(path: Path) -> tuple[Recording | None, tuple[Note, ...]]:
    try:
        return Recording.from_json(path.read_bytes()), ()
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError) as error:
        return None, (Note(0, f"{path.name} cannot be read as a trace and was left out: {error}"),)


# --- steps ----------------------------------------------------------------------------------------


def _joined_steps(ranks: Iterable[RankRecord]) -> Iterator[Step]:
    """Yield the first rank's steps, joined with the losses of all ranks.

    In a pipeline only the last stage has a loss; each replica of a model has the loss of its batch.
    """
    first, *others = ranks
    waiting = {other.number: deque(other.steps) for other in others}
    for step in first.steps:
        alike = {first.number: step}
        for other, its in waiting.items():
            _leave_out(its, before=step.step)
            if its and its[0].step == step.step:
                alike[other] = its.popleft()
        yield _joined_step(step, alike)


def _leave_out(steps: deque[Step], before: int) -> None:
    while steps and steps[0].step < before:
        steps.popleft()


def _joined_step(first: Step, alike: Mapping[int, Step]) -> Step:
    if len(alike) == 1 and (first.loss is None or math.isfinite(first.loss)):
        return first
    losses = {rank: step.loss for rank, step in alike.items() if step.loss is not None}
    norms = (step.norm for step in alike.values() if step.norm is not None)
    lost = [s.share_lost_updates for s in alike.values() if s.share_lost_updates is not None]
    ranks = (step.rank for step in alike.values() if step.rank is not None)
    return structs.replace(
        first,
        norm=next(norms, None),
        loss=_mean(list(losses.values())),
        share_lost_updates=_mean(lost),
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
    notes = (_disagreement(*steps, other.number) for steps in zip(first, other.steps, strict=False))
    return next((note for note in notes if note is not None), None)


def _disagreement(mine: Step, its: Step, number: int) -> Note | None:
    """Return how the step of a rank differs from the first rank's; None if it does not."""
    if (mine.taken, mine.scale_after) == (its.taken, its.scale_after):
        return None
    text = (
        f"ranks disagree from step {mine.step} on: rank {number} {_verdict(its)}, "
        f"the first rank {_verdict(mine)}"
    )
    return Note(mine.step, text)


def _verdict(step: Step) -> str:
    return f"{'took' if step.taken else 'skipped'} it, scale {power(step.scale_after)}"


# --- models, ends ---------------------------------------------------------------------------------


def _joined_models(ranks: Iterable[RankRecord]) -> list[Model]:
    """Return the models of the first rank, and those that only others have."""
    first, *others = ranks
    known = [_looks(model) for model in first.of(Model)]
    own = ((rank.number, model) for rank in others for model in rank.of(Model))
    new = (structs.replace(each, rank=rank) for rank, each in own if _looks(each) not in known)
    return [*first.of(Model), *new]


def _looks(model: Model) -> tuple[object, ...]:
    return model.name, model.parameters, model.modules


def _first_error(ranks: Iterable[RankRecord]) -> tuple[str | None, int | None]:
    """Return the earliest error and its rank: it may have caused the others."""
    found = [
        (rank.end.time or 0.0, rank.number, rank.end.error)
        for rank in ranks
        if rank.end is not None and rank.end.error is not None
    ]
    if not found:
        return None, None
    _, number, error = min(found)
    return error, number


# --- samples --------------------------------------------------------------------------------------


def _joined_samples(ranks: Iterable[RankRecord]) -> Iterator[Sample]:
    """Yield one sample for each step that any rank has sampled, in order."""
    alike = grouped(_by_step(ranks, Sample), lambda sample: sample.step)
    return map(_joined_sample, alike.values())


def _joined_sample(samples: Sequence[Sample]) -> Sample:
    if len(samples) == 1:
        return samples[0]
    measured = (each for sample in samples for each in sample.tensors)
    tensors = grouped(measured, lambda each: (each.kind, each.name, each.dtype))
    together = (Measured.of(*key, merged(alike)) for key, alike in tensors.items())
    return structs.replace(samples[0], tensors=tuple(together))
