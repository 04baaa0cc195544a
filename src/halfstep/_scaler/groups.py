"""Groups of ranks: exchange among them, and the layout of parameters over them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import ref

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from halfstep._gradients.gradients import Gradients
from halfstep._pytorch.distributed import exchange_device, may_end_early, spec_of, world
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ReduceOp
    from torch.distributed.device_mesh import DeviceMesh

_T = TypeVar("_T")

NUM_LISTED = 16
"""Maximum number of ranks listed in a message; the rest are counted."""


@dataclass(frozen=True, eq=False)
class Group:
    """A set of ranks."""

    parts: tuple[ProcessGroup, ...]
    """Process groups; reducing over each in turn reduces over all ranks."""
    ranks: tuple[int, ...]
    """The global ranks, in ascending order."""

    @classmethod
    def world(cls) -> Group:
        return cls.of(world())

    @classmethod
    def of(cls, process_group: ProcessGroup) -> Group:
        ranks = distributed.get_process_group_ranks(process_group)
        return cls((process_group,), tuple(sorted(ranks)))

    @classmethod
    def of_mesh(cls, mesh: DeviceMesh) -> Group:
        """Return the ranks of a mesh, as one process group if one exists for them."""
        ranks = ranks_of(mesh)
        if len(ranks) == distributed.get_world_size():
            return cls.world()
        return cls(tuple(mesh.get_group(dim) for dim in range(mesh.ndim)), ranks)

    @cached_property
    def place(self) -> int:
        """The index of this rank in the group."""
        return self.ranks.index(distributed.get_rank())

    @property
    def device(self) -> torch.device:
        """The device for exchanging tensors, of the same type on all ranks."""
        return exchange_device(self.parts[0])

    def gather(self, numbers: Sequence[float], purpose: str) -> list[tuple[float, ...]]:
        """Return the numbers of every rank, in the order of the ranks. Sync: one.

        Every rank passes equally many. Integers are exact below 2^53.
        """
        rows = torch.zeros(len(self.ranks), len(numbers), dtype=torch.float64)
        rows[self.place] = torch.tensor(numbers, dtype=torch.float64)
        summed = Reduction(self, rows.to(self.device), distributed.ReduceOp.SUM, purpose).wait()
        return [tuple(row) for row in summed.tolist()]

    def lines(self, rows: Sequence[_T], describe: Callable[[_T], str]) -> str:
        """Return one line for each distinct row, with the ranks that have it."""
        having: dict[_T, list[int]] = defaultdict(list)
        for rank, row in zip(self.ranks, rows, strict=True):
            having[row].append(rank)
        return "\n".join(f"  {describe(row)}: rank {listed(having[row])}" for row in having)


class Reduction:
    """An all-reduce in flight, in place, of values on the device of a group.

    ``purpose`` starts error messages, for example ``step(SGD): found_inf``.
    """

    def __init__(self, group: Group, values: Tensor, op: ReduceOp.RedOpType, purpose: str) -> None:
        self._group, self._values, self._op, self._purpose = group, values, op, purpose
        self._error: RanksError | None = None
        with self._explained():
            self._work = distributed.all_reduce(values, op, group.parts[0], async_op=True)

    def wait(self) -> Tensor:
        """Return the reduced values; call it once. Sync: none, except on the CPU."""
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
                "Cure: read what the other ranks printed last; the first error is the cause."
            )
            raise self._error from error


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a mesh in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


def listed(ranks: Sequence[int]) -> str:
    """Format ranks for a message: ``0, 1, 2``, shortened if there are many."""
    shown = ", ".join(map(str, ranks[:NUM_LISTED]))
    return shown if len(ranks) <= NUM_LISTED else f"{shown} and {len(ranks) - NUM_LISTED} more"


@dataclass(eq=False)
class Layout:
    """The layout of one optimizer's parameters over the ranks."""

    group: Group
    """The ranks that decide its steps."""
    sharing: Group | None
    """The union of the ranks of its DTensors; None without any."""
    copies: dict[int, int] = field(default_factory=dict)
    """By id of a plain parameter: the number of ranks that have the same gradient."""
    wrappers: list[ref[DistributedDataParallel]] = field(default_factory=list)
    """Those that reduce its plain parameters."""

    # By the id of a spec, together with the spec, so that the id is not reused.
    _by_spec: dict[int, tuple[Any, float]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_sharing(self) -> int:
        """Number of ranks that hold a part or a copy of the same parameters."""
        return 1 if self.sharing is None else len(self.sharing.ranks)

    def require_all_ranks(self, call: str) -> None:
        """Raise if some ranks may have left ``join()``, and would not take part in a collective."""
        for wrapper in self.wrappers:
            module = wrapper()
            if module is not None and may_end_early(module):
                raise RanksError(
                    f"{call}: inside join(), ranks without batches take no steps, but all ranks "
                    "decide together (process_group=, or a communication hook). Their collectives "
                    "would not match, which can abort the process.\n"
                    "Cure: give all ranks equally many batches, or end the epoch on all of them: "
                    "model.join(throw_on_early_termination=True), and catch its RuntimeError; or "
                    "let each rank decide by its averaged gradients: process_group='local'. If "
                    "join() is over, tell PyTorch: with model.join(enable=False): pass"
                )

    def shares(self, gradients: Gradients) -> list[float]:
        """Return for each gradient 1 / (number of ranks in the group that have the same one).

        Empty if each gradient exists only on this rank.
        """
        if self.sharing is None and not self.copies:
            return []
        pairs = zip(gradients.params, gradients.grads, strict=True)
        shares = [self._share(param, grad) for param, grad in pairs]
        return shares if any(share != 1.0 for share in shares) else []

    def _share(self, param: Tensor, grad: Tensor) -> float:
        spec = spec_of(grad)
        if spec is None:
            # A plain parameter beside DTensors is one that tensor parallelism did not shard.
            return 1.0 / max(self.copies.get(id(param), 1), self.num_sharing)
        if spec is not spec_of(param):
            return 1.0 / self._copies_of(grad)  # created for this gradient only
        known = self._by_spec.get(id(spec))
        if known is None:
            known = self._by_spec[id(spec)] = spec, 1.0 / self._copies_of(grad)
        return known[1]

    def _copies_of(self, dtensor: Any) -> float:
        mesh = dtensor.device_mesh
        copies: int = math.prod(
            mesh.size(dim)
            for dim, placement in enumerate(dtensor.placements)
            if placement.is_replicate()
        )
        # A DTensor on a part of the other DTensors' mesh is replicated on the other parts.
        num_ranks: int = mesh.size()
        return copies * self.num_sharing / num_ranks
