"""What several ranks have found, put together on rank 0, without a collective."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from itertools import count

import torch
from torch import Tensor, nn

from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._pytorch import compiler, distributed
from halfstep.errors import RanksError

PATIENCE = timedelta(seconds=60)
"""How long rank 0 waits for what the others have found."""

_numbers = count()


def merged(found: Diagnosis) -> Diagnosis:
    """Return on rank 0 what all ranks have found, elsewhere what this one has.

    Every rank is to call it equally often. One that does not is named in a note.
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return found
    number, store = next(_numbers), distributed.default_store()
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


# --- what only all ranks together can run ---------------------------------------------------------


def why_together(model: nn.Module) -> str | None:
    """Say why a model runs on all ranks together only, None if one can run it alone."""
    names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        return "the model is sharded by FSDP"
    if any(map(_is_of_several_ranks, model.parameters())):
        return "the parameters of the model are DTensors"
    return None


def is_compiled_together(model: nn.Module) -> bool:
    """Say whether compiled code of a model may talk to other ranks, in an order of its own.

    If one rank runs it as it is written, the ranks may wait for different things.
    """
    return any(map(compiler.is_compiled, model.modules())) and why_together(model) is not None


def _is_of_several_ranks(tensor: Tensor) -> bool:
    return distributed.is_dtensor(tensor) and tensor.device_mesh.size() > 1  # type: ignore[attr-defined]


def local_part(tensor: Tensor) -> Tensor:
    """Return what this rank has of a tensor, detached. Sync: none."""
    tensor = tensor.detach()
    return distributed.local_part(tensor)


def waits_for_others(why: str) -> RanksError:
    """Return the error for a step that one rank cannot replay."""
    return RanksError(
        f"this step cannot be replayed: {why}, and a replay by one rank would wait for the others. "
        "Put `with scaler.diagnose(model):` around the loop: it looks at such steps as they run"
    )
