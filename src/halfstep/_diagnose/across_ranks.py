"""Diagnoses of several ranks, merged on rank 0 without a collective; steps that need all ranks."""

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
"""How long rank 0 waits for the diagnoses of other ranks."""

_numbers = count()


def merged(found: Diagnosis) -> Diagnosis:
    """Return the diagnoses of all ranks on rank 0, and the own one on other ranks.

    Every rank must call this equally often. A note names ranks that do not.
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
        except RuntimeError:  # DistStoreError, after a timeout
            missing.append(other)
            continue
        others.append(Diagnosis.from_json(store.get(_key(number, other)).decode()))
    if missing:
        ranks = ", ".join(map(str, missing))
        note = f"ranks {ranks} did not answer: call diagnose() on every rank"
        found = replace(found, notes=(*found.notes, note))
    return _worst_first([found, *others])


def _worst_first(all_of_them: list[Diagnosis]) -> Diagnosis:
    """Return the first diagnosis of a bad step, with the others in it."""
    first = next((d for d in all_of_them if d.verdict != "none"), all_of_them[0])
    return replace(first, others=tuple(d for d in all_of_them if d is not first))


def _key(number: int, rank: int) -> str:
    return f"halfstep/diagnosis/{number}/{rank}"


# --- steps that need all ranks --------------------------------------------------------------------


def why_together(model: nn.Module) -> str | None:
    """Return why a model needs all ranks to run, None if one rank can run it alone."""
    names = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    if names & {"FSDPModule", "FullyShardedDataParallel"}:
        return "the model is sharded by FSDP"
    if any(map(_is_of_several_ranks, model.parameters())):
        return "the parameters of the model are DTensors"
    return None


def is_compiled_together(model: nn.Module) -> bool:
    """Return whether compiled code of a model may call collectives, in an order of its own.

    If one rank runs the code in eager mode, ranks may wait for different collectives.
    """
    return any(map(compiler.is_compiled, model.modules())) and why_together(model) is not None


def _is_of_several_ranks(tensor: Tensor) -> bool:
    return distributed.is_dtensor(tensor) and tensor.device_mesh.size() > 1  # type: ignore[attr-defined]


def waits_for_others(why: str) -> RanksError:
    """Return the error for a step that one rank cannot replay."""
    return RanksError(
        f"this step cannot be replayed: {why}, and a replay by one rank would wait for the others. "
        "Put `with scaler.diagnose(model):` around the loop: it traces such steps as they run"
    )
