"""Casts of weights, kept from one use to the next.

PyTorch's cache forgets everything when the outermost context ends, knows neither versions nor
dtypes, and shares one cast between all that use a weight, whose gradients are then added up in
lower precision. This one keeps a cast as long as the weight stays what it is, inside contexts and
between them, so that evaluation, generation and micro-batches do not cast the weights again; and
each use of a weight adds its own gradient to it, in the weight's dtype.
"""

from __future__ import annotations

import threading
import weakref
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep import _torch

SMALL = 2**17
"""With a gradient and on the CPU, weights of fewer bytes are cast faster than looked up."""


class CacheInfo(NamedTuple):
    """What :func:`cache_info` returns, for the whole process.

    Attributes:
        entries: Casts that are kept.
        bytes: Their size.
        hits: How often a kept cast was used.
        misses: How often a weight was cast.
        stale: How often a kept cast was of no use, since its weight had changed.
        max_bytes: The limit, None for none.
    """

    entries: int
    bytes: int
    hits: int
    misses: int
    stale: int
    max_bytes: int | None


class _Marks(NamedTuple):
    """What a weight is known to be unchanged by.

    Attributes:
        version: Counts writes in place, except those through ``.data`` or another storage.
        address: Changes with ``weight.data = ...``.
        steps: Counts steps of optimizers, which may write through ``.data``. Frozen weights: -1.
        stream: Which stream of the device made the cast; another one does not wait for it.
    """

    version: int
    address: int
    steps: int
    stream: int


class _Entry:
    """A weight: its marks when it was last needed, and its cast if that is kept."""

    __slots__ = ("is_reused", "kept", "marks", "weight")

    def __init__(self, weight: weakref.ref[Tensor]) -> None:
        self.weight = weight
        self.marks: _Marks | None = None
        self.is_reused = False  # with these marks
        self.kept: Tensor | None = None


class WeightCache:
    """Casts of weights; safe to use from several threads.

    A cast is kept when its weight is needed a second time unchanged, or was so before its last
    change: training with one forward pass per step keeps nothing, and so needs no more memory than
    without a cache. Nothing is kept of what is no ``nn.Parameter``, of a weight that shares its
    storage with other tensors (they may write to it unseen), of one made in inference mode (it has
    no version), inside ``vmap`` and its like, and while a graph is traced or captured.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[int, torch.dtype], _Entry] = {}
        self._lock = threading.RLock()  # whoever holds it may free a weight, which calls _forget
        self._bytes = self._hits = self._misses = self._stale = 0
        self._max_bytes: int | None = None

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return ``weight`` in ``dtype``, or None where the caller is to cast it.

        Differentiable; gradients are not rounded to ``dtype`` on their way, whether the cast was
        kept or is new. (After ``weight.to(dtype)`` autograd would round them, and add up those of
        several uses rounded.) Sync: none.
        """
        has_gradient = weight.requires_grad and torch.is_grad_enabled()
        if has_gradient and weight.nbytes < SMALL and weight.is_cpu:
            return None
        if not _is_usable(weight):
            return None
        entry = self._entries.get((id(weight), dtype))
        # The weak reference tells a weight from a later one at the same address.
        if entry is None or entry.weight() is not weight:
            if weight.is_inference() or weight.dim() == 0:
                return None
            entry = self._add(weight, dtype)
        marks = _marks(weight)
        if (cast := entry.kept) is not None and entry.marks == marks:
            entry.is_reused = True
            self._hits += 1
        else:
            cast = self._miss(entry, weight, dtype, marks)
        return _torch.in_place_of(weight, cast) if has_gradient else cast

    def info(self) -> CacheInfo:
        """Return the counts."""
        with self._lock:
            entries = sum(entry.kept is not None for entry in self._entries.values())
            return CacheInfo(
                entries, self._bytes, self._hits, self._misses, self._stale, self._max_bytes
            )

    def clear(self) -> None:
        """Forget all weights; the counts of hits, misses and stale casts start again."""
        with self._lock:
            self._entries.clear()
            self._bytes = self._hits = self._misses = self._stale = 0

    def limit(self, max_bytes: int | None) -> None:
        """Keep no more than ``max_bytes``; what is kept is dropped if it is more."""
        with self._lock:
            self._max_bytes = max_bytes
            if max_bytes is not None and self._bytes > max_bytes:
                for entry in self._entries.values():
                    self._drop(entry)

    def _add(self, weight: Tensor, dtype: torch.dtype) -> _Entry:
        _watch_optimizers()
        key = (id(weight), dtype)
        with self._lock:
            entry = _Entry(weakref.ref(weight, lambda _: self._forget(key, entry)))
            self._entries[key] = entry
        return entry

    def _miss(self, entry: _Entry, weight: Tensor, dtype: torch.dtype, marks: _Marks) -> Tensor:
        """Cast without gradient, and decide whether to keep the cast."""
        with self._lock:
            self._misses += 1
            self._stale += entry.kept is not None
            self._drop(entry)
            is_reused = entry.marks == marks
            is_worth_it = is_reused or entry.is_reused
            entry.marks, entry.is_reused = marks, is_reused
            if not (is_worth_it and self._has_room(weight, dtype) and _torch.owns_storage(weight)):
                return weight.detach().to(dtype)
            with torch.inference_mode(False):  # what is made in it autograd cannot use later
                entry.kept = weight.detach().to(dtype)
            self._bytes += entry.kept.nbytes
            return entry.kept

    def _has_room(self, weight: Tensor, dtype: torch.dtype) -> bool:
        if self._max_bytes is None:
            return True
        return self._bytes + weight.numel() * dtype.itemsize <= self._max_bytes

    def _drop(self, entry: _Entry) -> None:
        if entry.kept is not None:
            self._bytes -= entry.kept.nbytes
            entry.kept = None

    def _forget(self, key: tuple[int, torch.dtype], entry: _Entry) -> None:
        with self._lock:
            if self._entries.get(key) is entry:
                self._drop(entry)
                del self._entries[key]


weights = WeightCache()
"""The casts of this process."""


def cache_info() -> CacheInfo:
    """Return what the cache of weight casts holds, and how often it was of use.

    Sync: none.

    Example:
        >>> import halfstep
        >>> clear_cache()
        >>> layer, x = torch.nn.Linear(4, 4, bias=False), torch.ones(1, 4)
        >>> with torch.no_grad():
        ...     for _ in range(5):
        ...         with halfstep.autocast("cpu", torch.bfloat16):
        ...             y = layer(x)
        >>> cache_info()
        CacheInfo(entries=1, bytes=32, hits=3, misses=2, stale=0, max_bytes=None)
    """
    return weights.info()


def clear_cache() -> None:
    """Forget all casts of weights: after writing to weights through ``.data``, or to free memory.

    The cache sees changes by optimizers, ``load_state_dict``, writes in place and
    ``weight.data = ...`` by itself. ``weight.data.copy_(...)``, outside of an optimizer's step,
    is the one that PyTorch does not count.

    Sync: none.

    Example:
        >>> clear_cache()
        >>> cache_info().bytes
        0
    """
    weights.clear()


def limit_cache(max_bytes: int | None) -> None:
    """Let the cache keep casts of no more than ``max_bytes``; None for no limit, 0 for no casts.

    When it is full, the casts in it stay and others are made anew each time: in a loop over all
    weights, the one that was used longest ago is the next to be needed.

    Raises:
        ValueError: ``max_bytes`` is negative.
        TypeError: It is neither an int nor None.

    Sync: none.

    Example:
        >>> limit_cache(2 * 2**30)  # 2 GiB
        >>> cache_info().max_bytes
        2147483648
        >>> limit_cache(None)
    """
    if max_bytes is not None and (not isinstance(max_bytes, int) or isinstance(max_bytes, bool)):
        raise TypeError(f"limit_cache takes a number of bytes or None, got {max_bytes!r}")
    if max_bytes is not None and max_bytes < 0:
        raise ValueError(f"limit_cache: max_bytes is 0 or more, or None, got {max_bytes}")
    weights.limit(max_bytes)


def _is_usable(weight: Tensor) -> bool:
    # A captured CUDA graph reads the weights anew in each replay.
    return (
        torch.is_autocast_cache_enabled()
        and not _torch.is_tracing()
        and not (weight.is_cuda and torch.cuda.is_current_stream_capturing())
    )


def _marks(weight: Tensor) -> _Marks:
    steps = _steps if weight.requires_grad else -1
    return _Marks(weight._version, weight.data_ptr(), steps, _torch.stream_of(weight))


_steps = 0


@cache
def _watch_optimizers() -> None:
    register_optimizer_step_post_hook(_count_step)


def _count_step(*_: Any) -> None:
    global _steps
    _steps += 1
