"""Casting the arguments of an op, and the casts of weights that are kept meanwhile."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def is_eligible(tensor: Tensor, device: str) -> bool:
    """Say whether autocast for ``device`` may cast ``tensor``: floating point, but not float64."""
    return (
        tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        and tensor.device.type == device
    )


class WeightCache:
    """Casts of weights, kept while the outermost context of a thread is active.

    A weight that several ops use, or one op several times, is cast once. A cast belongs to the
    tensor, its version, the dtype and the grad mode it was made in, so that a weight that was
    changed in place, or is needed with a gradient after a cast without one, is cast again.

    Only what PyTorch's own cache keeps is kept: float32 leaves that require grad. Ops that a kernel
    of PyTorch casts (see :mod:`halfstep.casting.kernels`) use PyTorch's cache, not this one.
    """

    def __init__(self) -> None:
        self._casts: dict[tuple[int, torch.dtype, bool], tuple[weakref.ref[Tensor], int, Tensor]]
        self._casts = {}

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return ``weight.to(dtype)``, kept or new. Sync: none."""
        if not _is_weight(weight) or not torch.is_autocast_cache_enabled():
            return weight.to(dtype)
        key = (id(weight), dtype, torch.is_grad_enabled())
        kept = self._casts.get(key)
        # The weak reference tells a weight from a later tensor at the same address.
        if kept is not None and kept[0]() is weight and kept[1] == weight._version:
            return kept[2]
        cast = weight.to(dtype)
        self._casts[key] = (weakref.ref(weight), weight._version, cast)
        return cast


def _is_weight(tensor: Tensor) -> bool:
    return (
        tensor.requires_grad
        and tensor.is_leaf
        and tensor.dtype is torch.float32
        and not tensor._is_view()
        and not tensor.is_inference()  # has no version
    )


def cast(value: Any, device: str, dtype: torch.dtype, cache: WeightCache | None = None) -> Any:
    """Cast a tensor, or the tensors in a list or tuple, if they are eligible.

    Args:
        value: any argument of an op; what is no tensor comes back as it is.
        device: the device type on which autocast is on.
        dtype: the dtype to cast to.
        cache: where casts of weights are kept, or None.

    Returns:
        The value with eligible tensors in ``dtype``. Differentiable. Sync: none.
    """
    if isinstance(value, Tensor):
        if value.dtype is dtype or not is_eligible(value, device):
            return value
        return value.to(dtype) if cache is None else cache.cast(value, dtype)
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, device, dtype, cache) for item in value)
    return value


def cast_any(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast a floating-point tensor on the device, float64 too; anything else comes back as it is.

    Differentiable. Sync: none.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device:
        return value.to(dtype)
    return value


def widest(values: Iterable[Any], device: str) -> torch.dtype | None:
    """Return the dtype that holds every eligible or float64 tensor in ``values``.

    Two different half precisions meet in float32. None if there is no such tensor.
    """
    found: torch.dtype | None = None
    for value in values:
        if isinstance(value, Tensor):
            if not value.is_floating_point() or value.device.type != device:
                continue
            dtype: torch.dtype | None = value.dtype
        elif isinstance(value, (list, tuple)):
            dtype = widest(value, device)
        else:
            continue
        if found is None:
            found = dtype
        elif dtype is not None and dtype is not found:
            found = torch.promote_types(found, dtype)
    return found
