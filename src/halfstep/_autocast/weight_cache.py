"""Cached casts of weights, used only while the weight is known to be unchanged.

Like PyTorch's cache, this one ends with the outermost context. But PyTorch's checks neither
versions nor dtypes, and shares one cast between all uses of a weight, whose gradients are then
summed in lower precision. Here each use of a weight adds its own gradient to it, in the weight's
dtype.

Some writes cannot be detected: ``weight.data`` has its own version counter. So no cast outlives
its context.
"""

from __future__ import annotations

import functools
import threading

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from halfstep._pytorch import amp, modes, storages

SMALL = 2**17  # size in bytes below which casting a weight on the CPU is faster than a lookup

# --- the casts of one weight ----------------------------------------------------------------------


_Marks = tuple[object, ...]


def _marks(weight: Tensor) -> _Marks:
    """Return values that change when a weight may have changed."""
    return (
        weight._version,  # ignores writes through ``.data`` or to the storage itself
        # Like the next three it changes with ``weight.data = ...``.
        storages.number_of(weight.untyped_storage()),
        weight.storage_offset(),
        weight.shape,
        weight.stride(),
        # The stream that made the cast; other streams do not wait for it.
        0 if weight.is_cpu else storages.stream_of(weight),
    )


class _Entry:
    __slots__ = ("cast", "marks", "storage")

    def __init__(self) -> None:
        self.marks: _Marks | None = None  # of the weight at the last cast
        self.cast: Tensor | None = None  # if it was kept
        self.storage: object = None  # a weak reference, which keeps the address from being reused


class Casts(dict[torch.dtype, _Entry]):
    """The casts of one weight, for :func:`cast_in_context` from its second use in a context on.

    So training with one forward pass per context keeps nothing. Nor are casts kept of a weight that
    shares memory with others: they may write to it undetected, as fully_shard does when it gathers.
    """

    _is_captured = False
    """Whether a CUDA graph reads the weight; the graph may also write to it, undetected."""

    def cast(self, weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        """Return the weight in ``dtype``, or None if the caller must cast it.

        The result must not be written to. Differentiable; gradients are not rounded to ``dtype``,
        whether or not the cast was kept. (With ``weight.to(dtype)`` autograd would round them, and
        sum those of several uses rounded.) Sync: none.
        """
        self.note_capture(weight)
        if self._is_captured:
            return None
        entry = self.setdefault(dtype, _Entry())
        marks, cast = _marks(weight), entry.cast
        if cast is None or entry.marks != marks or not storages.is_used_once(weight):
            cast = self._cast_anew(entry, weight, dtype, marks)
        return storages.computed_from(weight, cast) if torch.is_grad_enabled() else cast

    def note_capture(self, weight: Tensor) -> None:
        """Keep no cast from now on if a CUDA graph is being captured."""
        if weight.is_cuda and torch.cuda.is_current_stream_capturing():
            self._is_captured = True
            self.clear()

    def _cast_anew(
        self, entry: _Entry, weight: Tensor, dtype: torch.dtype, marks: _Marks
    ) -> Tensor:
        """Cast without gradient; keep the cast if the weight is the same as at the last one."""
        is_unchanged = entry.marks in (None, marks)
        entry.marks, entry.cast, entry.storage = marks, None, None
        cast = weight.detach().to(dtype)
        if is_unchanged and _is_its_own(weight):
            entry.cast, entry.storage = cast, storages.memory_of(weight)
        return cast


def _is_its_own(weight: Tensor) -> bool:
    """Return whether only the weight uses its memory: no tensor, array or process shares it."""
    if not storages.is_used_once(weight):
        return False
    storage = weight.untyped_storage()
    if not storage.resizable():  # an array's
        return False
    # PyTorch calls all memory of a GPU shared (torch/csrc/StorageSharing.cpp, isShared).
    return storage.device.type != "cpu" or not storage.is_shared()


# --- the casts of a context -----------------------------------------------------------------------


class _UsedWeights(threading.local):
    """The weights cast in the outermost context of a thread, by ``id``, with their casts.

    The weights get no attributes, which would be copied and saved, and no weak references, which
    would block ``torch.utils.swap_tensors``.
    """

    def __init__(self) -> None:
        self.casts: dict[int, tuple[Tensor, Casts]] = {}
        self.is_on = False  # whether the innermost context of halfstep asks to keep casts


used = _UsedWeights()


def is_on() -> bool:
    """Return whether casts are to be kept in this thread.

    PyTorch's switch is off in the contexts of halfstep: its cache may be stale, and sums gradients
    in lower precision.
    """
    return used.is_on or torch.is_autocast_cache_enabled()


def cast_in_context(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Return :meth:`Casts.cast` of a weight, for the outermost context of this thread.

    It keeps no more than torch.autocast does: casts of float32 parameters that require a gradient,
    outside of inference mode; and none inside ``vmap`` and the like, under a dispatch mode
    (selective checkpointing replays ops in order), or during tracing. PyTorch casts at the first
    use, in less time: most weights are used once in training. Sync: none.
    """
    is_plain = weight.layout is torch.strided and not weight.is_nested
    if not is_plain or (weight.is_cpu and weight.nbytes < SMALL):
        return None
    if id(weight) not in used.casts:
        used.casts[id(weight)] = weight, Casts()
        used.casts[id(weight)][1].note_capture(weight)
        return None
    is_outside = torch.is_inference_mode_enabled() or weight.is_inference() or weight.is_meta
    is_kept = weight.requires_grad and weight.dtype is torch.float32 and weight.is_leaf
    if is_outside or not is_kept or not is_on() or modes.is_tracing():
        return None
    return used.casts[id(weight)][1].cast(weight, dtype)


def clear() -> None:
    """Free the casts of this thread, at the end of its outermost context."""
    used.casts.clear()


# --- writes that change no mark -------------------------------------------------------------------


@functools.cache
def follow_writes() -> None:
    """Drop casts when PyTorch's are cleared and after optimizer steps; installed only once."""
    amp.call_when_cache_is_cleared(clear)
    register_optimizer_step_post_hook(_forget_stepped)


def _forget_stepped(optimizer: Optimizer, *_: object) -> None:
    """Drop the casts of weights that fused optimizers, or writes to ``.data``, have changed."""
    if torch.compiler.is_compiling():  # compiled steps always bump versions
        return
    for group in optimizer.param_groups:
        for weight in group["params"]:
            if id(weight) in used.casts:
                used.casts[id(weight)][1].clear()
