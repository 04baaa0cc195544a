"""The ranks that decide a step together, and the layout of their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import count
from typing import TYPE_CHECKING, Any, Literal
from weakref import ref

from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep._common.numbers import at_steps, step_list
from halfstep._pytorch.distributed import (
    has_comm_hook,
    has_ranks,
    is_dtensor,
    key_of,
    reduced_by,
)
from halfstep._scaler.agreement import ALONE, Alone, Group, Layout, Together, ranks_of
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

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
        self,
        process_group: ProcessGroup | DeviceMesh | Literal["local"] | None = None,
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
        """Return who decides about the gradients of some parameters. Sync: none.

        The result is cached by parameters. Error messages name ``call``, such as ``step(SGD)``.
        ``has_scale``: whether this rank has ever scaled a loss.
        """
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
