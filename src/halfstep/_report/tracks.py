"""The steps of a run by optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from halfstep._record.run import Step


class Track(NamedTuple):
    """The steps of one optimizer of one run, whose names it has."""

    name: str
    steps: tuple[Step, ...]


def tracks_of(run: str, steps: Sequence[Step]) -> list[Track]:
    """Split the steps of a run by optimizer; optimizers of one class by their order."""
    found: dict[tuple[str, int], list[Step]] = {}
    iteration, names = 0, list[str]()
    for step in steps:
        if step.step != iteration:
            iteration, names = step.step, []
        names.append(step.optimizer)
        number = step.number or names.count(step.optimizer)
        found.setdefault((step.optimizer, number), []).append(step)
    if len(found) == 1:
        return [Track(run, tuple(steps))]
    return [
        Track(f"{run} {name}{f' {number}' if number > 1 else ''}".strip(), tuple(alike))
        for (name, number), alike in found.items()
    ]
