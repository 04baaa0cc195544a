"""The ranks that decide together, and a reduction over them that says what was waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, distributed

from halfstep._pytorch.distributed import exchange_device
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ReduceOp, Work
    from torch.distributed.device_mesh import DeviceMesh

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
        """Start an all-reduce in place. Sync: none.

        Args:
            values: Of one dtype and shape on all ranks, on :attr:`device`.
            op: How entries are put together.
            purpose: What a message says of it: ``step(SGD): found_inf``.
        """
        return Reduction(self, values, op, purpose)


class Reduction:
    """An all-reduce that is under way."""

    def __init__(self, group: Group, values: Tensor, op: ReduceOp.RedOpType, purpose: str) -> None:
        self._group, self._values, self._op, self._purpose = group, values, op, purpose
        self._error: RanksError | None = None
        self._work: Work | None = self._start(group.parts[0])

    def wait(self) -> Tensor:
        """Return the values of all ranks together. Sync: none, except on the CPU.

        Raises:
            RanksError: It failed or took longer than the time limit of the process group.
        """
        if self._error is not None:
            raise self._error
        if self._work is not None:
            work, self._work = self._work, None
            self._finish(work)
            for part in self._group.parts[1:]:
                self._finish(self._start(part))
        return self._values

    def _start(self, part: ProcessGroup) -> Work:
        try:
            work: Work = distributed.all_reduce(self._values, self._op, part, async_op=True)
        except RuntimeError as error:
            raise self._failed(error) from error
        return work

    def _finish(self, work: Work) -> None:
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error

    def _failed(self, error: RuntimeError) -> RanksError:
        first_line = str(error).strip().split("\n")[0]
        rank = distributed.get_rank()
        others = [other for other in self._group.ranks if other != rank]
        self._error = RanksError(
            f"{self._purpose}: rank {rank} waited for rank "
            f"{listed(others)}, and the all-reduce of {self._values.numel()} numbers "
            f"failed: {first_line}\n"
            "Cause: a rank has died, hangs, or has not made this call. All ranks are to call "
            "unscale_(), clip_grad_norm_(), step() and update() of a GradScaler in the same order, "
            "those without a loss or without gradients too.\n"
            "Cure: look at what the other ranks printed last; the first error is the cause."
        )
        return self._error


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a mesh in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def listed(ranks: Sequence[int]) -> str:
    """Return ranks for a message: ``0, 1, 2``, or the first of many."""
    shown = ", ".join(map(str, ranks[:NUM_LISTED]))
    return shown if len(ranks) <= NUM_LISTED else f"{shown} and {len(ranks) - NUM_LISTED} more"


def has_ranks() -> bool:
    """Say whether this process is one of several."""
    return (
        distributed.is_available()
        and distributed.is_initialized()
        and distributed.get_world_size() > 1
    )
