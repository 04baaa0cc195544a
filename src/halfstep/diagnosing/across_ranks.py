"""What several ranks have found, put together on rank 0, without a collective."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import count

import torch

from halfstep import _torch
from halfstep.diagnosing.diagnosis import Diagnosis

PATIENCE = timedelta(seconds=60)
"""How long rank 0 waits for what the others have found."""

_numbers = count()


def merged(found: Diagnosis) -> Diagnosis:
    """Return on rank 0 what all ranks have found, elsewhere what this one has.

    Every rank is to call it equally often. One that does not is named in a note.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return found
    number, store = next(_numbers), _torch.default_store()
    rank, num_ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    found = replace(found, rank=rank)
    if rank != 0:
        store.set(_key(number, rank), found.to_json())
        return found
    others: list[Diagnosis] = []
    missing: list[int] = []
    for other in range(1, num_ranks):
        try:
            store.wait([_key(number, other)], PATIENCE if not missing else timedelta(seconds=1))
        except RuntimeError:  # DistStoreError, that of a timeout
            missing.append(other)
            continue
        others.append(Diagnosis.from_json(store.get(_key(number, other)).decode()))
    if missing:
        ranks = ", ".join(map(str, missing))
        note = f"nothing was heard of ranks {ranks}: diagnose() is to be called on every rank"
        found = replace(found, notes=(*found.notes, note))
    return _worst_first([found, *others])


def _worst_first(all_of_them: list[Diagnosis]) -> Diagnosis:
    """Return the first diagnosis that has found something, with the others in it."""
    first = next((d for d in all_of_them if d.verdict != "none"), all_of_them[0])
    return replace(first, others=tuple(d for d in all_of_them if d is not first))


def _key(number: int, rank: int) -> str:
    return f"halfstep/diagnosis/{number}/{rank}"
