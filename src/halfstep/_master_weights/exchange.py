"""Exchange of parameters for their float32 weights, and back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from halfstep._master_weights.stores import KEEPING, Store
from halfstep._pytorch.amp import increment_version
from halfstep._pytorch.distributed import Swap, in_place_of, local_part, shard_name

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
        swap: The parameter, and what it is at present; or what it was, which that has become.
        low: Its value, which lies where it always does.
        kept: What the store keeps of it, laid out in memory as :func:`_dense` says.
        wide: The gradient that it was given, None if it has none.
        version: How often that had been written to.
    """

    swap: Swap
    low: Tensor
    kept: Tensor | None
    wide: Tensor | None
    version: int


class Exchange:
    """Calls for which parameters and their gradients are float32.

    However one ends, the parameters are afterwards what their weights round to.

    Args:
        optimizer: Has in its state what the store keeps.
        store: The store.
        params: The parameters; those that the store does not serve stay as they are.
        scratch: Memory for a step that keeps no hold of it, and does not write to gradients but to
            unscale them.
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

    def around(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function with float32 parameters."""
        if torch.is_inference_mode_enabled():  # what is made in it could not be written to later
            with torch.inference_mode(False):
                return self.around(step, *args, **kwargs)

        def call() -> Any:
            self._widen_all()
            return step(*args, **kwargs)

        return in_any_case(call, self._narrow_all)

    def outside(self, argument: Any) -> Any:
        """Return a closure that runs with the parameters as they were; else the argument itself."""
        if not callable(argument):
            return argument

        @wraps(argument)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self._narrow_all()
            try:
                return argument(*args, **kwargs)
            finally:
                self._widen_all()

        return evaluate

    @torch.no_grad()
    def _widen_all(self) -> None:
        if self._scratch is not None:
            self._scratch.clear()
        for param in self._params:
            if param.dtype in self._store.dtypes:
                self._widen(param)

    @torch.no_grad()
    def _narrow_all(self) -> None:
        torch.clear_autocast_cache()  # of float32 parameters: those in it cannot be swapped
        while self._exchanged:
            self._narrow(self._exchanged[-1])
            self._exchanged.pop()

    def _widen(self, param: Tensor) -> None:
        low, state = param.data, self._optimizer.state.get(param, {})
        local = _dense(local_part(low))
        store, kept, weight = _read(state, self._store, low.shape, local, self._memory(local))
        if store is not self._store:
            kept = self._store.empty(local)
        wide = in_place_of(low, weight.data).requires_grad_(param.requires_grad)
        grad, version = param.grad, 0
        if grad is not None:
            if grad.dtype is low.dtype:
                grad = self._wide(grad)
                version = grad._version
            elif grad.dtype is not torch.float32:
                wide.grad_dtype = grad.dtype
            wide.grad = grad
        swap = Swap(param, wide)
        self._exchanged.append(_Exchanged(swap, low, kept, grad, version))
        for each in KEEPING:
            state.pop(each.key, None)
        swap.make()

    def _wide(self, grad: Tensor) -> Tensor:
        if grad.layout is not torch.strided:
            return grad.float()
        local = _dense(local_part(grad))
        return in_place_of(grad, _shaped(self._memory(local), local).copy_(local).data)

    def _memory(self, like: Tensor) -> Tensor:
        if self._scratch is None:
            return torch.empty(like.numel(), dtype=torch.float32, device=like.device)
        return self._scratch.take(like.numel(), like.device)

    def _narrow(self, exchanged: _Exchanged) -> None:
        """Put a parameter back. Interrupted, it can be called again."""
        swap, low, kept = exchanged.swap, exchanged.low, exchanged.kept
        if swap.is_made():
            # The optimizer may have put another tensor there.
            local, target = local_part(swap.param.data), local_part(low)
            dense = _dense(target)
            self._store.narrow_(
                _flat(_dense(local.float(), dense)),
                _flat(dense),
                None if kept is None else _flat(kept),
                shard_name(low),
            )
            if dense is not target:
                target.copy_(dense)
            self._narrow_gradient(exchanged)
            increment_version((swap.other,))
        if kept is not None:
            self._optimizer.state[swap.param][self._store.key] = in_place_of(low, kept)
        swap.undo()

    def _narrow_gradient(self, exchanged: _Exchanged) -> None:
        own = exchanged.swap.other  # what the parameter was
        grad, wide = exchanged.swap.param.grad, exchanged.wide
        if grad is not wide:
            if grad is not None and own.grad_dtype is own.dtype:
                grad = grad.to(own.dtype)
            own.grad = grad
        elif wide is not None and own.grad is not wide and self._is_written_to(exchanged):
            own.grad.copy_(wide)

    def _is_written_to(self, exchanged: _Exchanged) -> bool:
        """Return whether the step has changed a gradient: unscaled it, or set it to zero."""
        if getattr(self._optimizer, "grad_scale", None) is not None:
            return True
        # Fused steps count as writing to all gradients.
        wide = exchanged.wide
        return self._scratch is None and wide is not None and wide._version != exchanged.version


def in_any_case(call: Callable[[], Any], end: Callable[[], None]) -> Any:
    """Call a function and, whatever happens, another one, which may be called again.

    Ctrl-C may cut short the first call of that as well.
    """
    try:
        try:
            return call()
        finally:
            end()
    finally:
        end()


@torch.no_grad()
def float32_weight(optimizer: torch.optim.Optimizer, store: Store, param: Tensor) -> Tensor:
    """Return a copy of the float32 weight behind a parameter."""
    low, state = param.data, optimizer.state.get(param, {})
    local = _dense(local_part(low))
    memory = torch.empty(local.numel(), dtype=torch.float32, device=local.device)
    *_, weight = _read(state, store, low.shape, local, memory)
    return in_place_of(low, weight.clone())


def _read(
    state: dict[str, Any], store: Store, shape: torch.Size, local: Tensor, memory: Tensor
) -> tuple[Store, Tensor | None, Tensor]:
    """Return who has kept something of a parameter, what is kept, here and dense, and the weight.

    Another store may have, and saved it. If that is of another shape, or nothing is kept, ``store``
    begins anew.

    Args:
        state: The state of the parameter.
        store: Its store.
        shape: Its shape, on all ranks together.
        local: What this rank has of it, dense.
        memory: Room for the weight, which may be what is kept.
    """
    keeper = next((each for each in (store, *KEEPING) if each.key in state), store)
    saved = state.get(keeper.key)
    if saved is None or saved.shape != shape:
        keeper, kept = store, store.empty(local)
    else:
        kept = _dense(local_part(saved).to(local.device), local)
    weight = keeper.widen(_flat(local), None if kept is None else _flat(kept), memory)
    return keeper, kept, _shaped(weight, local)


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
