"""Exchange of parameters for their float32 weights, and back, and steps in chunks of them.

A store keeps part of each float32 weight beside its parameter. The parameter is authoritative; a
store only adds what rounding has left out of it. A float32 weight therefore always rounds to the
current parameter: if the parameter was loaded, merged, averaged or zeroed since the last step, the
earlier weight does not come back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import wraps
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import Closure
from halfstep._pytorch.amp import copy_to_each_, increment_version
from halfstep._pytorch.distributed import Swap, in_place_of, is_dtensor, local_part
from halfstep._pytorch.modes import is_fake

# --- what is kept of a weight ---------------------------------------------------------------------

PIECE, LARGE_PIECE = 1 << 19, 1 << 24
"""Entries converted at a time: on a CPU in its cache, on other devices with few launches of ops."""

_HALF = 1 << 15  # half a unit in the last place of bfloat16, in the integer bits of float32

Memory = Callable[[int, torch.device], Tensor]
"""A function that returns float32 memory of a size on a device."""


def new_memory(size: int, device: torch.device) -> Tensor:
    return torch.empty(size, dtype=torch.float32, device=device)


class Split:
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


class Float32:
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


Store: TypeAlias = Split | Float32
"""A way to keep float32 weights beside their parameters, as ``key`` in the state of the optimizer.

``empty`` returns what is kept for a weight that equals its parameter; ``widen`` the weight, in
memory that it gets or in what is kept; ``narrow_`` rounds the weight into the parameter, and keeps
the weight as it is, but for the bits of NaNs. The last two take contiguous, flat tensors.
Sync: none.
"""

STORES: dict[str, Store] = {each.name: each for each in (Split(), Float32())}


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


# --- the exchange ---------------------------------------------------------------------------------

ALIGNMENT = 16
"""Entries to which weights in a block are aligned: results of reductions depend on alignment."""
SMALL = 1 << 16
"""Largest size of parameters that are converted together, in entries: call overhead dominates."""
TOGETHER = 64  # largest number of parameters converted together; it bounds the memory of the block


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class Scratch:
    """Memory for float32 weights and gradients, reused for every chunk."""

    def __init__(self) -> None:
        self._free: dict[torch.device, Tensor] = {}
        self._whole: dict[torch.device, Tensor] = {}

    def clear(self) -> None:
        """Make all memory available again."""
        self._free = dict(self._whole)

    def take(self, size: int, device: torch.device) -> Tensor:
        """Return float32 memory, ``[size]``."""
        aligned = _aligned(size)
        free = self._free.get(device)
        if free is None or free.numel() < aligned:
            known = 0 if free is None else self._whole[device].numel()
            free = torch.empty(max(aligned, 2 * known), dtype=torch.float32, device=device)
            self._whole[device] = free
        self._free[device] = free[aligned:]
        return free[:size]


@dataclass(eq=False, slots=True)
class _Exchanged:
    """A parameter that is temporarily float32."""

    param: Tensor
    low: Tensor  # the original data of the parameter, in its usual memory
    dense: Tensor  # this rank's part of it without gaps: the same memory, or a copy
    keeper: Store  # which wrote what is kept; the current store if nothing was
    kept: Tensor  # what the store keeps, laid out like `dense`
    weight: Tensor | None = None  # in float32, laid out like `dense`
    wide: Tensor | None = None  # the gradient during the exchange, if there is one
    version: int = 0  # the version counter of `wide` before the step
    swap: Swap | None = None  # None before the exchange


class _Batch:
    """Parameters that are converted together: side by side in one block, with padding.

    Several parameters have the same device and dtype, and either all of them or none have a
    gradient of that dtype.
    """

    def __init__(self, members: list[_Exchanged], store: Store) -> None:
        self._members, self._store = members, store
        self._lows = [_flat(member.dense) for member in members]
        self._kept = [_flat(member.kept) for member in members]
        sizes = [low.numel() for low in self._lows]
        self._sizes = [part for size in sizes for part in (size, _aligned(size) - size)]
        self._size = sum(self._sizes) if len(sizes) > 1 else sizes[0]
        self._weights: Tensor | None = None

    def widen(self, memory: Memory) -> None:
        """Create the weights and, for more than one parameter, the float32 gradients."""
        members, keeper = self._members, self._members[0].keeper
        weights = keeper.widen(self._joined(self._lows), self._joined(self._kept), memory)
        for each, part in zip(members, self._parts(weights), strict=True):
            each.weight = _shaped(part, each.dense).data  # .data: its own version counter
            if keeper is not self._store:
                each.kept = self._store.empty(each.dense)
        self._weights = weights
        if len(members) > 1 and _has_narrow_gradient(members[0]):
            grads = [_dense(local_part(member.param.grad)) for member in members]
            parts = self._parts(memory(self._size, weights.device))
            copy_to_each_(parts, [_flat(grad) for grad in grads])
            for each, grad, part in zip(members, grads, parts, strict=True):
                each.wide = in_place_of(each.param.grad, _shaped(part, grad).data)

    def narrow(self) -> None:
        """Round the weights into the parameters, and store what rounding leaves out."""
        members, store, weights = self._members, self._store, self._weights
        made = [each for each in members if each.swap is not None and each.swap.is_made()]
        if len(made) < len(members):  # interrupted
            for each in made:
                _Batch([each], store).narrow()
            return
        if weights is None or not all(map(_is_as_given, members)):
            now = [_dense(local_part(each.param.data).float(), each.dense) for each in members]
            weights = self._joined(list(map(_flat, now)))
        if len(members) == 1:
            store.narrow_(weights, self._lows[0], _flat(members[0].kept))
        else:
            lows, left = (each[0].new_empty(self._size) for each in (self._lows, self._kept))
            store.narrow_(weights, lows, left)
            copy_to_each_(self._lows, self._parts(lows))
            copy_to_each_(self._kept, self._parts(left))
        for member in members:
            target = local_part(member.low)
            if member.dense is not target:
                target.copy_(member.dense)

    def _parts(self, block: Tensor) -> tuple[Tensor, ...]:
        """Return the part of a block that belongs to each parameter."""
        return block.split_with_sizes(self._sizes)[::2] if len(self._lows) > 1 else (block,)

    def _joined(self, flat: list[Tensor]) -> Tensor:
        """Return a block with copies of the tensors; a single tensor is returned as it is."""
        if len(flat) == 1:
            return flat[0]
        block = flat[0].new_zeros(self._size)
        copy_to_each_(self._parts(block), flat)
        return block


class Exchange:
    """Calls during which parameters and their gradients are float32.

    After a call, even one that raises an error, the parameters are their weights, rounded.
    Parameters of other dtypes and frozen ones without state are left alone. ``scratch`` is memory
    for steps that keep no reference to it, and write to gradients only to unscale them.
    """

    def __init__(self, optimizer: Optimizer, store: Store, scratch: Scratch | None = None) -> None:
        self._optimizer, self._store, self._scratch = optimizer, store, scratch
        self._params = parameters(optimizer)
        self._memory: Memory = new_memory if scratch is None else scratch.take
        self._exchanged: list[_Exchanged] = []
        self._open: list[_Batch] = []

    def around(self, step: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():  # its tensors could not be written to later
            with torch.inference_mode(False):
                return self.around(step, *args, **kwargs)

        def call() -> Any:
            self._widen_all()
            return step(*args, **kwargs)

        return in_any_case(call, self._narrow_all)

    def outside(self, closure: Closure) -> Closure:
        """Return a closure that runs with the original parameters."""

        @wraps(closure)
        def evaluate(*args: Any, **kwargs: Any) -> Any:
            self._narrow_all()
            try:
                return closure(*args, **kwargs)
            finally:
                self._widen_all()

        return evaluate

    @torch.no_grad()
    def _widen_all(self) -> None:
        if self._scratch is not None:
            self._scratch.clear()
        served = filter(self._is_served, self._params)
        found = [_found(self._optimizer, self._store, param) for param in served]
        self._open = list(self._batches(found))
        for batch in self._open:
            batch.widen(self._memory)
        for each in found:
            self._exchange(each)

    @torch.no_grad()
    def _narrow_all(self) -> None:
        """Restore all parameters. After an interruption it can be called again."""
        torch.clear_autocast_cache()  # it refers to float32 parameters, which prevents the swap
        for batch in self._open:
            batch.narrow()
        while self._exchanged:
            self._put_back(self._exchanged[-1])
            self._exchanged.pop()
        self._open = []

    def _batches(self, found: list[_Exchanged]) -> Iterator[_Batch]:
        """Yield large parameters alone and small ones together, to save call overhead."""
        small: dict[tuple[object, ...], list[_Exchanged]] = {}
        for each in found:
            if each.dense.numel() > SMALL or each.keeper is not self._store:
                yield _Batch([each], self._store)
                continue
            has_gradient = _has_narrow_gradient(each)
            key = each.dense.device, each.dense.dtype, has_gradient
            small.setdefault(key, []).append(each)
            if len(small[key]) == TOGETHER:
                yield _Batch(small.pop(key), self._store)
        for members in small.values():
            yield _Batch(members, self._store)

    def _is_served(self, param: Tensor) -> bool:
        is_trained = param.requires_grad or param.grad is not None
        # A frozen parameter with state may still be swapped with its average.
        has_part = is_trained or bool(self._optimizer.state.get(param))
        return has_part and param.dtype in self._store.dtypes

    def _exchange(self, each: _Exchanged) -> None:
        """Replace a parameter by its float32 weight, and its gradient by a float32 one."""
        param, low = each.param, each.low
        assert each.weight is not None
        wide = in_place_of(low, each.weight).requires_grad_(param.requires_grad)
        grad = param.grad
        if grad is not None:
            if grad.dtype is low.dtype:
                grad = self._wide(grad) if each.wide is None else each.wide
                each.version = grad._version
            elif grad.dtype is not torch.float32:
                wide.grad_dtype = grad.dtype
            wide.grad = each.wide = grad
        each.swap = swap = Swap(param, wide)
        self._exchanged.append(each)
        state = self._optimizer.state.get(param, {})
        for keeping in STORES.values():
            state.pop(keeping.key, None)
        swap.make()

    def _wide(self, grad: Tensor) -> Tensor:
        if grad.layout is not torch.strided:
            return grad.float()
        local = _dense(local_part(grad))
        memory = self._memory(local.numel(), local.device)
        return in_place_of(grad, _shaped(memory, local).copy_(local).detach())

    def _put_back(self, each: _Exchanged) -> None:
        """Restore a parameter. After an interruption it can be called again."""
        swap = each.swap
        assert swap is not None
        if swap.is_made():
            self._narrow_gradient(each, swap.other)
            increment_version((swap.other,))
        self._optimizer.state[each.param][self._store.key] = in_place_of(each.low, each.kept)
        swap.undo()

    def _narrow_gradient(self, exchanged: _Exchanged, own: Tensor) -> None:
        """Apply changes of the gradient to ``own``, the original contents of the parameter."""
        grad, wide = exchanged.param.grad, exchanged.wide
        if grad is not wide:
            if grad is not None and own.grad_dtype is own.dtype:
                grad = grad.to(own.dtype)
            own.grad = grad
        elif wide is not None and own.grad is not wide and self._is_written_to(exchanged):
            assert own.grad is not None
            own.grad.copy_(wide)

    def _is_written_to(self, exchanged: _Exchanged) -> bool:
        """Return whether the step has unscaled or zeroed a gradient."""
        if getattr(self._optimizer, "grad_scale", None) is not None:
            return True
        # Fused steps increase the version of all gradients, even of those that they do not change.
        wide = exchanged.wide
        return self._scratch is None and wide is not None and wide._version != exchanged.version


def in_any_case(call: Callable[[], Any], end: Callable[[], None]) -> Any:
    """Return the result of ``call``, and run ``end`` afterwards, even after an error.

    ``end`` runs twice, because Ctrl-C may interrupt the first run.
    """
    try:
        try:
            return call()
        finally:
            end()
    finally:
        end()


@torch.no_grad()
def float32_weight(optimizer: Optimizer, store: Store, param: Tensor) -> Tensor:
    """Return a copy of the float32 weight behind a parameter."""
    each = _found(optimizer, store, param)
    weight = each.keeper.widen(_flat(each.dense), _flat(each.kept), new_memory)
    return in_place_of(each.low, _shaped(weight, each.dense).clone())


def _found(optimizer: Optimizer, store: Store, param: Tensor) -> _Exchanged:
    """Return a parameter with what is kept of its weight.

    A loaded state may come from another store. If it has another shape, or nothing is kept,
    ``store`` starts afresh.
    """
    low, state = param.data, optimizer.state.get(param, {})
    dense = _dense(local_part(low))
    # A list, because an interrupt in a discarded generator would be lost.
    keeper = ([each for each in (store, *STORES.values()) if each.key in state] or [store])[0]
    saved = state.get(keeper.key)
    if saved is None or saved.shape != low.shape:
        return _Exchanged(param, low, dense, store, store.empty(dense))
    return _Exchanged(param, low, dense, keeper, _dense(local_part(saved).to(dense.device), dense))


def _has_narrow_gradient(each: _Exchanged) -> bool:
    grad = each.param.grad
    return grad is not None and grad.dtype is each.param.dtype and grad.layout is torch.strided


def _is_as_given(each: _Exchanged) -> bool:
    """Return whether a parameter is still its weight; the optimizer may have replaced the data."""
    weight = each.weight
    return weight is not None and (weight.is_meta or local_part(each.param).is_set_to(weight))


def _dense(tensor: Tensor, like: Tensor | None = None) -> Tensor:
    """Return a tensor without gaps in memory, laid out like ``like`` if given."""
    strides = (tensor if like is None else like).stride()
    if like is None and not tensor.is_contiguous():
        strides = torch.empty_like(tensor, device="meta").stride()
    if tensor.stride() == strides:
        return tensor
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)


def _flat(tensor: Tensor) -> Tensor:
    """Return the entries of a dense tensor in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _shaped(flat: Tensor, like: Tensor) -> Tensor:
    """Return a flat tensor in the layout of ``like``: the inverse of :func:`_flat`."""
    return flat.as_strided(like.shape, like.stride())


# --- steps in chunks of parameters ----------------------------------------------------------------


ONE_AT_A_TIME = (
    *("Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD"),
    *("Muon", "NAdam", "RAdam", "RMSprop", "Rprop", "SGD"),
)
"""PyTorch's optimizers that step each parameter independently of others: they step in chunks."""

CACHED = 1 << 20
"""Entries of a chunk on a CPU: it stays in the cache (`benchmarks/half_parameters.py`)."""
SHARE = 0.1
"""Size of a chunk on other devices, as a share of all entries: call overhead dominates there."""


def steps_one_at_a_time(optimizer: Optimizer, step: Callable[..., Any]) -> bool:
    """Return whether an optimizer is one of PyTorch's that can step in chunks."""
    kind = type(optimizer)
    # A program may have replaced the step of the class.
    modules = kind.__module__, getattr(step, "__globals__", {}).get("__name__", "")
    is_pytorch = all(module.startswith("torch.optim.") for module in modules)
    return is_pytorch and kind.__name__ in ONE_AT_A_TIME


def step_in_chunks(optimizer: Optimizer, step: Callable[[], object]) -> None:
    groups = optimizer.param_groups
    before = [group["params"] for group in groups]

    def put(chunk: list[list[Tensor]]) -> None:
        for group, params in zip(groups, chunk, strict=True):
            group["params"] = params

    def step_all() -> None:
        for chunk in chunks_of(before):
            put(chunk)
            step()

    in_any_case(step_all, lambda: put(before))


def chunks_of(groups: list[list[Tensor]]) -> Iterator[list[list[Tensor]]]:
    """Yield the parameters with a gradient, by group, in chunks of a limited size.

    DTensors count with their global size: a step may run collectives, so all ranks need the same
    chunks. They are not mixed with other tensors, which fused steps do not support.
    """
    params = [(n, p) for n, group in enumerate(groups) for p in group if p.grad is not None]
    on_cpu = all(param.device.type == "cpu" for _, param in params)
    limit = CACHED if on_cpu else max(CACHED, SHARE * sum(param.numel() for _, param in params))
    sharded = [each for each in params if is_dtensor(each[1])]
    plain = [each for each in params if not is_dtensor(each[1])]
    for alike in filter(None, (plain, sharded)):
        chunk: list[list[Tensor]] = [[] for _ in groups]
        size = 0
        for index, param in alike:
            if size > 0 and size + param.numel() > limit:
                yield chunk
                chunk, size = [[] for _ in groups], 0
            chunk[index].append(param)
            size += param.numel()
        yield chunk
