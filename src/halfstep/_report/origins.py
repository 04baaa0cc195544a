"""Where skipped steps began: of what several ranks have seen, what came first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from halfstep._record.run import Culprits, Run

_Models = Sequence[tuple[str, int, tuple[str, ...]]]
"""Class, number of parameters, and modules in the order in which they ran."""


class Beginning(NamedTuple):
    """Where one skipped step began.

    Attributes:
        culprits: What the first of the ranks below has seen.
        ranks: Those that saw it begin there.
    """

    culprits: Culprits
    ranks: tuple[int, ...]


def beginnings(run: Run) -> dict[tuple[int, str], Beginning]:
    """Return where each skipped step began, by iteration and optimizer, as far as it is known."""
    alike: dict[tuple[int, str], list[Culprits]] = {}
    for each in run.culprits:
        alike.setdefault((each.step, each.optimizer), []).append(each)
    models = _models(run)
    return {key: _first(found, models) for key, found in alike.items()}


def _models(run: Run) -> Mapping[int, _Models]:
    """Return the models of each rank."""
    models: dict[int, list[tuple[str, int, tuple[str, ...]]]] = {rank: [] for rank in run.ranks}
    others = {model.rank for model in run.models if model.rank is not None}
    for model in run.models:
        for rank in set(run.ranks) - others if model.rank is None else [model.rank]:
            models[rank].append((model.name, model.parameters, model.modules))
    return models


def _first(found: list[Culprits], models: Mapping[int, _Models]) -> Beginning:
    """Return what the backward pass came to first.

    Of the modules of one model that is the one that ran last. The stages of a pipeline have models
    of their own: there it is the highest rank, which has the last stage.
    """
    known = [each for each in found if each.began_in is not None] or found
    if all(models[each.rank] == models[known[0].rank] for each in known):
        modules = [name for *_, names in models[known[0].rank] for name in names]
        places = {name: place for place, name in enumerate(modules)}
        first = max(known, key=lambda each: places.get(each.began_in or "", -1))
    else:
        first = max(known, key=lambda each: each.rank)
    ranks = {
        each.rank
        for each in known
        if each.began_in == first.began_in and models[each.rank] == models[first.rank]
    }
    return Beginning(first, tuple(sorted(ranks)))
