"""Plain tensors that hold the values of a tensor of any kind."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from halfstep._pytorch import distributed, modes

_NOT_SUBCLASSED = torch.Tensor.__torch_dispatch__
_OF_TRACERS = ("FakeTensor", "FunctionalTensor", "ProxyTensor")


def parts_of(tensor: Tensor) -> list[Tensor] | None:
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
    return any(cls is not Tensor and is_made_of_others(cls) for cls in classes)
