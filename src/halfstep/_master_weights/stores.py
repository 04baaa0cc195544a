"""Stores of master weights, which keep part of each float32 weight beside its parameter.

The parameter is authoritative; a store only adds what rounding has left out of it. A float32 weight
therefore always rounds to the current parameter: if the parameter was loaded, merged, averaged or
zeroed since the last step, the earlier weight does not come back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfstep._pytorch.modes import is_fake

PIECE, LARGE_PIECE = 1 << 19, 1 << 24
"""Entries converted at a time: on a CPU in its cache, on other devices with few launches of ops."""

_HALF = 1 << 15
"""Half a unit in the last place of bfloat16, in the integer bits of float32."""

Memory = Callable[[int, torch.device], Tensor]
"""A function that returns float32 memory of a size on a device."""


def new_memory(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)


class Store(ABC):
    """A way to keep float32 weights beside their parameters."""

    name: str  # as given to halfstep.master_weights
    key: str  # in the state of the optimizer
    dtypes: tuple[torch.dtype, ...]  # of the parameters that it supports

    @abstractmethod
    def empty(self, param: Tensor) -> Tensor:
        """Return the tensor to keep for a weight that equals its parameter."""

    @abstractmethod
    def widen(self, param: Tensor, kept: Tensor, memory: Memory) -> Tensor:
        """Return the float32 weight, in memory that ``memory`` returns, or in ``kept``. Sync: none.

        All tensors are contiguous and one-dimensional, here and in :meth:`narrow_`.
        """

    @abstractmethod
    def narrow_(self, weight: Tensor, param: Tensor, kept: Tensor) -> None:
        """Round a float32 weight into its parameter, and keep what rounding leaves. Sync: none.

        The weight does not change, except for the bits of NaNs.
        """


class Split(Store):
    """The lower 16 bits of a float32 weight, whose upper 16 bits are the bfloat16 parameter.

    Ties are rounded away from zero so that the remainder fits into int16: with ties to even it
    would be 2^15 for half of them. Parameter and remainder together are exactly the float32 weight,
    except for the payload of a NaN.
    """

    name = "split"
    key = "master_remainder"
    dtypes = (torch.bfloat16,)

    def empty(self, param: Tensor) -> Tensor:
        return torch.zeros_like(param, dtype=torch.int16)

    def widen(self, param: Tensor, kept: Tensor, memory: Memory) -> Tensor:
        weight = memory(param.numel(), param.device)
        for low, left, wide in _pieces(param, kept, weight):
            wide.copy_(low)
            wide.view(torch.int32).add_(left)
            if _may_hold_nan(wide):
                # A new NaN means that 0 or inf was written to the parameter: drop the remainder.
                torch.where(wide.isnan(), low.float(), wide, out=wide)
        return weight

    def narrow_(self, weight: Tensor, param: Tensor, kept: Tensor) -> None:
        for wide, low, left in _pieces(weight, param.view(torch.int16), kept):
            if _may_hold_nan(wide):
                # The standard bits: adding to other ones could yield a number.
                wide.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
            bits = wide.view(torch.int32)
            left.copy_(bits)  # the lower 16 bits, as a signed number
            low.copy_((bits + _HALF).bitwise_right_shift_(16))


class Float32(Store):
    """The whole float32 weight."""

    name = "float32"
    key = "master_weight"
    dtypes = (torch.bfloat16, torch.float16)

    def empty(self, param: Tensor) -> Tensor:
        return param.detach().to(torch.float32, copy=True)

    def widen(self, param: Tensor, kept: Tensor, memory: Memory) -> Tensor:
        """Return the kept weight, replaced by the parameter where it does not round to it."""
        for low, wide in _pieces(param, kept):
            rounded = wide.to(low.dtype)
            if _may_differ(rounded, low):
                torch.where(rounded == low, wide, low.float(), out=wide)
        return kept

    def narrow_(self, weight: Tensor, param: Tensor, kept: Tensor) -> None:
        """Round to nearest, ties to even; the weight itself is kept."""
        param.copy_(weight)
        is_same = is_fake(weight) or weight.data_ptr() == kept.data_ptr()
        if not is_same:  # the optimizer has replaced the tensor
            kept.copy_(weight)


STORES: dict[str, Store] = {each.name: each for each in (Split(), Float32())}
"""The stores by name."""


def _pieces(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the matching pieces of the tensors in order."""
    size = PIECE if tensors[0].device.type == "cpu" else LARGE_PIECE
    if tensors[0].numel() <= size:
        yield tensors
    else:
        yield from zip(*(torch.split(tensor, size) for tensor in tensors), strict=True)


def _is_unseen(tensor: Tensor) -> bool:
    """Return whether reading values needs a sync, or there are none."""
    return tensor.device.type != "cpu" or is_fake(tensor)


def _may_hold_nan(wide: Tensor) -> bool:
    """Return whether there may be a NaN; True if looking would need a sync."""
    return _is_unseen(wide) or math.isnan(wide.sum().item())


def _may_differ(one: Tensor, other: Tensor) -> bool:
    """Return whether any 16-bit number may differ; True if looking would need a sync."""
    if _is_unseen(one) or one.numel() == 0:
        return True
    low, high = (one.view(torch.int16) - other.view(torch.int16)).aminmax()
    return low.item() != 0 or high.item() != 0
