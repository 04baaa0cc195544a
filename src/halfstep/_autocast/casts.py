"""Casting the arguments of an op."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfstep import _torch
from halfstep._autocast import scopes, weight_cache
from halfstep._autocast.gathered import GatheredMet, is_gathered, is_weight
from halfstep._autocast.weight_cache import Held

_TO: dict[torch.dtype, Callable[[Tensor], Tensor]] = {
    torch.float16: Tensor.half,
    torch.bfloat16: Tensor.bfloat16,
    torch.float32: Tensor.float,
    torch.float64: Tensor.double,
}
"""The fastest ways to cast from Python: two thirds of the time of ``tensor.to(dtype)``."""


_NO_TENSORS = frozenset({type(None), bool, int, float, str})


class Float64Met(Exception):  # noqa: N818  # nothing is wrong: see cast
    """An argument is in float64."""


def is_eligible(tensor: Tensor, device: str) -> bool:
    """Say whether autocast for ``device`` may cast ``tensor``: floating point, but not float64."""
    return (
        tensor.is_floating_point()
        and tensor.dtype is not torch.float64
        and tensor.device.type == device
    )


def cast(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast a tensor, or the tensors in a list or tuple, if they are eligible.

    Args:
        value: any argument of an op; what is no tensor comes back as it is.
        device: the device type on which autocast is on.
        dtype: the dtype to cast to.

    Returns:
        The value with eligible tensors in ``dtype``. Differentiable. Sync: none.

    Raises:
        Float64Met: there is a float64 tensor on the device, not one without dimensions. The op is
            to run in float64 then, and this is the only pass over its arguments.
    """
    if isinstance(value, Tensor):
        has = value.dtype
        if has is dtype or not has.is_floating_point or value.device.type != device:
            return value
        if has is not torch.float64:
            return _TO[dtype](value)
        if value.dim() > 0:
            raise Float64Met
        return value
    if isinstance(value, (list, tuple)):
        return type(value)(cast(item, device, dtype) for item in value)
    return value


def cast_weights(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast what the cache of weights keeps, and nothing else.

    Differentiable. Sync: none.

    Raises:
        Float64Met: as :func:`cast`.
        GatheredMet: there is a gathered weight; :class:`halfstep._autocast.gathered.Lent` casts it.
    """
    kind = type(value)
    if kind in _NO_TENSORS:  # isinstance takes longer
        return value
    if isinstance(value, Tensor):
        has = value.dtype
        if has is torch.float64 and value.device.type == device and value.dim() > 0:
            raise Float64Met
        if has is dtype or not has.is_floating_point or not is_weight(value):
            return value
        # No look at the device, which takes as long as all else: an op has its weights on its own.
        if is_gathered(value):
            raise GatheredMet
        if kind is not nn.Parameter and kind is not Held:
            return value  # a DTensor: PyTorch does not count all writes to one
        kept = weight_cache.cast(value, dtype, scopes.current)
        return value if kept is None else kept
    # A product of one factor, einsum("ij->ji", weight) say, is a view of it.
    if isinstance(value, (list, tuple)) and len(value) > 1:
        return [cast_weights(item, device, dtype) for item in value]
    return value


def are_for_pytorch(args: Iterable[Any], dtype: torch.dtype) -> bool:
    """Return whether :func:`cast_weights` leaves all arguments of an op as they are.

    False where it takes more than a look at each to tell. Sync: none.
    """
    has_weights = False
    for arg in args:
        kind = type(arg)
        if kind is nn.Parameter:
            if arg.dtype is torch.float64 or not weight_cache.is_small(arg):
                return False
            has_weights = True
        elif kind is Tensor:
            if arg.dtype is torch.float64:
                return False
        elif kind not in _NO_TENSORS:
            return False
    # Where there are ranks, it may have been gathered.
    return not (has_weights and torch.is_grad_enabled() and _torch.has_process_group())


def cast_any(value: Any, device: str, dtype: torch.dtype) -> Any:
    """Cast a floating-point tensor on the device, float64 too; anything else comes back as it is.

    Differentiable. Sync: none.
    """
    if isinstance(value, Tensor) and value.is_floating_point() and value.device.type == device:
        return value.to(dtype)
    return value


def widest(values: Iterable[Any], device: str) -> torch.dtype | None:
    """Return the dtype that holds every eligible or float64 tensor in ``values``.

    Two different half precisions meet in float32. Tensors without dimensions count where there is
    no other, as in PyTorch. None if there is no such tensor.
    """
    dtypes: dict[bool, torch.dtype] = {}  # of those without dimensions and of those with some
    for tensor in tensors_in(values):
        if tensor.is_floating_point() and tensor.device.type == device:
            key, dtype = tensor.dim() > 0, tensor.dtype
            dtypes[key] = torch.promote_types(dtypes.get(key, dtype), dtype)
    return dtypes.get(True, dtypes.get(False))


def tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values, and in the tuples, lists and mappings among them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_in(value)
        elif isinstance(value, Mapping):
            yield from tensors_in(list(value.values()))
