"""Discovery of the ranks that decide a step together, and of where its gradients lie."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep._pytorch.distributed import (
    has_comm_hook,
    is_dtensor,
    reduced_by,
    spec_of,
)
from halfstep._scaler.ranks.agreement import ALONE, Alone, Together
from halfstep._scaler.ranks.group import Group, has_ranks, listed, ranks_of
from halfstep._scaler.ranks.state_comparison import StateComparison, require_same
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    from halfstep._scaler.gradients import Gradients
    from halfstep._scaler.loss_scale import LossScale

CURE = (
    "Cure: say which ranks step together: "
    "halfstep.GradScaler(process_group=torch.distributed.group.WORLD), "
    "after init_process_group(), for all of them, or another process group; "
    "process_group='local' if this rank trains something of its own. halfstep.guard takes it too. "
    "A GradScaler also takes device_mesh=... and, if gradients are averaged by hand, "
    "scaler.replicated(model.parameters(), process_group) for their norm"
)

REDUCED = Alone(sees_all_losses=False)


@dataclass(eq=False)
class Layout:
    """Where the parameters of one optimizer lie.

    Attributes:
        group: The ranks that decide its steps.
        sharing: The ranks that its DTensors are spread over, all together; None without any.
        copies: For plain parameters, by id, on how many ranks their gradients are the same.
    """

    group: Group
    sharing: Group | None
    copies: dict[int, int] = field(default_factory=dict)

    # By the id of a spec, with the spec, so that no other one takes over the id.
    _by_spec: dict[int, tuple[Any, float]] = field(default_factory=dict, init=False, repr=False)

    @property
    def num_sharing(self) -> int:
        """Number of ranks that hold a part or a copy of the same parameters."""
        return 1 if self.sharing is None else len(self.sharing.ranks)

    def shares(self, gradients: Gradients) -> list[float]:
        """Return for each gradient one over the number of ranks of the group with the same.

        Nothing if each is this rank's alone.
        """
        if self.sharing is None and not self.copies:
            return []
        pairs = zip(gradients.params, gradients.grads, strict=True)
        return [self._share(param, grad) for param, grad in pairs]

    def owns_all(self, gradients: Gradients) -> bool:
        """Return whether all gradients, as far as is known, are this rank's alone."""
        return self.sharing is None and not any(id(p) in self.copies for p in gradients.params)

    def _share(self, param: Tensor, grad: Tensor) -> float:
        spec = spec_of(grad)
        if spec is None:
            # Beside DTensors a plain parameter is one that tensor parallel has left as it was.
            return 1.0 / max(self.copies.get(id(param), 1), self.num_sharing)
        if spec is not spec_of(param):
            return 1.0 / self._copies_of(grad)  # made for this gradient alone
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
        # One that lies on a part of the mesh of others is the same on its other parts.
        num_ranks: int = mesh.size()
        return copies * self.num_sharing / num_ranks


class Ranks:
    """Finds who decides the step of an optimizer.

    Args:
        process_group: The ranks that step together; ``"local"`` for this one alone; None to find
            out from the parameters.
        device_mesh: The same as a mesh.
    """

    def __init__(
        self,
        process_group: ProcessGroup | Literal["local"] | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self._is_local = process_group == "local"
        self._given = None if self._is_local else _given(process_group, device_mesh)
        # Layout or Alone by the first of the parameters, with a number for all of them.
        self._found = WeakTensorKeyDictionary()
        self._replicated = WeakTensorKeyDictionary()
        self._numbers = count()
        self._comparison = StateComparison()
        self.is_to_compare = False

    def replicated(self, params: Iterable[Tensor], process_group: ProcessGroup) -> None:
        """Remember that plain parameters have the same gradients on all ranks of a group."""
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
        """
        if not has_ranks():
            return ALONE
        key = hash((id(distributed.group.WORLD), *map(id, params)))
        known, found = self._found.get(params[0], (None, None)) if params else (None, None)  # type: ignore[no-untyped-call]
        if found is None or known != key:
            found = self._find(call, params)
            if params:
                self._found[params[0]] = key, found
        if isinstance(found, Layout):
            return Together(found, call, losses, has_scale, self._numbers.__next__)
        self.is_to_compare |= found is REDUCED
        return found

    def count_update(self, scales: Mapping[str | None, LossScale]) -> None:
        """Count an update; ranks that decide alone compare their states now and then. No sync."""
        if has_ranks():
            self.is_to_compare = False
            self._comparison.count_update(scales)

    def require_same(self, call: str, state: dict[str, Any], asking: ProcessGroup) -> None:
        """Compare a saved state with those of the ranks that save it, all of which call this."""
        if not self._is_local and has_ranks():
            require_same(Group.of(asking), call, state)

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
                f"{call}: its parameters are spread over the ranks {listed(sorted(concerned))}, "
                f"and the GradScaler was told that {listed(group.ranks)} step together.\n{CURE}"
            )
        if len(group.ranks) == 1:
            return ALONE
        sizes = {key: len(members[each]) for key, each in copies.items()}
        return Layout(group, sharing, sizes)

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
        """Return the ranks that step together; None if this one decides for all."""
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
            f"together, and each would decide by its own gradients whether to step.\n{CURE}"
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


def _spread(meshes: Sequence[DeviceMesh]) -> Group | None:
    """Return the ranks of some meshes together, None without any."""
    ranks = tuple(sorted({rank for mesh in meshes for rank in ranks_of(mesh)}))
    if not ranks:
        return None
    # Of several the same on all ranks, whatever the order of a set.
    wholes = sorted((mesh for mesh in meshes if mesh.size() == len(ranks)), key=lambda m: m.ndim)
    whole = next(iter(wholes), None)
    if whole is not None:
        return Group.of_mesh(whole)
    return Group.world() if len(ranks) == distributed.get_world_size() else Group((), ranks)
