"""Casts of weights that are kept, and served only while a weight is seen to be what it was.

PyTorch's cache ends with the outermost context, as this one does, but knows neither versions nor
dtypes, and shares one cast between all uses of a weight, whose gradients are then added up in lower
precision. Here each use of a weight adds its own gradient to it, in the weight's dtype.

Some writes cannot be seen: ``weight.data`` has a version counter of its own. So casts outlive a
context only for the models that :class:`halfstep.hold_casts` names, whose weights it watches.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._pytorch import modes, storages

SMALL = 2**17
"""On the CPU, weights of fewer bytes are cast faster than looked up."""


def is_small(weight: Tensor) -> bool:
    """Return whether a weight is cast faster than its cast is looked up."""
    is_plain = weight.is_cpu and weight.layout is torch.strided and not weight.is_nested
    return is_plain and weight.nbytes < SMALL


def can_be_kept(weight: Tensor) -> bool:
    """Return whether casts of a weight may be kept and served now.

    Not where the cache is off, inside ``vmap`` and its like, under a dispatch mode (selective
    checkpointing replays ops by their order), and while a graph is traced.
    """
    return (
        weight.layout is torch.strided
        and not weight.is_nested
        and not is_small(weight)
        and torch.is_autocast_cache_enabled()
        and not modes.is_tracing()
    )


# --- the casts of one weight ----------------------------------------------------------------------


class _Marks(NamedTuple):
    """Signs that a weight is still what it was."""

    version: int
    """Counts writes in place, except those through ``.data`` or to the storage itself."""
    storage: int
    """Where the storage is described; it and the next three change with ``weight.data = ...``."""
    offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    stream: int
    """Which stream of the device made the cast; another one does not wait for it."""


def _marks(weight: Tensor) -> _Marks:
    marks = (
        weight._version,
        storages.number_of(weight.untyped_storage()),
        weight.storage_offset(),
        weight.shape,
        weight.stride(),
        0 if weight.is_cpu else storages.stream_of(weight),
    )
    return tuple.__new__(_Marks, marks)  # in half the time of _Marks(...)


class _Kept(NamedTuple):
    """A cast, and what its weight was then."""

    marks: _Marks
    cast: Tensor
    storage: object  # a weak reference: while it lives, no other storage gets the same address


class _Entry:
    """A weight and a dtype."""

    __slots__ = ("kept", "last")

    def __init__(self) -> None:
        self.kept: _Kept | None = None
        self.last: _Marks | None = None  # when it was last cast


class Casts(dict[torch.dtype, _Entry]):
    """The casts of one weight, in a context: kept from the second unchanged use on.

    So training with one forward pass per context keeps nothing. Nor is anything kept of a weight
    that shares its memory with others: they may write to it unseen, as fully_shard does when it
    gathers.
    """

    _num_forgotten = 0
    """How often they were forgotten; another thread may be casting meanwhile."""

    _is_captured = False
    """Whether a CUDA graph reads the weight; it may write to it as well, unseen."""

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the weight in ``dtype``, or None where the caller is to cast it.

        Nobody may write to the result. Differentiable; gradients are not rounded to ``dtype`` on
        their way, whether the cast was kept or is new. (After ``weight.to(dtype)`` autograd would
        round them, and add up those of several uses rounded.) Sync: none.
        """
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            self._is_captured = True
            self.forget()
        if self._is_captured:
            return None
        entry = self.get(dtype) or self.setdefault(dtype, _Entry())
        marks, kept = _marks(weight), entry.kept
        if kept is not None and kept.marks == marks and storages.is_used_once(weight):
            cast = kept.cast
        else:
            cast = self._cast_anew(entry, weight, dtype, marks)
        has_gradient = weight.requires_grad and torch.is_grad_enabled()
        return storages.in_place_of(weight, cast) if has_gradient else cast

    def _cast_anew(
        self, entry: _Entry, weight: Tensor, dtype: torch.dtype, marks: _Marks
    ) -> Tensor:
        """Cast without gradient, and decide whether to keep the cast."""
        self._drop(entry)
        is_worth_it = self._is_worth_keeping(weight.numel() * dtype.itemsize, entry.last == marks)
        entry.last, num_forgotten = marks, self._num_forgotten
        if not (is_worth_it and _is_its_own(weight)):
            return weight.detach().to(dtype)
        with torch.inference_mode(False):  # what is made in it autograd cannot use later
            cast = weight.detach().to(dtype)
        # Else another thread may have written to it meanwhile.
        if self._num_forgotten == num_forgotten:
            self._keep(entry, _Kept(marks, cast, storages.memory_of(weight)))
        return cast

    def forget(self) -> None:
        """Forget them: the weight was written to, or may have been."""
        self._num_forgotten += 1
        for entry in list(self.values()):
            self._drop(entry)
            entry.last = None

    def _is_worth_keeping(self, num_bytes: int, is_unchanged: bool) -> bool:
        return is_unchanged

    def _keep(self, entry: _Entry, kept: _Kept) -> None:
        entry.kept = kept

    def _drop(self, entry: _Entry) -> None:
        entry.kept = None


def _is_its_own(weight: Tensor) -> bool:
    """Return whether nothing but the weight has its memory: no tensor, no array, no process."""
    if not storages.is_used_once(weight):
        return False
    storage = weight.untyped_storage()
    return storage.resizable() and not storage.is_shared()  # memory of arrays cannot be resized


# --- the casts of a context -----------------------------------------------------------------------


class _Thread(threading.local):
    """The weights that were cast in the outermost context of a thread, by ``id``, and their casts.

    Nothing is noted on the weights, which others copy and save, and no weak reference is made,
    which would stop ``torch.utils.swap_tensors``.
    """

    def __init__(self) -> None:
        self.casts: dict[int, tuple[Tensor, Casts]] = {}


_thread = _Thread()


def cast(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Do what :meth:`Casts.cast` does, for the outermost context of this thread.

    No more is kept than torch.autocast keeps: casts of float32 parameters that require a gradient,
    outside of inference mode. Sync: none.
    """
    if not (can_be_kept(weight) and _is_kept_by_torch(weight)):
        return None
    casts = _thread.casts
    if id(weight) not in casts:
        casts[id(weight)] = weight, Casts()
    return casts[id(weight)][1].cast(weight, dtype)


def _is_kept_by_torch(weight: Tensor) -> bool:
    return (
        weight.requires_grad
        and weight.dtype is torch.float32
        and weight.is_leaf
        and not (torch.is_inference_mode_enabled() or weight.is_inference() or weight.is_meta)
    )


def forget(weight: Tensor) -> None:
    """Forget the casts of a weight that was written to."""
    if id(weight) in _thread.casts:
        _thread.casts[id(weight)][1].forget()


def clear() -> None:
    """Free the casts of this thread: its outermost context ends."""
    if _thread.casts:
        _thread.casts.clear()
