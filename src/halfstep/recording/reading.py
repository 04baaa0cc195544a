"""From the files of a record to a :class:`halfstep.recording.run.Run`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from pathlib import Path

from halfstep.errors import RecordError
from halfstep.numerics.statistics import Statistics, merged
from halfstep.recording.lines import files_in, read_lines
from halfstep.recording.ranks import Rank
from halfstep.recording.run import Kind, Measured, Note, Run, Sample, Step
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
    ranks = {number: _read_rank(file, number) for number, file in files.items()}
    run = joined(folder, ranks)
    notes = (*run.notes, *_disagreements(ranks))
    return replace(run, notes=notes, trace=_trace(folder / "trace.json"))


def _read_rank(path: Path, number: int) -> Rank:
    rank = Rank(path, number)
    for line, event in read_lines(path):
        rank.take(line, event)
    rank.require_begun()
    return rank


# --- several ranks --------------------------------------------------------------------------------


def joined(folder: Path, ranks: Mapping[int, Rank]) -> Run:
    """Put together what the ranks hold; whether they agree is not looked at."""
    first = next(iter(ranks.values()))
    others = {number: rank for number, rank in ranks.items() if rank is not first}
    notes = [*first.notes]
    for number, rank in others.items():
        new = [note for note in rank.notes if note not in first.notes]
        notes += [Note(note.step, f"rank {number}: {note.text}") for note in new]
    ends = [rank.end for rank in ranks.values()]
    errors = [end["error"] for end in ends if end is not None and end["error"] is not None]
    culprits = (each for rank in ranks.values() for each in rank.culprits)
    diagnoses = (each for rank in ranks.values() for each in rank.diagnoses)
    return Run(
        path=folder,
        header=first.header,
        num_segments=first.num_segments,
        ranks=tuple(ranks),
        models=tuple(first.models),
        policies=tuple(first.policies),
        steps=tuple(first.steps),
        samples=joined_samples(rank.samples for rank in ranks.values()),
        culprits=tuple(sorted(culprits, key=lambda each: each.step)),
        diagnoses=tuple(sorted(diagnoses, key=lambda each: each.step)),
        notes=tuple(notes),
        error=errors[0] if errors else None,
        has_ended=all(end is not None for end in ends),
        trace=None,
    )


def _disagreements(ranks: Mapping[int, Rank]) -> Iterator[Note]:
    first, *others = ranks.values()
    for rank in others:
        pairs = zip(first.steps, rank.steps, strict=False)
        notes = (disagreement(mine, its, rank.number) for mine, its in pairs)
        yield from islice((note for note in notes if note is not None), 1)


def disagreement(mine: Step, its: Step, number: int) -> Note | None:
    """Say how the step of a rank differs from the first rank's; None if it does not."""
    if (mine.taken, mine.scale_after) == (its.taken, its.scale_after):
        return None
    text = (
        f"ranks disagree from step {mine.step} on: rank {number} has {_verdict(its)}, "
        f"the first rank {_verdict(mine)}"
    )
    return Note(mine.step, text)


def _verdict(step: Step) -> str:
    return f"{'taken' if step.taken else 'skipped'} it, scale {step.scale_after}"


def joined_samples(samples: Iterable[Iterable[Sample]]) -> tuple[Sample, ...]:
    """Put together the samples of several ranks: one for each step."""
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
