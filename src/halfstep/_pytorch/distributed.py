"""torch.distributed: process groups, DTensors and wrappers of models.

None of it is imported here: a program that has not imported it does not use it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from operator import attrgetter
from typing import Any

import torch

from halfstep._pytorch.compiler import keep_out_of_graphs


def exchange_device(process_group: torch.distributed.ProcessGroup) -> torch.device:
    """Return the device on which a group exchanges small tensors, of the same type on all ranks.

    It is an accelerator if the group has a backend for it other than the CPU's, else the CPU.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None and accelerator in process_group._device_types:
        cpu = torch.device("cpu")
        own = process_group._get_backend(accelerator).name()
        types = process_group._device_types
        if cpu not in types or process_group._get_backend(cpu).name() != own:
            return torch.device(accelerator.type, torch.accelerator.current_device_index())
    return torch.device("cpu")


def is_dtensor(value: object) -> bool:
    """Return whether ``value`` is a DTensor, without importing DTensor."""
    if type(value) is torch.Tensor:
        return False
    module: Any = sys.modules.get("torch.distributed.tensor")  # else there are none
    return issubclass(type(value), getattr(module, "DTensor", ()))


def local_part(tensor: Any) -> torch.Tensor:
    """Return the local part of a DTensor; any other tensor unchanged. No collective.

    The result shares memory with the DTensor and is below autograd.
    """
    if not is_dtensor(tensor):
        return tensor  # type: ignore[no-any-return]
    local: torch.Tensor = tensor._local_tensor  # to_local() takes 20 times longer
    # It may be the result of a collective in flight.
    return local if type(local) is torch.Tensor or not hasattr(local, "wait") else local.wait()


def spec_of(tensor: Any) -> Any:
    """Return the value that describes the layout of a DTensor, None for another tensor.

    DTensors with the same spec are spread over the same ranks in the same way.
    """
    return getattr(tensor, "_spec", None)


def reduce_partial(param: Any, grad: Any) -> Any:
    """Return a DTensor gradient with final entries, by adding up partial placements.

    Tensor parallelism leaves partial gradients for parameters that are replicated on its ranks.
    Each one takes a collective.
    """
    if spec_of(grad) is spec_of(param) or not any(place.is_partial() for place in grad.placements):
        return grad
    from torch.distributed.tensor import Replicate

    placements = [Replicate()] * grad.device_mesh.ndim
    if is_dtensor(param) and param.device_mesh == grad.device_mesh:
        placements = param.placements
    with torch.no_grad():
        return grad.redistribute(placements=placements)


def in_place_of(tensor: Any, local: torch.Tensor) -> torch.Tensor:
    """Return a local part, of any dtype, as a DTensor with the layout of ``tensor``.

    It has the dtype of the local part, and so do results computed from it.
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
    """A temporary exchange of a parameter's data, gradient and version for another tensor's.

    The parameter stays the same Python object, and autograd's data about it is unaffected. In
    contrast, assigning a tensor of another dtype to ``param.data`` makes PyTorch discard the node
    that accumulates its gradient, with its hooks, through which DistributedDataParallel reduces
    gradients. ``other`` is a leaf without other references; during the exchange it holds the
    parameter's contents.
    """

    __slots__ = ("_id", "_own", "other", "param")

    def __init__(self, param: Any, other: Any) -> None:
        self.param, self.other = param, other
        self._id: int = param._cdata
        self._own = (param._local_tensor, param._spec) if is_dtensor(param) else None

    def is_made(self) -> bool:
        return bool(self.param._cdata != self._id)

    @keep_out_of_graphs
    def make(self) -> None:
        """Exchange the contents. If interrupted, the exchange is complete or can be undone."""
        if self._own is not None:
            self.param._local_tensor = self.other._local_tensor
            self.param._spec = self.other._spec
        torch._C._swap_tensor_impl(self.param, self.other)

    @keep_out_of_graphs
    def undo(self) -> None:
        """Undo the exchange, if it is in effect."""
        if self.is_made():
            torch._C._swap_tensor_impl(self.param, self.other)
        if self._own is not None:
            self.param._local_tensor, self.param._spec = self._own


_c10d: Any = getattr(torch.distributed, "distributed_c10d", None)

# (): the process group of all ranks, None without one; in a step, so without a call in Python.
default_group: Callable[[], Any] = (
    partial(attrgetter("_world._default_pg"), _c10d) if _c10d else lambda: None
)


def has_process_group() -> bool:
    """Return whether this process may be one of several that work together."""
    return default_group() is not None


def key_of(params: Iterable[torch.Tensor]) -> int:
    """Return a number that changes with the parameters, their order, and the ranks of the job."""
    return hash((id(default_group()), *map(id, params)))


def world() -> torch.distributed.ProcessGroup:
    """Return the process group of all ranks, where there is one."""
    group: torch.distributed.ProcessGroup = torch.distributed.distributed_c10d._get_default_group()
    return group


def has_ranks() -> bool:
    return has_process_group() and torch.distributed.get_world_size() > 1


def gathered_dtype(module: Any) -> torch.dtype | None:
    """Return the dtype in which fully_shard gathers a module's parameters, None for their own."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")  # else nothing is sharded
    if fsdp is None or not isinstance(module, fsdp.FSDPModule):
        return None
    dtype: torch.dtype | None = module._get_fsdp_state()._mp_policy.param_dtype
    return dtype


class _BucketsAsTheyAre:
    """A DistributedDataParallel reducer that does not rebuild its buckets."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)


def keep_buckets(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Stop forward passes from rebuilding buckets, a collective, as the second one does.

    To undo it, restore the attribute ``reducer``.
    """
    module.reducer = _BucketsAsTheyAre(module.reducer)  # type: ignore[assignment]


def has_comm_hook(module: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a user's function reduces the gradients."""
    return bool(module._comm_hooks)


def may_end_early(module: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether ranks in ``module.join()`` go on without those that have no more batches.

    PyTorch does not reset this at the end of the context; ``module.join(enable=False)`` does.
    """
    config = module._join_config
    return config.enable and not config.throw_on_early_termination


def reduce_in_float32(module: torch.nn.parallel.DistributedDataParallel) -> None:
    """Make all gradients of a DistributedDataParallel float32. A collective of its ranks.

    Raises:
        ValueError: Its buckets are fixed, with the dtypes of its parameters.
    """
    if module.find_unused_parameters and not module.static_graph:
        raise ValueError(
            "the gradients of a DistributedDataParallel with find_unused_parameters=True must have "
            "the dtypes of its parameters: leave that out, or pass static_graph=True"
        )
    reducer: Any = module.reducer
    reducer._set_mixed_precision_param_dtype(torch.float32)
    # Rebuilding applies the dtype to the buckets. They must be rebuilt again after a backward pass,
    # in its order.
    reducer._reset_state()
    reducer._push_all_rebuilt_params()
    is_rebuilt = reducer._rebuild_buckets()
    assert is_rebuilt
    reducer._reset_state()
    # The reducer has forgotten an earlier forward pass. The next one that leads to a reduction
    # replaces this value, which is as true, by True.
    module.require_forward_param_sync = 1  # type: ignore[assignment]


def lacks_forward(module: torch.nn.parallel.DistributedDataParallel) -> bool:
    """Return whether a backward pass now would wrongly reduce nothing.

    Its forward pass then came before :func:`reduce_in_float32`, or was one of the wrapped module.
    """
    return module.require_backward_grad_sync and type(module.require_forward_param_sync) is int


# (module): the names of parameters whose gradients a DistributedDataParallel ignores.
names_left_out: Callable[[Any], set[str]] = attrgetter("parameters_to_ignore")


def reduced_by(
    params: Sequence[torch.Tensor],
) -> Iterator[tuple[int, torch.nn.parallel.DistributedDataParallel]]:
    """Yield the ids of parameters that a DistributedDataParallel reduces, with that module."""
    wanted = set(map(id, params))
    # PyTorch keeps no list of them. Once for each optimizer, some 50 ms for a million objects.
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.nn.parallel.DistributedDataParallel):
            module = vars(candidate).get("_modules", {}).get("module")
            if module is None:
                continue  # its constructor raised
            left_out = names_left_out(candidate)
            for name, param in module.named_parameters():
                if id(param) in wanted and name not in left_out:
                    yield id(param), candidate
