"""Reading of complete and growing records, with the files of all ranks joined into one run."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from msgspec import structs

from halfstep._common.numbers import power
from halfstep._numerics.statistics import merged
from halfstep._record.files import files_in
from halfstep._record.rank_record import RankFile, RankRecord
from halfstep._record.run import Kind, Measured, Model, Note, Run, Sample, Step
from halfstep._trace.recording import Recording
from halfstep.errors import RecordError


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
    ranks = {}
    for number, file in files.items():
        read = RankFile(file, number)
        read.read()
        ranks[number] = read.rank
    run = joined(folder, ranks, JoinedSteps().add(ranks, is_all=True))
    trace, damage = _trace(folder / "trace.json")
    first, *others = ranks.values()
    differ = (StepComparison(other.number).add(first.steps, other.steps) for other in others)
    notes = (*run.notes, *damage, *(note for note in differ if note is not None))
    return replace(run, notes=notes, left_out=(*run.left_out, *damage), trace=trace)


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


def joined(folder: Path, ranks: Mapping[int, RankRecord], steps: Iterable[Step]) -> Run:
    """Join the records of the ranks and their joined steps, without comparing them."""
    first = next(iter(ranks.values()))
    others = {number: rank for number, rank in ranks.items() if rank is not first}
    left_out = [note for rank in ranks.values() for note in rank.left_out]
    notes = [*first.notes, *left_out]
    for number, rank in others.items():
        new = [note for note in rank.notes if note not in first.notes]
        notes += [Note(note.step, f"rank {number}: {note.text}") for note in new]
    error, error_rank = _first_error(ranks.values())
    culprits = (each for rank in ranks.values() for each in rank.culprits)
    buffers = (each for rank in ranks.values() for each in rank.buffers)
    diagnoses = (each for rank in ranks.values() for each in rank.diagnoses)
    return Run(
        path=folder,
        header=first.header,
        starts=tuple(first.starts),
        ranks=tuple(ranks),
        models=tuple(_joined_models(ranks.values())),
        policies=tuple(first.policies),
        steps=tuple(steps),
        samples=joined_samples(rank.samples for rank in ranks.values()),
        culprits=tuple(sorted(culprits, key=lambda each: each.step)),
        buffers=tuple(sorted(buffers, key=lambda each: each.step)),
        diagnoses=tuple(sorted(diagnoses, key=lambda each: each.step)),
        notes=tuple(notes),
        left_out=tuple(left_out),
        error=error,
        error_rank=error_rank,
        without_end=tuple(number for number, rank in ranks.items() if rank.end is None),
        trace=None,
    )


def _trace(path: Path) -> tuple[Recording | None, tuple[Note, ...]]:
    try:
        return Recording.from_json(path.read_bytes()), ()
    except FileNotFoundError:
        return None, ()
    except (OSError, ValueError) as error:
        return None, (Note(0, f"{path.name} cannot be read as a trace and was left out: {error}"),)


MOST_AHEAD = 128
"""Number of steps behind the first rank beyond which a rank is not waited for."""


# --- steps ----------------------------------------------------------------------------------------


class JoinedSteps:
    """An incremental join of the first rank's steps with the losses of all ranks.

    In a pipeline only the last stage has a loss; each replica of a model has the loss of its batch.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, deque[Step]] = {}

    def add(self, ranks: Mapping[int, RankRecord], *, is_all: bool = False) -> list[Step]:
        """Add the new steps and return complete ones; all, if no more will come."""
        for number, rank in ranks.items():
            self._waiting.setdefault(number, deque()).extend(rank.steps)
        first, *others = ranks
        mine, joined = self._waiting[first], []
        while mine:
            for other in others:
                _leave_out(self._waiting[other], before=mine[0].step)
            late = [n for n in others if not self._waiting[n] and ranks[n].end is None]
            if late and not is_all and len(mine) <= MOST_AHEAD:
                break
            step = mine.popleft()
            alike = {first: step}
            for other in others:
                its = self._waiting[other]
                if its and its[0].step == step.step:
                    alike[other] = its.popleft()
            joined.append(_joined_step(step, alike))
        return joined


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


class StepComparison:
    """An incremental comparison of the first rank's steps with those of another.

    Args:
        number: Number of the other rank.
        after: The last step that is not compared: the first rank's steps up to it were already
            returned when the other's file appeared.
    """

    def __init__(self, number: int, after: int = 0) -> None:
        self._number = number
        self._after = after
        self._mine: deque[Step] = deque()
        self._its: deque[Step] = deque()
        self._has_differed = False

    def add(self, mine: list[Step], its: list[Step]) -> Note | None:
        """Return the first disagreement; None before it and after it."""
        if self._has_differed:
            return None
        self._mine.extend(step for step in mine if step.step > self._after)
        self._its.extend(step for step in its if step.step > self._after)
        while self._mine and self._its:
            note = _disagreement(self._mine.popleft(), self._its.popleft(), self._number)
            if note is not None:
                self._has_differed = True
                self._mine.clear()
                self._its.clear()
                return note
        return None


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
    known = [_looks(model) for model in first.models]
    own = ((rank.number, model) for rank in others for model in rank.models)
    new = (structs.replace(each, rank=rank) for rank, each in own if _looks(each) not in known)
    return [*first.models, *new]


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


def joined_samples(samples: Iterable[Iterable[Sample]]) -> tuple[Sample, ...]:
    """Join the samples of several ranks into one per step."""
    by_step: dict[int, list[Sample]] = {}
    for of_rank in samples:
        for sample in of_rank:
            by_step.setdefault(sample.step, []).append(sample)
    return tuple(_joined_sample(alike) for _, alike in sorted(by_step.items()))


def _joined_sample(samples: Sequence[Sample]) -> Sample:
    if len(samples) == 1:
        return samples[0]
    tensors: dict[tuple[Kind, str, str], list[Measured]] = {}
    for sample in samples:
        for each in sample.tensors:
            tensors.setdefault((each.kind, each.name, each.dtype), []).append(each)
    together = (Measured.of(*key, merged(alike)) for key, alike in tensors.items())
    return structs.replace(samples[0], tensors=tuple(together))


# --- a record that is being written ---------------------------------------------------------------


@dataclass(frozen=True)
class RecordUpdate:
    """The additions to a record since the last read.

    ``new`` is the current run, but with only the new steps, samples, culprits, diagnoses and notes,
    and at most one sample, the latest. If ``is_anew``, as in the first update and after the files
    were replaced, earlier updates do not belong to the run.
    """

    new: Run
    is_anew: bool
    written: float  # when a rank wrote last, in seconds since the epoch


class Follower:
    """An incremental reader of the record in a folder, which need not exist yet.

    It keeps its position in each file and at most two samples per rank, whatever the length of the
    record. A step is returned once all ranks have it, unless a rank is far behind.
    """

    _files: dict[int, RankFile]
    _comparisons: dict[int, StepComparison]
    _steps: JoinedSteps
    _last_step: int
    _last_sample: int
    _is_anew: bool

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._start_over()

    def read(self) -> RecordUpdate | None:
        """Return the additions since the last call; None while there is no record.

        Only complete lines count. Files of further ranks are picked up as they appear.

        Raises:
            RecordError: A file is not a record, or cannot be read.
        """
        paths = files_in(self._folder)
        if self._is_another(paths):
            self._start_over()
        for number, path in paths.items():
            self._files.setdefault(number, RankFile(path, number, is_growing=True)).read()
        ranks = {
            number: file.rank for number, file in sorted(self._files.items()) if file.rank.starts
        }
        if not ranks:
            return None
        run = joined(self._folder, ranks, self._steps.add(ranks))
        update = RecordUpdate(
            new=replace(
                run,
                samples=self._new_sample(ranks),
                notes=(*run.notes, *self._new_disagreements(ranks)),
            ),
            is_anew=self._is_anew,
            written=max(file.written for file in self._files.values()),
        )
        self._is_anew = False
        own = next(iter(ranks.values())).steps
        self._last_step = own[-1].step if own else self._last_step
        for rank in ranks.values():
            rank.forget()
        return update

    def _start_over(self) -> None:
        self._files, self._comparisons, self._steps = {}, {}, JoinedSteps()
        self._last_step = self._last_sample = 0
        self._is_anew = True

    def _is_another(self, paths: Mapping[int, Path]) -> bool:
        """Return whether the files now belong to another record, or the first rank changed."""
        if not self._files or not paths:
            return False
        was_replaced = any(file.was_replaced() for file in self._files.values())
        return was_replaced or min(paths) < min(self._files)

    def _new_sample(self, ranks: Mapping[int, RankRecord]) -> tuple[Sample, ...]:
        """Return the newest sample that all ranks have.

        A rank that was killed will never have it. In that case return the second to last, the
        newest that is certainly complete on the others.
        """
        held = [rank.samples for rank in ranks.values()]
        by_all = set.intersection(*({sample.step for sample in samples} for samples in held))
        for_certain = {samples[-2].step for samples in held if len(samples) == 2}
        newest = max(by_all or for_certain, default=0)
        if newest <= self._last_sample:
            return ()
        self._last_sample = newest
        return joined_samples([s for s in samples if s.step == newest] for samples in held)

    def _new_disagreements(self, ranks: Mapping[int, RankRecord]) -> list[Note]:
        first, *others = ranks.values()
        notes = []
        for rank in others:
            new = StepComparison(rank.number, after=self._last_step)
            note = self._comparisons.setdefault(rank.number, new).add(first.steps, rank.steps)
            notes += [] if note is None else [note]
        return notes
