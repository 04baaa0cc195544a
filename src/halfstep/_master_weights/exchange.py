"""Exchange of parameters for their float32 weights, and back."""

from __future__ import annotations

from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from halfstep._master_weights.stores import KEEPING, Store
from halfstep._pytorch.amp import increment_version
from halfstep._pytorch.distributed import local_part, placed_like, shard_name, swap

ALIGNMENT = 16
"""Weights begin at multiples of so many entries, as in memory of their own: reductions depend on
it."""


class Scratch:
    """Memory for float32 weights and gradients that is used again for every chunk."""

    def __init__(self) -> None:
        self._free: dict[torch.device, Tensor] = {}
        self._whole: dict[torch.device, Tensor] = {}

    def clear(self) -> None:
        """Let all of it be used again."""
        self._free = dict(self._whole)

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return memory for so many entries, ``[size]``."""
        aligned = -(-size // ALIGNMENT) * ALIGNMENT
        free = self._free.get(device)
        if free is None or free.numel() < aligned:
            known = 0 if free is None else self._whole[device].numel()
            free = torch.empty(max(aligned, 2 * known), dtype=torch.float32, device=device)
            self._whole[device] = free
        self._free[device] = free[aligned:]
        return free[:size]


@dataclass(eq=False, slots=True)
class _Exchanged:
    """A parameter that is float32 at present.

    Attributes:
        param: The parameter.
        other: What it was before.
        low: Its value then, which lies where it always does.
        kept: What the store keeps of it, laid out in memory as :func:`_dense` says.
        grad: Its gradient.
        wide: The same in float32; the gradient itself if it is.
    """

    param: Tensor
    other: Tensor
    low: Tensor
    kept: Tensor | None
    grad: Tensor | None
    wide: Tensor | None


class Exchange:
    """A block in which parameters and their gradients are float32.

    However it ends, the parameters are afterwards what their weights round to.

    Args:
        optimizer: Has in its state what the store keeps.
        store: The store.
        params: The parameters; those that the store does not serve stay as they are.
        scratch: Memory for a step that keeps no hold of it.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        store: Store,
        params: list[Tensor],
        scratch: Scratch | None = None,
    ) -> None:
        self._optimizer, self._store, self._params = optimizer, store, params
        self._scratch = scratch
        self._exchanged: list[_Exchanged] = []

    def __enter__(self) -> None:
        """Make them float32."""
        if self._scratch is not None:
            self._scratch.clear()
        try:
            with torch.no_grad():
                for param in self._params:
                    if param.dtype in self._store.dtypes:
                        self._widen(param)
        except BaseException:
            self.__exit__()
            raise

    @torch.no_grad()
    def __exit__(self, *_: object) -> None:
        """Make them what they were."""
        while self._exchanged:
            self._narrow(self._exchanged.pop())

    def outside(self, argument: Any) -> Any:
        """Return a closure that runs with the parameters as they were; else the argument itself."""
        if not callable(argument):
            return argument

        @wraps(argument)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self.__exit__()
            try:
                return argument(*args, **kwargs)
            finally:
                self.__enter__()

        return evaluate

    def _widen(self, param: Tensor) -> None:
        state, low = self._optimizer.state.get(param, {}), param.data
        local = _dense(local_part(low))
        # What another store has kept was saved with it.
        store = next((each for each in KEEPING if each.key in state), self._store)
        saved = state.pop(store.key, None)
        if saved is None or saved.shape != low.shape:
            store, kept = self._store, self._store.empty(local)
        else:
            kept = _dense(local_part(saved).to(local.device), local)
        flat = None if kept is None else _flat(kept)
        weight = store.widen(_flat(local), flat, self._memory(local))
        if store is not self._store:
            kept = self._store.empty(local)
        grad = param.grad
        wide = None if grad is None else self._wide(grad)
        other = placed_like(low)(_shaped(weight, local)).requires_grad_(param.requires_grad)
        swap(param, other)
        self._exchanged.append(_Exchanged(param, other, low, kept, grad, wide))
        param.grad = wide

    def _wide(self, grad: Tensor) -> Tensor:
        if grad.dtype is torch.float32:
            return grad
        if grad.layout is not torch.strided:
            return grad.float()
        local = _dense(local_part(grad))
        return placed_like(grad)(_shaped(self._memory(local), local).copy_(local))

    def _memory(self, like: Tensor) -> Tensor:
        if self._scratch is None:
            return torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return self._scratch.take(like.numel(), like.device)

    def _narrow(self, exchanged: _Exchanged) -> None:
        param, low, kept = exchanged.param, exchanged.low, exchanged.kept
        # The optimizer may have put another tensor there.
        local, target = local_part(param.data), local_part(low)
        dense = _dense(target)
        self._store.narrow_(
            _flat(_dense(local, dense)),
            _flat(dense),
            None if kept is None else _flat(kept),
            shard_name(low),
        )
        if dense is not target:
            target.copy_(dense)
        grad, found = exchanged.grad, param.grad
        swap(param, exchanged.other)
        if found is not exchanged.wide:
            param.grad = None if found is None else found.to(param.grad_dtype)
        elif grad is not found and getattr(self._optimizer, "grad_scale", None) is not None:
            assert grad is not None
            assert found is not None
            grad.copy_(found)  # the step has divided it
        if kept is not None:
            self._optimizer.state[param][self._store.key] = placed_like(low)(kept)
        increment_version((param,))


def _dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor whose memory has no gaps, laid out as that of ``like`` if it is given."""
    strides = (tensor if like is None else like).stride()
    if like is None and not tensor.is_contiguous():
        strides = torch.empty_like(tensor, device="meta").stride()
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def _flat(tensor: Tensor) -> Tensor:
    """Return the entries of a dense tensor in the order of the memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Return what :func:`_flat` has made of a tensor laid out as ``like``."""
    return flat.as_strided(like.shape, like.stride())
