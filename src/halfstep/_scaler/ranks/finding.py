"""Which ranks decide a step together: found from the parameters, or given by the user."""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep._pytorch.distributed import has_comm_hook, is_dtensor, names_left_out
from halfstep._scaler.ranks.comparing import StateComparison, require_same
from halfstep._scaler.ranks.deciding import ALONE, Alone, Together
from halfstep._scaler.ranks.group import Group, has_ranks, listed
from halfstep._scaler.ranks.sharding import Layout, spread
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from halfstep._scaler.loss_scale import LossScale

CURE = (
    "Cure: say which ranks step together: "
    "halfstep.GradScaler(process_group=torch.distributed.group.WORLD), "
    "after init_process_group(), for all of them, another process group, or device_mesh=...; or "
    "process_group='local' if this rank trains something of its own. If gradients are averaged by "
    "hand, scaler.replicated(model.parameters(), process_group) too, for their norm"
)

REDUCED = Alone(sees_all_losses=False)


@dataclass(frozen=True, eq=False)
class _Found:
    """Who decides for some parameters.

    Attributes:
        layout: Where they lie; None if this rank decides.
        alone: How it does then.
        of: Which parameters, and in which world, as a number.
    """

    layout: Layout | None
    alone: Alone
    of: int


class Ranks:
    """Finds who decides the step of an optimizer.

    Args:
        process_group: The ranks that step together; ``"local"`` for this one alone; None to find
            out from the parameters.
        device_mesh: The same as a mesh.

    Raises:
        TypeError: One of them is of the wrong kind.
        ValueError: Both are given, or this rank is in neither.
    """

    def __init__(
        self,
        process_group: ProcessGroup | Literal["local"] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self._is_local = process_group == "local"
        self._given = None if self._is_local else _given(process_group, device_mesh)
        self._found = WeakTensorKeyDictionary()  # by the first of the parameters
        self._replicated = WeakTensorKeyDictionary()
        self._numbers = count()
        self._comparison = StateComparison()
        self.is_to_compare = False

    def replicated(self, params: Iterable[Tensor], process_group: ProcessGroup) -> None:
        """Take note that plain parameters have the same gradients on all ranks of a group."""
        for param in params:
            self._replicated[param] = process_group
        self._found = WeakTensorKeyDictionary()

    def of(
        self, call: str, params: Sequence[Tensor], losses: Sequence[str | None], has_scale: bool
    ) -> Alone | Together:
        """Return who decides what becomes of the gradients of some parameters. Sync: none.

        Args:
            call: What asks, for messages: ``step(SGD)``.
            params: The parameters. What is found of them is remembered.
            losses: The names of the losses of this iteration.
            has_scale: Whether this rank has ever scaled a loss.

        Raises:
            RanksError: There are several ranks, and nothing says which of them step together.
        """
        if not has_ranks():
            return ALONE
        of = hash((id(distributed.group.WORLD), *map(id, params)))
        found: _Found | None = self._found.get(params[0]) if params else None  # type: ignore[no-untyped-call]
        if found is None or found.of != of:
            found = _Found(*self._find(call, params), of)
            if params:
                self._found[params[0]] = found
        if found.layout is None:
            self.is_to_compare |= found.alone is REDUCED
            return found.alone
        return Together(found.layout, call, losses, has_scale, lambda: next(self._numbers))

    def count_update(self, scales: Mapping[str | None, LossScale]) -> None:
        """Count an update: ranks that decide alone compare their states now and then. Sync: none.

        Raises:
            RanksError: On all ranks, if one had another state. It says who had what.
        """
        if has_ranks():
            self.is_to_compare = False
            self._comparison.count_update(scales)

    def require_same(self, call: str, state: dict[str, Any], asking: ProcessGroup) -> None:
        """Compare a saved state with those of the ranks that save it, all of which call this.

        Raises:
            RanksError: On all ranks, if one has another state. It says who has what.
        """
        if not self._is_local and has_ranks():
            require_same(Group.of(asking), call, state)

    def _find(self, call: str, params: Sequence[Tensor]) -> tuple[Layout | None, Alone]:
        meshes = {param.device_mesh for param in params if is_dtensor(param)}  # type: ignore[attr-defined]
        plain = [param for param in params if not is_dtensor(param)]
        sharing = spread(list(meshes))
        reduced = {} if self._is_local or not plain else dict(_reduced(plain))
        copies = {id(p): each for p in plain if (each := self._copies(p, reduced)) is not None}
        group = Group((), (distributed.get_rank(),)) if self._is_local else self._given
        trained = [p for p in plain if p.requires_grad or p.grad is not None]
        group = group or self._group(call, sharing, trained, reduced)
        if group is None:
            return None, REDUCED
        members = {each: distributed.get_process_group_ranks(each) for each in {*copies.values()}}
        concerned = set().union(() if sharing is None else sharing.ranks, *members.values())
        if not concerned <= set(group.ranks):
            raise RanksError(
                f"{call}: its parameters are spread over the ranks {listed(sorted(concerned))}, "
                f"and the GradScaler was told that {listed(group.ranks)} step together.\n{CURE}"
            )
        if len(group.ranks) == 1:
            return None, ALONE
        sizes = {key: len(members[each]) for key, each in copies.items()}
        return Layout(group, sharing, sizes), ALONE

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
        """Return the ranks that step together; None if this one decides for all.

        Raises:
            RanksError: That cannot be known.
        """
        num_ranks = distributed.get_world_size()
        if sharing is not None:
            if len(sharing.ranks) == num_ranks:
                return Group.world()
            raise RanksError(
                f"{call}: its DTensors are spread over the ranks {listed(sharing.ranks)} of "
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
            "together, and each would decide by its own gradients whether to step, and at which "
            f"scale to go on.\n{CURE}"
        )


def _given(process_group: Any, device_mesh: Any) -> Group | None:
    if process_group is None and device_mesh is None:
        return None
    if process_group is not None and device_mesh is not None:
        raise ValueError("GradScaler(process_group=..., device_mesh=...): pass one of them")
    if process_group is not None:
        if not (distributed.is_available() and isinstance(process_group, distributed.ProcessGroup)):
            raise TypeError(
                f"process_group is {process_group!r}: pass a torch.distributed.ProcessGroup on a "
                "rank that is in it, or 'local'"
            )
        return Group.of(process_group)
    if not isinstance(device_mesh, distributed.device_mesh.DeviceMesh):
        raise TypeError(f"device_mesh is {device_mesh!r}: pass a DeviceMesh")
    return Group.of_mesh(device_mesh)


def _reduced(params: Sequence[Tensor]) -> Iterator[tuple[int, DistributedDataParallel]]:
    """Yield the ids of the parameters that some DistributedDataParallel reduces, and which one."""
    wanted = set(map(id, params))
    # PyTorch keeps no list of them. Once for each optimizer, some 50 ms for a million objects.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), DistributedDataParallel):
            module = vars(candidate).get("_modules", {}).get("module")
            if module is None:
                continue  # its constructor has raised
            left_out = names_left_out(candidate)
            for name, param in module.named_parameters():
                if id(param) in wanted and name not in left_out:
                    yield id(param), candidate
