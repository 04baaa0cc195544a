"""Following a record while it is written: every line is read once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from halfstep._record.files import files_in
from halfstep._record.rank_record import RankFile, RankRecord
from halfstep._record.read import JoinedSteps, StepComparison, joined, joined_samples
from halfstep._record.run import Note, Run, Sample


@dataclass(frozen=True)
class RecordUpdate:
    """The additions to a record since the last read.

    ``new`` is the run as it is now, but with only the new steps, samples, culprits, diagnoses and
    notes; of the samples at most one, the latest. If ``is_anew``, as in the first update and after
    the files were replaced, nothing read before belongs to it.
    """

    new: Run
    is_anew: bool
    written: float  # when a rank wrote last, in seconds since the epoch


class Follower:
    """Reads what is new in the record in a folder, which need not exist yet.

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
        """Return what is new; None as long as there is no record.

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

        A rank that was killed will never have it: then return the last but one, the newest that is
        certainly complete on the others.
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
