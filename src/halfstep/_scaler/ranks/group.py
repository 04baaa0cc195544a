"""Groups of ranks that decide together; reductions over them whose errors say what waited."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, distributed

from halfstep._pytorch.distributed import exchange_device
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ReduceOp
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")

# torch.distributed may have been left out of the build.
has_process_group: Callable[[], bool] = getattr(distributed, "is_initialized", lambda: False)

NUM_LISTED = 16
"""A message lists this many ranks and counts the rest."""


@dataclass(frozen=True, eq=False)
class Group:
    """Some ranks.

    Attributes:
        parts: Process groups; to reduce over each in turn is to reduce over all ranks.
        ranks: Their numbers in the world, in ascending order.
    """

    parts: tuple[ProcessGroup, ...]
    ranks: tuple[int, ...]

    @classmethod
    def world(cls) -> Group:
        """Return all ranks."""
        world = distributed.group.WORLD
        assert world is not None
        return cls.of(world)

    @classmethod
    def of(cls, process_group: ProcessGroup) -> Group:
        """Return the ranks of a process group."""
        ranks = distributed.get_process_group_ranks(process_group)
        return cls((process_group,), tuple(sorted(ranks)))

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Group:
        """Return the ranks of a mesh: one process group if there is one for them."""
        ranks = ranks_of(mesh)
        if len(ranks) == distributed.get_world_size():
            return cls.world()
        return cls(tuple(mesh.get_group(dim) for dim in range(mesh.ndim)), ranks)

    @cached_property
    def place(self) -> int:
        """The place of this rank among the others, from 0."""
        return self.ranks.index(distributed.get_rank())

    @property
    def device(self) -> torch.device:
        """Where the ranks exchange tensors: a device of the same kind on all of them."""
        return exchange_device(self.parts[0])

    def reduce(self, values: Tensor, op: ReduceOp.RedOpType, purpose: str) -> Reduction:
        """Start an all-reduce in place, of values on :attr:`device`. Sync: none.

        ``purpose`` is what a message says of it: ``step(SGD): found_inf``.
        """
        return Reduction(self, values, op, purpose)

    def gather(self, numbers: Sequence[float], purpose: str) -> list[tuple[float, ...]]:
        """Return the numbers of every rank, in the order of the ranks. Sync: one.

        As many on all of them; whole ones are exact below 2^53.
        """
        rows = torch.zeros(len(self.ranks), len(numbers), dtype=torch.float64)
        rows[self.place] = torch.tensor(numbers, dtype=torch.float64)
        summed = self.reduce(rows.to(self.device), distributed.ReduceOp.SUM, purpose).wait()
        return [tuple(row) for row in summed.tolist()]

    def lines(self, rows: Sequence[_T], describe: Callable[[_T], str]) -> str:
        """Return a line for each different row, with the ranks that have it."""
        having: dict[_T, list[int]] = defaultdict(list)
        for rank, row in zip(self.ranks, rows, strict=True):
            having[row].append(rank)
        return "\n".join(f"  {describe(row)}: rank {listed(having[row])}" for row in having)


class Reduction:
    """An all-reduce that is under way."""

    def __init__(self, group: Group, values: Tensor, op: ReduceOp.RedOpType, purpose: str) -> None:
        self._group, self._values, self._op, self._purpose = group, values, op, purpose
        self._error: RanksError | None = None
        with self._explained():
            self._work = distributed.all_reduce(values, op, group.parts[0], async_op=True)

    def wait(self) -> Tensor:
        """Return the values of all ranks together; call it once. Sync: none, except on the CPU."""
        if self._error is not None:
            raise self._error
        with self._explained():
            self._work.wait()
            for part in self._group.parts[1:]:
                distributed.all_reduce(self._values, self._op, part)
        return self._values

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            first_line = str(error).strip().split("\n")[0]
            rank = distributed.get_rank()
            others = [other for other in self._group.ranks if other != rank]
            self._error = RanksError(
                f"{self._purpose}: rank {rank} waited for rank "
                f"{listed(others)}, and the all-reduce of {self._values.numel()} numbers "
                f"failed: {first_line}\n"
                "Cause: a rank has died, hangs, or has not made this call. All ranks are to call "
                "step() in the same order, and of a GradScaler unscale_(), clip_grad_norm_() and "
                "update() too, also those without a loss or without gradients.\n"
                "Cure: look at what the other ranks printed last; the first error is the cause."
            )
            raise self._error from error


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a mesh in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def listed(ranks: Sequence[int]) -> str:
    """Return ranks for a message: ``0, 1, 2``, or the first of many."""
    shown = ", ".join(map(str, ranks[:NUM_LISTED]))
    return shown if len(ranks) <= NUM_LISTED else f"{shown} and {len(ranks) - NUM_LISTED} more"


def has_ranks() -> bool:
    """Return whether this process is one of several."""
    return has_process_group() and distributed.get_world_size() > 1
