"""Whether all ranks have the same, and if not, who has what."""

from __future__ import annotations

import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import distributed

from halfstep.errors import RanksError
from halfstep.scaling.ranks.group import Group, listed


def require_same(group: Group, call: str, state: Mapping[str, Any]) -> None:
    """Compare the state of a scaler, as it is saved, on all ranks of a group. Sync: one.

    Raises:
        RanksError: On all of them, if one has another.
    """
    digest = zlib.crc32(json.dumps(state, sort_keys=True).encode())
    purpose = f"{call}: the state of each rank"
    rows = gathered(group, purpose, [digest, state["_growth_tracker"]], [state["scale"]])
    if len(set(rows)) > 1:
        raise RanksError(
            f"{call}: nothing is saved, since the ranks have different states:\n"
            + lines(group, rows, lambda row: f"scale {row[-1]:g}, growth tracker {row[1]:.0f}")
            + "\nCure: load the same state on all ranks, or set one scale on all of them: "
            "scaler.update(new_scale=...)"
        )


def gathered(
    group: Group, purpose: str, integers: Sequence[int], floats: Sequence[float] = ()
) -> list[tuple[float, ...]]:
    """Return the numbers of every rank, in the order of the ranks. Sync: one.

    Args:
        group: The ranks, all of which are to call it.
        purpose: What a message says of the collective.
        integers: Below 2^53.
        floats: More numbers.
    """
    own = [float(number) for number in (*integers, *floats)]
    rows = torch.zeros(len(group.ranks), len(own), dtype=torch.float64)
    rows[group.place] = torch.tensor(own, dtype=torch.float64)
    summed = group.reduce(rows.to(group.device), distributed.ReduceOp.SUM, purpose).wait()
    return [tuple(row) for row in summed.tolist()]


def lines(
    group: Group, rows: Sequence[tuple[float, ...]], describe: Callable[[tuple[float, ...]], str]
) -> str:
    """Return a line for each different row, with the ranks that have it."""
    having: dict[tuple[float, ...], list[int]] = defaultdict(list)
    for rank, row in zip(group.ranks, rows, strict=True):
        having[row].append(rank)
    return "\n".join(f"  {describe(row)}: rank {listed(ranks)}" for row, ranks in having.items())
