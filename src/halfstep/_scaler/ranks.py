"""The ranks that decide a step together, and their agreement: one max-reduction of findings.

The vector is int32. A float32 number is sent as its bits, which have the same order for
non-negative numbers. A number that must be equal on all ranks is sent twice, once negated: if it is
equal, the two maxima are opposites.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import count
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from weakref import ref

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep._common.numbers import at_steps, power, step_list, things
from halfstep._gradients.gradients import Flags, Gradients, Norms
from halfstep._gradients.scalars import Scalar, any_of, float32_from_bits, scalar
from halfstep._pytorch.devices import to_device
from halfstep._pytorch.distributed import (
    exchange_device,
    has_comm_hook,
    has_ranks,
    is_dtensor,
    key_of,
    may_end_early,
    reduced_by,
    spec_of,
    world,
)
from halfstep._scaler.loss_scale import LossScale
from halfstep.errors import CallOrderError, RanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup, ReduceOp
    from torch.distributed.device_mesh import DeviceMesh

CHECK_EVERY = 100  # interval, in steps, of comparisons that would cost a sync each time

FOUND, BAD_LOSS, HAS_GRADIENTS, HAS_SCALE = range(4)
NUM_FIRST, NUM_SAME = 4, 4
"""After the first four come the numbers that must be equal on all ranks, twice."""


# --- groups of ranks ------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Group:
    """A set of ranks."""

    parts: tuple[ProcessGroup, ...]  # reducing over each in turn reduces over all ranks
    ranks: tuple[int, ...]  # global ones, in ascending order

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


class Reduction:
    """An all-reduce in flight, in place, of values on the device of a group."""

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
                f"{self._purpose}: rank {rank} waited for {at_steps(others, 'rank')}, and the "
                f"all-reduce of {self._values.numel()} numbers failed: {first_line}\n"
                "Cause: a rank has died, hangs, or has not made this call. All ranks are to call "
                "step() in the same order, and of a GradScaler unscale_() and update() too, also "
                "those without a loss or without gradients.\n"
                "Cure: read what the other ranks printed last; the first error is the cause."
            )
            raise self._error from error


def ranks_of(mesh: DeviceMesh) -> tuple[int, ...]:
    """Return the ranks of a mesh in ascending order."""
    return tuple(sorted(mesh.mesh.flatten().tolist()))


@dataclass(eq=False)
class Layout:
    """The layout of one optimizer's parameters over the ranks."""

    group: Group  # the ranks that decide its steps
    sharing: Group | None  # the union of the ranks of its DTensors; None without any
    # By id of a plain parameter: the number of ranks that have the same gradient.
    copies: dict[int, int] = field(default_factory=dict)
    # Those that reduce its plain parameters.
    wrappers: list[ref[DistributedDataParallel]] = field(default_factory=list)
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
        """Return for each gradient 1 / (number of ranks with the same one); empty if all are 1."""
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


# --- who decides ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Alone:
    """The decision of one rank: it is the only one, or the other ranks have the same gradients."""

    # Whether this rank knows all losses; if not, its bad losses must not affect the scale.
    sees_all_losses: bool = True
    is_together: ClassVar[Literal[False]] = False

    def agree_on(self, scale: LossScale, found: Flags, *, has_gradients: bool = True) -> None:
        """Return None: what this rank has found holds. The methods are those of `Together`."""
        if not self.sees_all_losses:
            scale.agree_on_loss(None)


ALONE = Alone()


class Together:
    """The joint decision of several ranks."""

    is_together: Literal[True] = True

    def __init__(
        self, layout: Layout, call: str, has_scale: bool, next_number: Callable[[], int]
    ) -> None:
        self.group, self._layout, self.call = layout.group, layout, call
        self.has_scale = has_scale  # whether this rank has ever scaled a loss
        self.next_number = next_number  # of the scaler's agreements, equal on all ranks

    def agree_on(self, scale: LossScale, found: Flags, *, has_gradients: bool = True) -> Agreement:
        """Return the combined result of all ranks, which arrives asynchronously. Sync: none."""
        return Agreement(self, scale, found, has_gradients)

    def start_norm(
        self, norms: Norms, gradients: Gradients, device: torch.device
    ) -> Callable[[], Scalar]:
        """Start the sum of squares over all ranks; return a function that waits for it."""
        squares = norms.sum_of_squares(device, self._layout.shares(gradients)).reshape(1)
        values, purpose = to_device(squares, self.group.device), f"{self.call}: the norm"
        reduction = Reduction(self.group, values, distributed.ReduceOp.SUM, purpose)
        return lambda: scalar(to_device(reduction.wait(), device)[0])


class Agreement:
    """The combined result of all ranks, while it is reduced.

    Sync: none, except :meth:`verify`; on the CPU the first access waits for the other ranks.
    """

    def __init__(
        self, ranks: Together, scale: LossScale, found: Flags, has_gradients: bool
    ) -> None:
        self._ranks, self._loss_scale = ranks, scale
        self._has_gradients = has_gradients
        self._number = ranks.next_number()
        values = _values(ranks, scale, found, has_gradients)
        self._reduction: Reduction | None = Reduction(
            ranks.group, values, distributed.ReduceOp.MAX, f"{ranks.call}: found_inf"
        )
        self._vector: Tensor

    def vector(self) -> Tensor:
        """Return the maximum over the ranks, and pass the loss flag of all ranks to the scale."""
        if self._reduction is not None:
            values = self._reduction.wait()
            self._reduction = None
            self._vector = to_device(values, self._loss_scale.tensor.device)
            self._loss_scale.agree_on_loss(self._vector[BAD_LOSS] > 0)
        return self._vector

    def found_inf(self) -> Tensor:
        return self.vector()[FOUND].clamp(max=1).float()

    def first_rank(self) -> int | None:
        """Return the first rank whose loss was bad, else the first with inf or NaN. Sync: one."""
        found, bad_loss = self.vector()[[FOUND, BAD_LOSS]].tolist()
        code = found and (bad_loss or found)
        ranks = self._ranks.group.ranks
        return ranks[len(ranks) - code] if code else None

    def verify(self) -> None:
        """Raise if the ranks cannot continue together; checked only now and then.

        For steps that do not wait for the device: every CHECK_EVERY of them, and each step of a
        rank that cannot know whether any rank has work. Sync: one, when it checks.
        """
        is_due = self._number % CHECK_EVERY == 0
        # A rank that has both knows that there is work. Otherwise it checks; if no rank has, all
        # check.
        if is_due or not (self._has_gradients and self._ranks.has_scale):
            values = self.vector().tolist()
            self._require_work(values)
            if is_due:
                self._require_same(values)

    def require(self, values: list[int]) -> None:
        """Raise on all ranks if they cannot continue; ``values`` is :meth:`vector` on the host."""
        self._require_work(values)
        self._require_same(values)

    def _require_work(self, values: list[int]) -> None:
        if not values[HAS_SCALE]:
            raise CallOrderError(
                f"{self._ranks.call} before scale(): no rank has scaled a loss by this GradScaler "
                "yet. Call scaler.scale(loss).backward() first, on the ranks that have the loss"
            )
        if not values[HAS_GRADIENTS]:
            raise CallOrderError(
                f"{self._ranks.call}: no rank has a gradient. Call backward() before it and "
                "zero_grad() after it, or leave it out on all ranks"
            )

    def _require_same(self, values: list[int]) -> None:
        largest = values[NUM_FIRST : NUM_FIRST + NUM_SAME]
        least = [-value for value in values[NUM_FIRST + NUM_SAME :]]
        if largest != least:
            group = self._ranks.group
            raise RanksError(
                f"{self._ranks.call}: the ranks disagree on the scale, and no step was taken:\n"
                f"  rank {group.ranks[group.place]}: {describe(self._loss_scale.counters())}\n"
                f"  the least numbers of all ranks: {describe(least)}\n"
                f"  the largest: {describe(largest)}\n"
                "Cause: a checkpoint or update(new_scale=...) on some ranks only, another "
                "init_scale or schedule, or calls of the scaler that some ranks leave out.\n"
                "Cure: load the same state on all ranks; update(new_scale=...) with one number on "
                "all of them sets the scale, and load_state_dict() the counters too."
            )


def _values(ranks: Together, scale: LossScale, found_here: Flags, has_gradients: bool) -> Tensor:
    """Return this rank's findings for the others, an int32 vector. Sync: none."""
    group, device = ranks.group, scale.device
    found = any_of(found_here.values(), device) if found_here else torch.zeros((), device=device)
    # Earlier ranks send larger numbers, so the maximum identifies the first rank with a finding.
    flags = torch.stack([found, scale.loss_flag()])
    first = (flags * (len(group.ranks) - group.place)).int()
    same = scale.counters()
    known = [has_gradients, ranks.has_scale, *same, *(-number for number in same)]
    on_device = to_device(torch.tensor(known, dtype=torch.int32), device)
    return to_device(torch.cat([first, on_device]), group.device)


def describe(row: Sequence[int]) -> str:
    """Format the result of ``LossScale.counters`` for a message."""
    scale, tracker, taken, skipped = row
    return (
        f"scale {power(float32_from_bits(scale))}, growth tracker {tracker}, "
        f"{things(taken, 'step')} taken, {skipped} skipped"
    )


# --- which ranks ----------------------------------------------------------------------------------

CURE = (
    "Cure: say which ranks step together: "
    "halfstep.GradScaler(process_group=torch.distributed.group.WORLD), "
    "after init_process_group(), for all of them, or another process group; "
    "process_group='local' if this rank trains separately, or a DeviceMesh. halfstep.guard takes "
    "it too; halfstep run --guard has --guard-ranks=together and, for gradients that are averaged "
    "by hand and for ranks that train separately, --guard-ranks=alone. If gradients are averaged "
    "by hand, a GradScaler has scaler.replicated(model.parameters(), process_group) for their norm"
)

REDUCED = Alone(sees_all_losses=False)


class Ranks:
    """The ranks that decide the step of each optimizer; its argument is that of GradScaler."""

    def __init__(
        self, process_group: ProcessGroup | DeviceMesh | Literal["local"] | None = None
    ) -> None:
        self._is_local = process_group == "local"
        self._given = None if self._is_local else _given(process_group)
        # A Layout or Alone by first parameter, with a hash of all parameters.
        self._found = WeakTensorKeyDictionary()
        self._replicated = WeakTensorKeyDictionary()
        self._numbers = count()

    def replicated(self, params: Iterable[Tensor], process_group: ProcessGroup) -> None:
        """Record that plain parameters have the same gradients on all ranks of a group."""
        for param in params:
            self._replicated[param] = process_group
        self._found = WeakTensorKeyDictionary()

    def of(self, call: str, params: Sequence[Tensor], has_scale: bool) -> Alone | Together:
        """Return who decides about the gradients of parameters, cached by these. Sync: none."""
        if not has_ranks():
            return ALONE
        key = key_of(params)
        known, found = self._found.get(params[0], (None, None)) if params else (None, None)  # type: ignore[no-untyped-call]
        if found is None or known != key:
            found = self._find(call, params)
            if params:
                self._found[params[0]] = key, found
        if isinstance(found, Layout):
            found.require_all_ranks(call)
            return Together(found, call, has_scale, self._numbers.__next__)
        return found

    def _find(self, call: str, params: Sequence[Tensor]) -> Layout | Alone:
        meshes = {param.device_mesh for param in params if is_dtensor(param)}  # type: ignore[attr-defined]
        plain = [param for param in params if not is_dtensor(param)]
        sharing = _spread(list(meshes))
        reduced = {} if self._is_local or not plain else dict(reduced_by(plain))
        copies = {id(p): each for p in plain if (each := self._copies(p, reduced)) is not None}
        group = Group((), (distributed.get_rank(),)) if self._is_local else self._given
        trained = [p for p in plain if p.requires_grad or p.grad is not None]
        group = group or self._group(call, sharing, trained, reduced)
        if group is None:
            return REDUCED
        members = {each: distributed.get_process_group_ranks(each) for each in {*copies.values()}}
        concerned = set().union(() if sharing is None else sharing.ranks, *members.values())
        if not concerned <= set(group.ranks):
            raise RanksError(
                f"{call}: its parameters are spread over {at_steps(sorted(concerned), 'rank')}, "
                f"and the GradScaler was created for only {step_list(group.ranks)}.\n{CURE}"
            )
        if len(group.ranks) == 1:
            return ALONE
        sizes = {key: len(members[each]) for key, each in copies.items()}
        return Layout(group, sharing, sizes, list(map(ref, {*reduced.values()})))

    def _copies(
        self, param: Tensor, reduced: dict[int, DistributedDataParallel]
    ) -> ProcessGroup | None:
        declared: ProcessGroup | None = self._replicated.get(param)  # type: ignore[no-untyped-call]
        if declared is not None:
            return declared
        return reduced[id(param)].process_group if id(param) in reduced else None

    def _group(
        self,
        call: str,
        sharing: Group | None,
        plain: Sequence[Tensor],
        reduced: dict[int, DistributedDataParallel],
    ) -> Group | None:
        """Return the ranks that step together; None if each rank can decide alone."""
        num_ranks = distributed.get_world_size()
        if sharing is not None:
            if len(sharing.ranks) == num_ranks:
                return Group.world()
            raise RanksError(
                f"{call}: its DTensors are spread over {at_steps(sharing.ranks, 'rank')} of "
                f"{num_ranks}. Whether the others train the same model (stages of a pipeline) or "
                f"another one cannot be seen.\n{CURE}"
            )
        modules = {reduced.get(id(param)) for param in plain}
        if plain and None not in modules:
            groups = [distributed.get_process_group_ranks(m.process_group) for m in modules if m]
            if all(len(group) == num_ranks for group in groups):
                has_hook = any(has_comm_hook(module) for module in modules if module)
                return Group.world() if has_hook else None
        others = sum(1 for param in plain if id(param) not in reduced)
        what = (
            f"{others} of its {len(plain)} parameters are neither DTensors nor in a "
            "DistributedDataParallel"
            if others or not plain
            else "its DistributedDataParallel has only some of the ranks"
        )
        raise RanksError(
            f"{call}: there are {num_ranks} ranks, and {what}: nothing says which ranks step "
            f"together, and each would decide by its own gradients whether to step.\n{CURE}"
        )


def _given(process_group: Any) -> Group | None:
    if process_group is None:
        return None
    if distributed.is_available():
        if isinstance(process_group, distributed.ProcessGroup):
            return Group.of(process_group)
        if isinstance(process_group, distributed.device_mesh.DeviceMesh):
            return Group.of_mesh(process_group)
    raise TypeError(
        f"process_group is {process_group!r}: pass a torch.distributed.ProcessGroup on a rank that "
        "is in it, a DeviceMesh, or 'local'"
    )


def _spread(meshes: Sequence[DeviceMesh]) -> Group | None:
    """Return the union of the ranks of some meshes, None without any."""
    ranks = tuple(sorted({rank for mesh in meshes for rank in ranks_of(mesh)}))
    if not ranks:
        return None
    # Sorted, so that all ranks choose the same one: a set is unordered.
    wholes = sorted((mesh for mesh in meshes if mesh.size() == len(ranks)), key=lambda m: m.ndim)
    whole = next(iter(wholes), None)
    if whole is not None:
        return Group.of_mesh(whole)
    return Group.world() if len(ranks) == distributed.get_world_size() else Group((), ranks)
