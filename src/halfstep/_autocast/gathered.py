"""Weights that are gathered from the ranks for an op, and freed after it.

``fully_shard`` gathers the weights of a layer before its forward pass, frees them after it, and
gathers them again before its backward pass. A cast that autograd saves for the backward pass would
stay: in the end one of every weight, on every rank. So none is saved; the backward pass casts what
was gathered again.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from halfstep._autocast.hold import Held
from halfstep._pytorch import autograd, distributed, modes, storages
from halfstep.errors import CallOrderError


class GatheredMet(Exception):  # noqa: N818  # nothing is wrong: see cast_weights
    """An argument is a gathered weight."""


def is_gathered(weight: Tensor) -> bool:
    """Return whether others have the memory of a weight, and may free it before the backward pass.

    Only where there are ranks, autograd saves something, and nobody else looks after what it saves
    (activation checkpointing does: it saves nothing). Sync: none.
    """
    return (
        torch.is_grad_enabled()
        and distributed.has_process_group()
        and not modes.is_tracing()
        and weight.layout is torch.strided
        and not (weight.is_nested or weight.is_inference())
        and not storages.is_used_once(distributed.local_part(weight))
        and autograd.saves_as_always()
    )


class Lent:
    """Casts of gathered weights for one op, made again when its backward pass asks for them."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._weights: dict[int, Tensor] = {}  # by the memory of their casts, during the op

    def cast(self, value: Any) -> Any:
        """Cast the gathered weights in ``value``, or in a list of them; leave all else.

        Differentiable; gradients are not rounded on their way. Sync: none.
        """
        if isinstance(value, (list, tuple)):
            return [self.cast(item) for item in value]
        is_lent = is_weight(value) and value.is_floating_point() and value.dtype != self._dtype
        if not is_lent or value.dtype is torch.float64 or not is_gathered(value):
            return value
        if distributed.is_dtensor(value):
            cast: Tensor = value.to(self._dtype)
            made = cast
        else:
            made = value.detach().to(self._dtype)
            cast = storages.in_place_of(value, made) if value.requires_grad else made
        self._weights[_memory(made)] = value
        return cast

    @contextmanager
    def until_backward(self) -> Iterator[None]:
        """Let autograd save none of the casts in this block."""
        with saved_tensors_hooks(self._pack, _unpack):
            try:
                yield
            finally:
                self._weights.clear()  # autograd keeps the hooks, and with them this object

    def _pack(self, saved: Tensor) -> _Cast | _Other:
        weight = self._weights.get(_memory(saved)) if saved.dtype is self._dtype else None
        if weight is None:
            return _Other(saved)
        return _Cast(weight, saved)


class _Cast:
    """A cast that autograd saves, or a view of one such as its transpose."""

    def __init__(self, weight: Tensor, cast: Tensor) -> None:
        local = distributed.local_part(cast)
        self._weight, self._version = weight, weight._version
        self._dtype = cast.dtype
        self._view = (local.shape, local.stride(), local.storage_offset())
        self._placed = distributed.placed_like(cast)

    def again(self) -> Tensor:
        """Cast once more."""
        weight = self._weight
        shape = tuple(weight.shape)
        if weight._version != self._version:
            raise RuntimeError(
                f"a weight {shape} was written to between the forward and the backward pass, which "
                "needs it as it was; write to it after backward()"
            )
        local = distributed.local_part(weight)
        if local.numel() and not local.untyped_storage().nbytes():
            raise CallOrderError(
                f"the backward pass needs a weight {shape} that was freed after the forward pass "
                "and not gathered again; call backward() on what the sharded model returned, not "
                "on a tensor kept aside, or shard with fully_shard(..., reshard_after_forward="
                "False)"
            )
        return self._placed(local.detach().to(self._dtype).as_strided(*self._view))


class _Other:
    """Anything else that autograd saves: itself, guarded as ever against later writes."""

    def __init__(self, saved: Tensor) -> None:
        self._saved = saved.detach()  # the tensor itself would keep its own node alive
        self._version = saved._version
        self._described = f"{tuple(saved.shape)} of {saved.dtype}"

    def again(self) -> Tensor:
        if self._saved._version != self._version:
            raise RuntimeError(
                f"a tensor {self._described} that the backward pass needs was written to after the "
                "forward pass; replace the operation in place by one that returns a new tensor"
            )
        return self._saved


def _unpack(packed: _Cast | _Other) -> Tensor:
    return packed.again()


def is_weight(value: Any) -> bool:
    """Return whether an argument of an op is a parameter, distributed or not."""
    if type(value) in (nn.Parameter, Held):
        return True
    return distributed.is_dtensor(value) and isinstance(value, nn.Parameter)


def _memory(tensor: Tensor) -> int:
    return storages.number_of(distributed.local_part(tensor).untyped_storage())
