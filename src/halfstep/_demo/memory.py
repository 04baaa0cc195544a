"""The most memory that a piece of training needs, counted in the same way for every precision."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from halfstep._autocast.casts import tensors_in
from halfstep._pytorch import modes, storages


def peak_memory(device: str, work: Callable[[], object]) -> int:
    """Run ``work`` and return the largest number of bytes that its tensors took at one moment.

    On CUDA it is what the allocator reports. The CPU has no such counter, and the largest resident
    size of a process never shrinks from one run to the next; so the live tensors are counted.
    Scratch space inside a CPU kernel is no tensor and is left out.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        work: makes everything it uses, so that all of it is counted.
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return int(torch.cuda.max_memory_allocated()) - before
    live = _LiveTensors()
    with live:
        work()
    return live.peak


class _LiveTensors(modes.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages that ops return, for as long as each of them is alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in([result]):
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storages.number_of(storage), storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            del self._alive[key]
            self._now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self._now += size
        self.peak = max(self.peak, self._now)
