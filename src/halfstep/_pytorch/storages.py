"""The memory of tensors: its owners, its streams, and aliases of it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch
import torch.multiprocessing.reductions

from halfstep._pytorch.dispatch import callable_of
from halfstep._pytorch.modes import no_torch_function

# (sparse tensor): the tensor that holds its values, below autograd and whether coalesced or not.
values_of_sparse: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values


def is_used_once(tensor: torch.Tensor) -> bool:
    """Return whether nothing but ``tensor`` has its memory: no tensor, no array, no storage object.

    Not seen are raw pointers.
    """
    return _users(tensor) == _ONE_USER


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the owners of the memory of a tensor, and the references to its storage object."""
    storage = tensor.untyped_storage()  # one owner more, and one object for all who ask
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ONE_USER = _users(torch.empty(1))  # how references are counted differs between Pythons


def number_of(storage: torch.UntypedStorage) -> int:
    """Return what tells a memory from all other while it lives; later another may have it."""
    return int(storage._cdata)


def number_of_memory(tensor: torch.Tensor) -> int | None:
    """Return :func:`number_of` the memory of a tensor, None if it has none of its own."""
    storage = _storage_of(tensor)
    return None if storage is None else number_of(storage)


def memory_of(tensor: torch.Tensor) -> Any:
    """Return a weak reference to the memory of a tensor, None if it has none of its own.

    Its ``cdata`` tells the memory from all other while the reference is held. The memory is freed
    as always; only its address is not used again.
    """
    storage = _storage_of(tensor)
    if storage is None:
        return None
    return torch.multiprocessing.reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    try:
        if type(tensor) is torch.Tensor:  # the context takes longer than all else
            return tensor.untyped_storage()
        with no_torch_function():
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass that has parts
        return None


_Value = TypeVar("_Value")


class ByMemory(Generic[_Value]):
    """Values, none of them None, by the memory of tensors, which views share.

    It keeps no memory alive. A tensor without memory of its own has no value.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[object, _Value]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.get(tensor) is not None

    def get(self, tensor: torch.Tensor) -> _Value | None:
        """Return the value for the memory of a tensor."""
        number = number_of_memory(tensor) if self._items else None
        found = None if number is None else self._items.get(number)
        return None if found is None else found[1]

    def put(self, tensor: torch.Tensor, value: _Value) -> None:
        """Set the value for the memory of a tensor."""
        reference = memory_of(tensor)
        if reference is not None:
            self._items[reference.cdata] = (reference, value)

    def drop(self, tensor: torch.Tensor) -> None:
        """Forget the value for the memory of a tensor, if there is one."""
        number = number_of_memory(tensor) if self._items else None
        if number is not None:
            self._items.pop(number, None)

    def values(self) -> Iterator[_Value]:
        """Yield all values, in the order in which memories came."""
        return (value for _, value in self._items.values())


def stream_of(tensor: torch.Tensor) -> int:
    """Return the current stream of the device of ``tensor``; 0 where there is one only."""
    if tensor.is_cpu or tensor.is_mps:
        return 0
    if tensor.is_cuda:
        return int(torch._C._cuda_getCurrentRawStream(tensor.device.index))
    return int(torch.accelerator.current_stream(tensor.device).stream_id)


_unsafe_view = callable_of(torch.ops.aten._unsafe_view.default)


def in_place_of(source: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as if they had been computed from ``source``, of the same shape.

    The gradient with respect to the result, cast to the dtype of ``source``, goes to ``source``.
    Neither is copied, and a later write to ``source`` does not count as one to the result.
    """
    # The alias is one that autograd does not take for a view; the engine casts its gradient.
    stand_in: torch.Tensor = _unsafe_view(source, source.shape)
    stand_in.data = values
    return stand_in
