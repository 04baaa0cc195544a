"""Memory of the simulated device.

A storage of the device lies at the address of a CPU storage, its attribute ``_host``.
"""

from __future__ import annotations

import ctypes
import functools
from typing import Any

import torch
from tests.simulated.state import CPU, CPU_KEYS, NAME, Now, indexed, refuse
from torch import Tensor, UntypedStorage

_aten = torch.ops.aten


@functools.cache
def _seed(index: int, dtype: torch.dtype) -> Tensor:
    """Return an empty tensor of a device, of which others are made."""
    # DLPack is the only way to a tensor of a device other than the first: write the device, after
    # the address of the data, into what is passed on.
    capsule = torch.utils.dlpack.to_dlpack(torch.empty(0, device="cpu"))
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    address = pointer(capsule, b"dltensor") + ctypes.sizeof(ctypes.c_void_p)
    (ctypes.c_int32 * 2).from_address(address)[:] = [12, index]  # kDLExtDev
    tensor = torch._C._from_dlpack(capsule)
    return _aten.view.dtype.redispatch(CPU_KEYS, tensor, dtype)


def host_storage(storage: UntypedStorage) -> UntypedStorage:
    if not hasattr(storage, "_host"):  # made by PyTorch of an address, as when pickling
        address, size = storage.data_ptr(), storage.nbytes()
        storage._host = torch._C._construct_storage_from_data_pointer(address, CPU, size)
    return storage._host


def storage_at(host: UntypedStorage, device: torch.device) -> UntypedStorage:
    storage = torch._C._construct_storage_from_data_pointer(host.data_ptr(), device, host.nbytes())
    storage._host = host  # lives as long as the storage: PyTorch keeps its Python object
    return storage


def new_storage(cls: type, *args: Any, device: Any = None, **kwargs: Any) -> UntypedStorage:
    """Stand in for the constructor of ``UntypedStorage``, which for a device in Python crashes."""
    if device is None or torch.device(device).type != NAME:
        return torch._C.StorageBase.__new__(cls, *args, device=device, **kwargs)
    host = torch._C.StorageBase.__new__(cls, *args, **kwargs)
    return storage_at(host, indexed(device))


def is_resizable(storage: UntypedStorage) -> bool:
    return storage.device.type == NAME or torch._C.StorageBase.resizable(storage)


def set_memory(tensor: Tensor, storage: UntypedStorage, like: Tensor) -> Tensor:
    """Give a tensor a memory, and the place in it that ``like`` has."""
    place = like.storage_offset(), like.size(), like.stride()
    op = _aten.set_.source_Storage_storage_offset
    return op.redispatch(CPU_KEYS, tensor, storage, *place)


def host_of(tensor: Tensor) -> Tensor:
    """Return a CPU tensor of the same memory as one of the device."""
    if tensor.layout is torch.sparse_coo:
        return _sparse(tensor, host_of(tensor._indices()), host_of(tensor._values()))
    host = torch.empty(0, dtype=tensor.dtype, device=CPU)
    return set_memory(host, host_storage(tensor.untyped_storage()), tensor)


def _sparse(like: Tensor, indices: Tensor, values: Tensor) -> Tensor:
    """Return a sparse tensor of given parts, on their device."""
    return _aten._sparse_coo_tensor_with_dims_and_tensors.default(
        like.sparse_dim(),
        like.dense_dim(),
        like.shape,
        indices,
        values,
        dtype=values.dtype,
        layout=torch.sparse_coo,
        device=values.device,
        is_coalesced=like.is_coalesced(),
    )


def run_on_parts(op: torch._ops.OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run PyTorch's own kernel, which for any device does all with a sparse tensor's parts."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.SparseCPU)
    return op.redispatch(keys, *args, **kwargs)


OF_SPARSE = {
    name: getattr(_aten, name).default
    for name in (
        *("_indices", "_values", "_nnz", "is_coalesced", "_coalesced_", "sparse_dim", "dense_dim"),
        *("_sparse_coo_tensor_with_dims_and_tensors", "_sparse_coo_tensor_with_dims"),
    )
} | {"copy_": _aten.copy_sparse_to_sparse_.default}


def is_mine(tensor: Tensor) -> bool:
    return tensor.device.type == NAME


def wrap(
    host: Tensor, device: torch.device | None, known: dict[int, UntypedStorage] | None = None
) -> Tensor:
    """Return the tensor of a device for one of the host."""
    refuse(Now.profile.dtypes, host.dtype)
    if host.layout is torch.sparse_coo:
        parts = (wrap(part, device, known) for part in (host._indices(), host._values()))
        return _sparse(host, *parts)
    memory = host.untyped_storage()
    device = indexed(NAME if device is None else device)
    storage = (known or {}).get(memory._cdata)
    if storage is None:
        storage = storage_at(memory, device)
    seed = _seed(storage.device.index, host.dtype)
    return set_memory(
        _aten.as_strided.default.redispatch(CPU_KEYS, seed, [0], [1], 0), storage, host
    )
