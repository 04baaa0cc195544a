"""Casts of weights, kept from one use to the next.

PyTorch's cache forgets everything when the outermost context ends, knows neither versions nor
dtypes, and shares one cast between all that use a weight, whose gradients are then added up in
lower precision. This one keeps a cast as long as the weight stays what it is, inside contexts and
between them, so that evaluation, generation and micro-batches do not cast the weights again; and
each use of a weight adds its own gradient to it, in the weight's dtype.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep import _torch

SMALL, SMALL_WITHOUT_GRADIENT = 2**17, 2**15
"""On the CPU, weights of fewer bytes are cast faster than looked up."""


class CacheInfo(NamedTuple):
    """What :func:`cache_info` returns, for the whole process.

    Attributes:
        entries: Casts that are kept.
        bytes: Their size.
        hits: How often a kept cast was used.
        misses: How often a weight was cast that the cache has a say in (gathered ones are not
            counted where there is a gradient).
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
    """What shows that a weight is still what it was.

    Attributes:
        version: Counts writes in place, except those through ``.data`` or to the storage itself.
        storage: Where the storage is described; it and the rest change with ``weight.data = ...``.
        offset: Where in the storage the weight begins.
        shape: Its shape.
        stride: Its strides.
        stream: Which stream of the device made the cast; another one does not wait for it.
    """

    version: int
    storage: int
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    stream: int


class _Kept(NamedTuple):
    """A cast, and what its weight was then."""

    marks: _Marks
    cast: Tensor
    storage: object  # a weak reference: while it lives, no other storage gets the same address


class _Entry:
    """A weight and a dtype."""

    __slots__ = ("kept", "last", "was_needed_again")

    def __init__(self) -> None:
        self.kept: _Kept | None = None
        self.last: _Marks | None = None  # when it was last cast
        self.was_needed_again = False  # with these marks


class _Casts(dict[torch.dtype, _Entry]):
    """What is known of a weight; it is an attribute of the weight, and dies with it.

    (A weak reference to the weight would stop ``torch.utils.swap_tensors``.)

    Attributes:
        is_captured: Whether a CUDA graph reads the weight; it may write to it as well, unseen.
    """

    is_captured = False

    def __reduce__(self) -> tuple[object, ...]:
        return OrderedDict, ()  # what is saved needs no casts, and no halfstep to be loaded


class WeightCache:
    """Casts of weights; safe to use from several threads (the counts may then miss some).

    A cast is kept when its weight is needed a second time unchanged, or was so before its last
    change: training with one forward pass per step keeps nothing, and so needs no more memory than
    without a cache. Nothing is kept of what is no ``nn.Parameter``, of a DTensor (not all writes to
    it are counted), of a weight that shares its memory with others (they may write to it unseen, as
    fully_shard does when it gathers), of one made in inference mode (it has no version), inside
    ``vmap`` and its like, under a dispatch mode (selective checkpointing replays ops by their
    order), and while a graph is traced or captured.
    """

    def __init__(self) -> None:
        self._attribute = f"_halfstep_casts_{id(self)}"
        self._all: dict[int, weakref.ref[_Casts]] = {}
        self._hits = self._misses = self._stale = 0
        self._max_bytes: int | None = None
        self._is_watching = False

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return ``weight`` in ``dtype``, or None where the caller is to cast it.

        Nobody may write to the result. Differentiable; gradients are not rounded to ``dtype`` on
        their way, whether the cast was kept or is new. (After ``weight.to(dtype)`` autograd would
        round them, and add up those of several uses rounded.) Sync: none.
        """
        if weight.layout is not torch.strided or weight.is_nested:
            return None
        has_gradient = weight.requires_grad and torch.is_grad_enabled()
        small = SMALL if has_gradient else SMALL_WITHOUT_GRADIENT
        if weight.nbytes < small and weight.is_cpu:
            return None
        if not torch.is_autocast_cache_enabled() or _torch.is_tracing():
            return None
        casts = weight.__dict__.get(self._attribute)
        if type(casts) is not _Casts:  # none yet, or what was saved of it
            if weight.is_inference() or weight.is_meta:
                return None
            casts = self._add(weight)
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            casts.is_captured = True
            casts.clear()
        if casts.is_captured:
            return None
        entry = casts.get(dtype) or casts.setdefault(dtype, _Entry())
        storage = weight.untyped_storage()
        marks = _marks(weight, storage)
        kept = entry.kept
        if kept is not None and kept.marks == marks and _torch.is_used_once(storage):
            entry.was_needed_again = True
            self._hits += 1
            cast = kept.cast
        else:
            cast = self._miss(entry, weight, storage, dtype, marks)
        return _torch.in_place_of(weight, cast) if has_gradient else cast

    def info(self) -> CacheInfo:
        """Return the counts."""
        kept = [entry.kept for entry in self._entries() if entry.kept is not None]
        num_bytes = sum(each.cast.nbytes for each in kept)
        return CacheInfo(
            len(kept), num_bytes, self._hits, self._misses, self._stale, self._max_bytes
        )

    def clear(self) -> None:
        """Forget all weights; the counts of hits, misses and stale casts start again."""
        for entry in self._entries():
            entry.kept, entry.last, entry.was_needed_again = None, None, False
        self._hits = self._misses = self._stale = 0

    def limit(self, max_bytes: int | None) -> None:
        """Keep no more than ``max_bytes``; what is kept is dropped if it is more."""
        self._max_bytes = max_bytes
        if max_bytes is not None and self.info().bytes > max_bytes:
            for entry in self._entries():
                entry.kept = None

    def _add(self, weight: Tensor) -> _Casts:
        if not self._is_watching:
            self._is_watching = True
            register_optimizer_step_post_hook(self._after_step)
        casts = weight.__dict__[self._attribute] = _Casts()
        key = id(casts)
        self._all[key] = weakref.ref(casts, lambda _: self._all.pop(key, None))
        return casts

    def _miss(
        self,
        entry: _Entry,
        weight: Tensor,
        storage: torch.UntypedStorage,
        dtype: torch.dtype,
        marks: _Marks,
    ) -> Tensor:
        """Cast without gradient, and decide whether to keep the cast."""
        self._misses += 1
        self._drop(entry)
        is_needed_again = entry.last == marks
        is_worth_it = is_needed_again or entry.was_needed_again
        entry.last, entry.was_needed_again = marks, is_needed_again
        if not (is_worth_it and self._has_room(weight, dtype) and _is_its_own(storage)):
            return weight.detach().to(dtype)
        with torch.inference_mode(False):  # what is made in it autograd cannot use later
            cast = weight.detach().to(dtype)
        entry.kept = _Kept(marks, cast, _torch.memory_of(weight))
        return cast

    def _has_room(self, weight: Tensor, dtype: torch.dtype) -> bool:
        if self._max_bytes is None:
            return True
        return self.info().bytes + weight.numel() * dtype.itemsize <= self._max_bytes

    def _drop(self, entry: _Entry) -> None:
        self._stale += entry.kept is not None
        entry.kept = None

    def _entries(self) -> Iterator[_Entry]:
        for casts in [ref() for ref in list(self._all.values())]:
            yield from list((casts or {}).values())

    def _after_step(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        if torch.compiler.is_compiling():  # what is compiled changes versions, whatever it does
            return
        # Most optimizers do. Fused ones do not, nor do those that write through .data.
        for group in optimizer.param_groups:
            for param in group["params"]:
                for entry in list(vars(param).get(self._attribute, {}).values()):
                    self._drop(entry)
                    entry.last = None


weights = WeightCache()
"""The casts of this process."""


def cache_info() -> CacheInfo:
    """Return what the cache of weight casts holds, and how often it was of use.

    Sync: none.

    Example:
        >>> import halfstep
        >>> clear_cache()
        >>> layer, x = torch.nn.Linear(128, 128, bias=False), torch.ones(1, 128)
        >>> with torch.no_grad():
        ...     for _ in range(5):
        ...         with halfstep.autocast("cpu", torch.bfloat16):
        ...             y = layer(x)
        >>> cache_info()
        CacheInfo(entries=1, bytes=32768, hits=3, misses=2, stale=0, max_bytes=None)
    """
    return weights.info()


def clear_cache() -> None:
    """Forget all casts of weights: after writing to weights unseen, or to free memory.

    The cache sees by itself what PyTorch counts (writes in place, ``load_state_dict``), steps of
    optimizers, and ``weight.data = ...``. It cannot see ``weight.data.copy_(...)``, and writes
    through arrays or other views that are gone when the weight is used again.

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


def _marks(weight: Tensor, storage: torch.UntypedStorage) -> _Marks:
    return _Marks(
        weight._version,
        storage._cdata,
        int(weight.storage_offset()),
        weight.shape,
        weight.stride(),
        _torch.stream_of(weight),
    )


def _is_its_own(storage: torch.UntypedStorage) -> bool:
    """Say whether nothing but the weight has its memory: no tensor, no array, no process."""
    # Memory of others, such as that of arrays, cannot be resized.
    return _torch.is_used_once(storage) and storage.resizable() and not storage.is_shared()
