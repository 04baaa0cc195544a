"""torch.distributed: process groups, DTensors, and what wraps a model for several ranks.

None of it is imported here; what a program has not imported, it does not use.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from halfstep._pytorch.compiler import keep_out_of_graphs


def default_store() -> Any:
    """Return the store through which the ranks of this job have found each other."""
    return torch.distributed.distributed_c10d._get_default_store()


def exchange_device(process_group: torch.distributed.ProcessGroup) -> torch.device:
    """Return where the ranks of a group exchange small tensors: the same kind on all of them.

    An accelerator if the group has a backend for it that is not that of the CPU, else the CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator in process_group._device_types:
        cpu = torch.device("cpu")
        own = process_group._get_backend(accelerator).name()
        types = process_group._device_types
        if cpu not in types or process_group._get_backend(cpu).name() != own:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def saving_group() -> torch.distributed.ProcessGroup | None:
    """Return the ranks on which torch.distributed.checkpoint asks for states to save now.

    None if it does not, or on one rank only. It tells nobody; the arguments of its ``save`` do.
    """
    frame: Any = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict_saver":
            arguments = frame.f_locals
            if "process_group" in arguments and "no_dist" in arguments:
                world = None if arguments["no_dist"] else torch.distributed.group.WORLD
                return world and (arguments["process_group"] or world)
        frame = frame.f_back
    return None


def is_dtensor(value: object) -> bool:
    """Return whether ``value`` is a DTensor, without importing what defines them."""
    return type(value) is not torch.Tensor and is_dtensor_class(type(value))


def is_dtensor_class(kind: type) -> bool:
    """Return whether the tensors of a class are DTensors."""
    module: Any = sys.modules.get("torch.distributed.tensor")  # else there are none
    return issubclass(kind, getattr(module, "DTensor", ()))


def has_dtensors(tensors: Iterable[torch.Tensor]) -> bool:
    """Return whether there are DTensors among these. Thousands are asked in one go."""
    return any(map(is_dtensor_class, set(map(type, tensors))))


def local_part(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a DTensor; another tensor as it is. No collective.

    It shares memory with the DTensor and is below autograd.
    """
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    local: torch.Tensor = tensor._local_tensor  # to_local() takes 20 times longer
    # The result of a collective that may be under way.
    return local if type(local) is torch.Tensor or not hasattr(local, "wait") else local.wait()


def spec_of(tensor: Any) -> Any:
    """Return the value that says where a DTensor lies, None for another tensor.

    DTensors with the same one lie on the same ranks in the same way.
    """
    return getattr(tensor, "_spec", None)


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


def placed_like(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return what makes of this rank's part a whole tensor that lies on the ranks as ``tensor``."""
    if not is_dtensor(tensor):
        return lambda local: local
    cls: Any = type(tensor)
    spec = tensor._spec  # type: ignore[attr-defined]
    return lambda local: cls(local, spec, requires_grad=False)


def in_place_of(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """Return this rank's part, of any dtype, as a whole tensor that lies as ``tensor`` does.

    Unlike :func:`placed_like`, whose tensors are thought to be of the dtype of ``tensor``: what is
    computed with this one is of its own dtype.
    """
    if not is_dtensor(tensor):
        return local
    shape, stride = tensor.shape, tensor.stride()
    placements, mesh = tensor.placements, tensor.device_mesh
    whole: torch.Tensor = type(tensor).from_local(
        local, mesh, placements, run_check=False, shape=shape, stride=stride
    )
    return whole


class Swap:
    """A parameter that is another tensor for a while, of any dtype: data, gradient, version.

    It stays the same Python object. What autograd keeps of it is left alone, too: assigned to
    ``param.data``, a tensor of another dtype would make PyTorch forget the node that accumulates
    its gradient, and so the hooks there, by which DistributedDataParallel reduces gradients.
    ``other`` is a leaf that nothing else knows; it is the parameter meanwhile.
    """

    __slots__ = ("_id", "_own", "other", "param")

    def __init__(self, param: Any, other: Any) -> None:
        self.param, self.other = param, other
        self._id: int = param._cdata
        self._own = (param._local_tensor, param._spec) if is_dtensor(param) else None

    def is_made(self) -> bool:
        """Return whether the parameter is the other tensor."""
        made: bool = self.param._cdata != self._id
        return made

    @keep_out_of_graphs
    def make(self) -> None:
        """Let it be the other tensor. Interrupted, it is wholly so or can be undone."""
        if self._own is not None:
            self.param._local_tensor = self.other._local_tensor
            self.param._spec = self.other._spec
        torch._C._swap_tensor_impl(self.param, self.other)

    @keep_out_of_graphs
    def undo(self) -> None:
        """Let it be itself, whether it is already or not."""
        if self.is_made():
            torch._C._swap_tensor_impl(self.param, self.other)
        if self._own is not None:
            self.param._local_tensor, self.param._spec = self._own


def shard_name(tensor: Any) -> str:
    """Return a name for the part of a DTensor that this rank has, "" for what all ranks have.

    Ranks with the same name have the same parts of all tensors whose parts have that name.
    """
    if not is_dtensor(tensor):
        return ""
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or range(mesh.ndim)
    return " ".join(
        f"{names[dim]}={mesh.get_local_rank(dim)}"
        for dim, place in enumerate(tensor.placements)
        if not place.is_replicate()  # is_shard() leaves out strided ones
    )


def has_process_group() -> bool:
    """Return whether this process is one of several that work together, or may be.

    As ``torch.distributed.is_initialized()``, but with one call in place of four.
    """
    return _c10d is not None and _c10d._world._default_pg is not None


_c10d: Any = getattr(torch.distributed, "distributed_c10d", None)


def has_ranks() -> bool:
    """Return whether this process is one of several."""
    return has_process_group() and torch.distributed.get_world_size() > 1


def gathered_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype in which fully_shard gathers a module's parameters, None for their own."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # else nothing is sharded
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
    return dtype


class _BucketsAsTheyAre:
    """The reducer of a DistributedDataParallel, which makes its buckets anew at another time."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def keep_buckets(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let forward passes not ask the other ranks for the order of buckets, as the second one does.

    Until the attribute ``reducer`` is put back.
    """
    module.reducer = _BucketsAsTheyAre(module.reducer)  # type: ignore[assignment]


def wrapped_by(module: torch.nn.parallel.DistributedDataParallel) -> torch.nn.Module | None:
    """Return what a DistributedDataParallel wraps; None if its constructor has raised."""
    wrapped: torch.nn.Module | None = vars(module).get("_modules", {}).get("module")
    return wrapped


def has_comm_hook(module: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether the gradients are reduced by a function of the user's."""
    return bool(module._comm_hooks)


def reduce_in_float32(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Let all gradients of a DistributedDataParallel be float32. A collective of its ranks.

    Raises:
        ValueError: It keeps the buckets that it has made, in the dtypes of its parameters.
    """
    if module.find_unused_parameters and not module.static_graph:
        raise ValueError(
            "the gradients of a DistributedDataParallel with find_unused_parameters=True must have "
            "the dtypes of its parameters: leave that out, or pass static_graph=True"
        )
    reducer: Any = module.reducer
    reducer._set_mixed_precision_param_dtype(torch.float32)
    # Buckets are of that dtype once they are made anew; and again after a backward pass, in whose
    # order they shall be.
    reducer._reset_state()
    reducer._push_all_rebuilt_params()
    is_rebuilt = reducer._rebuild_buckets()
    assert is_rebuilt
    reducer._reset_state()


def names_left_out(module: torch.nn.parallel.DistributedDataParallel) -> set[str]:
    """Return the names of parameters whose gradients DistributedDataParallel leaves alone."""
    names: set[str] = module.parameters_to_ignore
    return names


def reduced_by(
    params: Sequence[torch.Tensor],
) -> Iterator[tuple[int, torch.nn.parallel.DistributedDataParallel]]:
    """Yield the ids of the parameters that some DistributedDataParallel reduces, and which one."""
    wanted = set(map(id, params))
    # PyTorch keeps no list of them. Once for each optimizer, some 50 ms for a million objects.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.nn.parallel.DistributedDataParallel):
            module = wrapped_by(candidate)
            if module is None:
                continue  # its constructor has raised
            left_out = names_left_out(candidate)
            for name, param in module.named_parameters():
                if id(param) in wanted and name not in left_out:
                    yield id(param), candidate
