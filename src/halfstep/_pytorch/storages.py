"""Tensor memory: its users, its streams, aliases, and the plain tensors that hold values."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from operator import attrgetter
from typing import Any, Generic, TypeVar

import torch
import torch.multiprocessing.reductions

from halfstep._pytorch import distributed, modes
from halfstep._pytorch.dispatch import callable_of
from halfstep._pytorch.modes import is_fake, no_torch_function

# (sparse tensor): the tensor of its values, below autograd, whether or not coalesced.
values_of_sparse: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor._values

# (storage): a number that identifies a memory while it lives; it may be reused afterwards.
number_of: Callable[[torch.UntypedStorage], int] = attrgetter("_cdata")


def is_used_once(tensor: torch.Tensor) -> bool:
    """Return whether only ``tensor`` uses its memory: no other tensor, array or storage object.

    Raw pointers are not detected.
    """
    return _users(tensor) == _ONE_USER


def _users(tensor: torch.Tensor) -> tuple[int, int]:
    """Return the use count of a tensor's memory, and the references to its storage object."""
    storage = tensor.untyped_storage()  # adds one use; all callers get the same object
    return torch._C._storage_Use_Count(storage._cdata), sys.getrefcount(storage)


_ONE_USER = _users(torch.empty(1))  # reference counts differ between Python versions


def has_data(tensor: torch.Tensor) -> bool:
    """Return whether a tensor has values that can be read."""
    return not (tensor.is_meta or is_fake(tensor) or tensor._is_zerotensor())


def number_of_memory(tensor: torch.Tensor) -> int | None:
    """Return :func:`number_of` the memory of a tensor, None if it has none of its own."""
    storage = _storage_of(tensor)
    return None if storage is None else number_of(storage)


def memory_of(tensor: torch.Tensor) -> Any:
    """Return a weak reference to the memory of a tensor, None if it has none of its own.

    While the reference exists, its ``cdata`` is unique. The memory is freed as usual; only its
    address is not reused.
    """
    storage = _storage_of(tensor)
    if storage is None:
        return None
    return torch.multiprocessing.reductions.StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def _storage_of(tensor: torch.Tensor) -> torch.UntypedStorage | None:
    if tensor.layout is torch.sparse_coo:
        tensor = tensor._values()
    try:
        if type(tensor) is torch.Tensor:  # the context takes longer than everything else
            return tensor.untyped_storage()
        with no_torch_function():
            return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):  # sparse, or a subclass made of other tensors
        return None


_Value = TypeVar("_Value")


class ByMemory(Generic[_Value]):
    """A mapping from memory, which views share, to values other than None.

    It keeps no memory alive. A tensor without its own memory has no value.
    """

    def __init__(self) -> None:
        self._items: dict[int, tuple[object, _Value]] = {}

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return self.get(tensor) is not None

    def get(self, tensor: torch.Tensor) -> _Value | None:
        number = number_of_memory(tensor) if self._items else None
        found = None if number is None else self._items.get(number)
        return None if found is None else found[1]

    def put(self, tensor: torch.Tensor, value: _Value) -> None:
        reference = memory_of(tensor)
        if reference is not None:
            self._items[reference.cdata] = (reference, value)

    def drop(self, tensor: torch.Tensor) -> None:
        number = number_of_memory(tensor) if self._items else None
        if number is not None:
            self._items.pop(number, None)

    def values(self) -> Iterator[_Value]:
        return (value for _, value in self._items.values())


def stream_of(tensor: torch.Tensor) -> int:
    """Return the current stream of the device of ``tensor``; 0 if the device has only one."""
    if tensor.is_cpu or tensor.is_mps:
        return 0
    if tensor.is_cuda:
        return int(torch._C._cuda_getCurrentRawStream(tensor.device.index))
    return int(torch.accelerator.current_stream(tensor.device).stream_id)


_unsafe_view = callable_of(torch.ops.aten._unsafe_view.default)


def computed_from(source: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return ``values`` as if they had been computed from ``source``, of the same shape.

    The gradient with respect to the result is cast to the dtype of ``source`` and passed to it.
    Nothing is copied, and a later write to ``source`` does not count as a write to the result.
    """
    # Autograd does not treat this alias as a view; the engine casts its gradient.
    stand_in: torch.Tensor = _unsafe_view(source, source.shape)
    stand_in.data = values
    return stand_in


# --- plain tensors of a tensor of any kind --------------------------------------------------------

_NOT_SUBCLASSED = torch.Tensor.__torch_dispatch__
_OF_TRACERS = ("FakeTensor", "FunctionalTensor", "ProxyTensor")


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the plain tensors that hold the values of a tensor; None if they are inaccessible.

    Inside of ``torch.func`` this is the wrapped tensor, with all samples of ``vmap``; for a DTensor
    the local part; for a sparse tensor its values; for a subclass the tensors named by
    ``__tensor_flatten__``. Call it inside of :func:`modes.outside_of_transforms`.
    """
    if modes.is_inside_functorch(tensor):
        return parts_of(torch._C._functorch.get_unwrapped(tensor))
    if tensor.is_meta or modes.is_fake(tensor):
        return None
    if distributed.is_dtensor(tensor):
        return parts_of(distributed.local_part(tensor))
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        inner = [parts_of(getattr(tensor, name)) for name in names]
        return [part for parts in inner if parts is not None for part in parts]
    if is_made_of_others(type(tensor)):
        return None
    if tensor.layout is torch.sparse_coo:
        return [tensor._values()]
    if tensor.layout is not torch.strided:
        is_compressed = "sparse" in str(tensor.layout)
        return [tensor.detach().values()] if is_compressed else None
    return [tensor.detach().values() if tensor.is_nested else tensor.detach()]


def is_made_of_others(cls: type) -> bool:
    """Return whether a class of tensors implements ops with ops on other tensors."""
    return (
        getattr(cls, "__torch_dispatch__", _NOT_SUBCLASSED) != _NOT_SUBCLASSED
        and cls.__name__ not in _OF_TRACERS
    )


def any_made_of_others(classes: Iterable[Any]) -> bool:
    """Return whether :func:`is_made_of_others` is true for any of several classes."""
    return any(cls is not torch.Tensor and is_made_of_others(cls) for cls in classes)
