"""Where gradients lie: what this rank holds of a DTensor, and on how many ranks it is the same."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from halfstep._pytorch.distributed import is_dtensor, is_dtensor_class, spec_of
from halfstep._scaler.ranks.group import Group, ranks_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from halfstep._scaler.gradients import Gradients


def has_dtensors(tensors: Iterable[Tensor]) -> bool:
    """Say whether there are DTensors among these. Thousands are asked in one go."""
    return any(map(is_dtensor_class, set(map(type, tensors))))


def settle(param: Any, grad: Any) -> Any:
    """Return a gradient, a DTensor, whose entries are final: each rank of some holds a summand.

    Tensor parallel leaves such gradients of parameters that all its ranks have. One collective for
    each of them.
    """
    if spec_of(grad) is spec_of(param) or not any(place.is_partial() for place in grad.placements):
        return grad
    from torch.distributed.tensor import Replicate

    placements = [Replicate()] * grad.device_mesh.ndim
    if is_dtensor(param) and param.device_mesh == grad.device_mesh:
        placements = param.placements
    with torch.no_grad():
        return grad.redistribute(placements=placements)


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
        """Say whether all gradients, as far as is known, are this rank's alone."""
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


def spread(meshes: Sequence[DeviceMesh]) -> Group | None:
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
