"""From the files of a record to a :class:`halfstep._record.run.Run`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path

from halfstep._record.joining import (
    JoinedSteps,
    disagreements,
    first_error,
    joined_models,
    joined_samples,
)
from halfstep._record.lines import files_in, read_lines
from halfstep._record.ranks import Rank
from halfstep._record.run import Note, Run, Step
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
    ranks = {number: _read_rank(file, number) for number, file in files.items()}
    run = joined(folder, ranks, JoinedSteps().add(ranks, is_all=True))
    trace, damage = _trace(folder / "trace.json")
    notes = (*run.notes, *damage, *disagreements(ranks))
    return replace(run, notes=notes, left_out=(*run.left_out, *damage), trace=trace)


def _read_rank(path: Path, number: int) -> Rank:
    rank = Rank(path, number)
    for number, line in read_lines(path):
        rank.take(number, line)
    rank.require_begun()
    return rank


# --- several ranks --------------------------------------------------------------------------------


def joined(folder: Path, ranks: Mapping[int, Rank], steps: Iterable[Step]) -> Run:
    """Put together what the ranks hold; whether they agree is not looked at.

    Args:
        folder: Of the record.
        ranks: In order.
        steps: Theirs, put together.
    """
    first = next(iter(ranks.values()))
    others = {number: rank for number, rank in ranks.items() if rank is not first}
    left_out = [note for rank in ranks.values() for note in rank.left_out]
    notes = [*first.notes, *left_out]
    for number, rank in others.items():
        new = [note for note in rank.notes if note not in first.notes]
        notes += [Note(note.step, f"rank {number}: {note.text}") for note in new]
    error, error_rank = first_error(ranks.values())
    culprits = (each for rank in ranks.values() for each in rank.culprits)
    diagnoses = (each for rank in ranks.values() for each in rank.diagnoses)
    return Run(
        path=folder,
        header=first.header,
        starts=tuple(first.starts),
        ranks=tuple(ranks),
        models=tuple(joined_models(ranks.values())),
        policies=tuple(first.policies),
        steps=tuple(steps),
        samples=joined_samples(rank.samples for rank in ranks.values()),
        culprits=tuple(sorted(culprits, key=lambda each: each.step)),
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
