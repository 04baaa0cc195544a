"""Stores of master weights, which keep part of each float32 weight beside its parameter.

The parameter is authoritative; a store only adds what rounding has left out of it. A float32 weight
therefore always rounds to the current parameter: if the parameter was loaded, merged, averaged or
zeroed since the last step, the earlier weight does not come back.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from hashlib import sha256

import torch
from torch import Tensor

from halfstep._pytorch.modes import is_fake

PIECE, LARGE_PIECE = 1 << 19, 1 << 24
"""Number of entries converted at a time, on a CPU and on other devices.

On a CPU they stay in the cache between two ops. On other devices launching an op takes longer, but
intermediate results should still take little memory."""

_HALF = 1 << 15
"""Half a unit in the last place of bfloat16, in the integer bits of float32."""


NOTHING = torch.empty(0, device="cpu")  # whatever the default device is
"""What a store that keeps nothing has kept."""


class Store(ABC):
    """A way to keep float32 weights beside their parameters."""

    name: str  # as given to halfstep.master_weights
    key: str  # in the state of the optimizer; "" if nothing is kept
    dtypes: tuple[torch.dtype, ...]  # of the parameters that it supports
    keeps_weight = False  # whether the kept tensor is the weight itself

    @abstractmethod
    def empty(self, param: Tensor) -> Tensor | None:
        """Return the tensor to keep for a weight that equals its parameter; None for nothing."""

    @abstractmethod
    def widen(self, param: Tensor, kept: Tensor, weight: Tensor) -> Tensor:
        """Return the float32 weight, in ``weight`` or in ``kept``. Sync: none.

        All tensors are contiguous and one-dimensional, here and in :meth:`narrow_`.
        """

    @abstractmethod
    def narrow_(self, weight: Tensor, param: Tensor, kept: Tensor, shard: str) -> None:
        """Round a float32 weight into its parameter, and keep what rounding leaves. Sync: none.

        The weight does not change, except for the bits of NaNs. ``shard`` is the name of a
        DTensor's shard, "" if all ranks have the same values.
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

    def widen(self, param: Tensor, kept: Tensor, weight: Tensor) -> Tensor:
        for low, left, wide in _pieces(param, kept, weight):
            wide.copy_(low)
            wide.view(torch.int32).add_(left)
            if _may_hold_nan(wide):
                # A new NaN means that 0 or inf was written to the parameter: drop the remainder.
                torch.where(wide.isnan(), low.float(), wide, out=wide)
        return weight

    def narrow_(self, weight: Tensor, param: Tensor, kept: Tensor, shard: str) -> None:
        for wide, low, left in _pieces(weight, param.view(torch.int16), kept):
            _settle_nan_(wide)
            bits = wide.view(torch.int32)
            left.copy_(bits)  # the lower 16 bits, as a signed number
            low.copy_((bits + _HALF).bitwise_right_shift_(16))


class Float32(Store):
    """The whole float32 weight."""

    name = "float32"
    key = "master_weight"
    dtypes = (torch.bfloat16, torch.float16)
    keeps_weight = True

    def empty(self, param: Tensor) -> Tensor:
        return param.detach().to(torch.float32, copy=True)

    def widen(self, param: Tensor, kept: Tensor, weight: Tensor) -> Tensor:
        """Return the kept weight, replaced by the parameter where it does not round to it."""
        for low, wide in _pieces(param, kept):
            rounded = wide.to(low.dtype)
            if _may_differ(rounded, low):
                torch.where(rounded == low, wide, low.float(), out=wide)
        return kept

    def narrow_(self, weight: Tensor, param: Tensor, kept: Tensor, shard: str) -> None:
        """Round to nearest, ties to even; the weight itself is kept."""
        param.copy_(weight)
        is_same = is_fake(weight) or weight.data_ptr() == kept.data_ptr()
        if not is_same:  # the optimizer has replaced the tensor
            kept.copy_(weight)


class Kahan(Store):
    """The rounding error of a weight, rounded to the dtype of the parameter.

    Source: W. Kahan, "Further remarks on reducing truncation errors" (1965).
    """

    name = "kahan"
    key = "master_compensation"
    dtypes = (torch.bfloat16, torch.float16)

    def empty(self, param: Tensor) -> Tensor:
        return torch.zeros_like(param)

    def widen(self, param: Tensor, kept: Tensor, weight: Tensor) -> Tensor:
        """Add the rounding error to the parameter where the sum rounds to the parameter."""
        for low, left, wide in _pieces(param, kept, weight):
            number, rest = low.float(), left.float()
            # The rest may have been rounded to half a unit, which may round to the next number.
            near = torch.add(number, rest, alpha=0.99).to(low.dtype).float()
            is_rest = torch.eq(near, number, out=near)  # 0 and 1: four times as fast as booleans
            torch.addcmul(number, rest, is_rest, out=wide)
        return weight

    def narrow_(self, weight: Tensor, param: Tensor, kept: Tensor, shard: str) -> None:
        for wide, low, left in _pieces(weight, param, kept):
            low.copy_(wide)
            number = low.float()
            rest = torch.sub(wide, number)
            left.copy_(rest.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0))  # where low is not finite
            # Rounded up to half a unit, a rest may lead to the next number: a step that changes no
            # weight would change the parameter. Then its last bit makes it smaller.
            near = rest.copy_(left).add_(number).to(low.dtype).float()
            is_tied = torch.ne(near, number, out=near).mul_(torch.ne(left, 0, out=rest))
            left.view(torch.int16).sub_(is_tied.short())


class Stochastic(Store):
    """Stochastic rounding, which keeps nothing: weights are right on average.

    Source: Gupta et al., "Deep learning with limited numerical precision" (2015, arXiv:1502.02551).

    The random bits of a step depend on a seed, the number of the step, and the shard. Therefore
    only two numbers are saved, the sharding may change after loading, and all ranks draw the same
    bits for replicated values.
    """

    name = "stochastic"
    key = ""
    dtypes = (torch.bfloat16, torch.float16)

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self._generators: dict[tuple[torch.device, str], torch.Generator] = {}
        self.begin(seed, 0)

    def begin(self, seed: int, step: int) -> None:
        self._step = seed, step
        self._generators.clear()

    def empty(self, param: Tensor) -> None:
        """Keep nothing."""

    def widen(self, param: Tensor, kept: Tensor, weight: Tensor) -> Tensor:
        return weight.copy_(param)

    def narrow_(self, weight: Tensor, param: Tensor, kept: Tensor, shard: str) -> None:
        """Round up or down at random. inf and NaN stay, and finite weights stay finite."""
        generator = self._generator(param.device, shard)
        for wide, low in _pieces(weight, param):
            low.copy_(_rounded_by_chance(wide, low.dtype, generator))

    def _generator(self, device: torch.device, shard: str) -> torch.Generator:
        found = self._generators.get((device, shard))
        if found is None:
            # Not the index of the device, which differs between ranks.
            number = sum(shard == other for _, other in self._generators)
            text = repr((*self._step, shard, number))
            found = self._generators[device, shard] = torch.Generator(device)
            found.manual_seed(int.from_bytes(sha256(text.encode()).digest()[:8]))
        return found


STORES: dict[str, type[Store]] = {each.name: each for each in (Split, Float32, Kahan, Stochastic)}
"""The stores by name."""

KEEPING: list[Store] = [Split(), Float32(), Kahan()]
"""The stores that keep a tensor."""


def _rounded_by_chance(weight: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Tensor:
    """Return a float32 weight rounded up or down at random to numbers of a lower dtype, in float32.

    The expected value is the weight. Finite weights beyond the largest finite number of the lower
    dtype become that number.
    """
    largest, smallest = torch.finfo(dtype).max, torch.finfo(dtype).smallest_normal
    has_larger = _may_exceed(weight, largest)
    finite = weight
    if has_larger:
        finite = weight.clamp(-largest, largest)
        _settle_nan_(finite)
    num_lost = 16 if dtype is torch.bfloat16 else 13
    noise = _noise(weight, num_lost, generator)
    # Noise carries to the next number with a probability proportional to the lost bits.
    bits = noise + finite.view(torch.int32)
    rounded = bits.bitwise_and_(-(1 << num_lost)).view(torch.float32)
    if dtype is torch.float16:
        # Subnormals of float16 are equally spaced.
        step = torch.finfo(dtype).tiny * torch.finfo(dtype).eps
        counted = ((finite / step + noise / (1 << num_lost)).floor_() * step).copysign_(finite)
        rounded = torch.where(finite.abs() < smallest, counted, rounded)
    return torch.where(weight.isinf(), weight, rounded) if has_larger else rounded


def _noise(like: Tensor, num_bits: int, generator: torch.Generator) -> Tensor:
    """Return random integers of ``num_bits`` bits, at most 16, as int32."""
    size, top, device = like.numel(), 1 << num_bits, like.device
    if device.type != "cpu":
        return torch.randint(top, (size,), generator=generator, device=device, dtype=torch.int32)
    # Drawing takes longer than all the rest, so 64 bits are drawn for four numbers.
    drawn = torch.empty(-(-size // 4), dtype=torch.int64, device=device)
    drawn.random_(-(1 << 63), None, generator=generator)
    return drawn.view(torch.int16)[:size].int().bitwise_and_(top - 1)


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


def _may_exceed(wide: Tensor, largest: float) -> bool:
    """Return whether a magnitude may be larger, inf or NaN; True if looking would need a sync."""
    if _is_unseen(wide) or wide.numel() == 0:
        return True
    low, high = wide.aminmax()
    return not (low.item() >= -largest and high.item() <= largest)


def _may_differ(one: Tensor, other: Tensor) -> bool:
    """Return whether any 16-bit number may differ; True if looking would need a sync."""
    if _is_unseen(one) or one.numel() == 0:
        return True
    low, high = (one.view(torch.int16) - other.view(torch.int16)).aminmax()
    return low.item() != 0 or high.item() != 0


def _settle_nan_(wide: Tensor) -> None:
    """Give every NaN the standard bits; adding to other bits could yield a number."""
    if _may_hold_nan(wide):
        wide.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=-math.inf)
