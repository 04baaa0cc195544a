"""Following a record while it is written: every line is read once."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, replace
from os import fstat
from pathlib import Path

from halfstep._record.files import files_in
from halfstep._record.rank_record import RankRecord
from halfstep._record.read import JoinedSteps, disagreement, joined, joined_samples
from halfstep._record.run import Note, Run, Sample, Step
from halfstep.errors import RecordError


@dataclass(frozen=True)
class RecordUpdate:
    """The additions to a record since the last read.

    Attributes:
        new: The run as it is now, but with only the new steps, samples, culprits, diagnoses and
            notes; of the samples at most one, the latest.
        is_anew: Whether this starts a record, as in the first update and after the files were
            replaced: nothing read before belongs to it.
        written: When a rank wrote last, in seconds since the epoch.
    """

    new: Run
    is_anew: bool
    written: float


class Follower:
    """Reads what is new in the record in a folder.

    It keeps its position in each file and at most two samples per rank, whatever the length of the
    record. A step is returned once all ranks have it, unless a rank is far behind.

    Args:
        folder: The folder; it need not exist yet.
    """

    _files: dict[int, _File]
    _comparisons: dict[int, _StepComparison]
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
            self._files.setdefault(number, _File(path, number)).read()
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
            new = _StepComparison(rank.number, after=self._last_step)
            note = self._comparisons.setdefault(rank.number, new).add(first.steps, rank.steps)
            notes += [] if note is None else [note]
        return notes


class _File:
    """One file and the position that was read up to."""

    def __init__(self, path: Path, number: int) -> None:
        self.rank = RankRecord(path, number)
        self.written = 0.0
        self._path = path
        self._inode: int | None = None
        self._offset = 0
        self._num_lines = 0

    def was_replaced(self) -> bool:
        """Return whether a new run replaced the file."""
        try:
            status = self._path.stat()
        except FileNotFoundError:
            return True
        return status.st_ino != self._inode or status.st_size < self._offset

    def read(self) -> None:
        """Take the events of all new and complete lines."""
        try:
            with self._path.open("rb") as file:
                status = fstat(file.fileno())
                self._inode, self.written = status.st_ino, status.st_mtime
                file.seek(self._offset)
                for line in file:
                    if not line.endswith(b"\n"):  # the rest is still to come
                        break
                    self._take(line)
        except OSError as error:
            raise RecordError(f"{self._path}: cannot be read: {error.strerror}") from None
        if self._num_lines:
            self.rank.require_begun()

    def _take(self, line: bytes) -> None:
        self._offset += len(line)
        self._num_lines += 1
        if line.strip():
            self.rank.take(self._num_lines, line)
        del self.rank.samples[:-2]


class _StepComparison:
    """Compares the steps of the first rank with those of another, as they come.

    Args:
        number: Number of the other rank.
        after: The last step that is not compared: the first rank's steps up to it were already
            returned when the other's file appeared.
    """

    def __init__(self, number: int, after: int) -> None:
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
            note = disagreement(self._mine.popleft(), self._its.popleft(), self._number)
            if note is not None:
                self._has_differed = True
                self._mine.clear()
                self._its.clear()
                return note
        return None
