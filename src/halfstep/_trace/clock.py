"""How long ops take: on the host's clock for the CPU, by events for CUDA."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Clock:
    """Times, by the numbers they were taken under."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._events: dict[int, tuple[torch.cuda.Event, torch.cuda.Event]] = {}

    @contextmanager
    def taken(self, number: int, device: str) -> Iterator[None]:
        """Time a block that runs on a device type. Sync: none."""
        if device == "cuda":
            begin, end = self._events[number] = _event(), _event()
            begin.record()
            try:
                yield
            finally:
                end.record()
        else:
            begun = time.perf_counter()
            try:
                yield
            finally:
                self._seconds[number] = time.perf_counter() - begun

    def read(self) -> dict[int, float]:
        """Return all times in seconds. Sync: waits for every event that was not read yet."""
        for number, (begin, end) in self._events.items():
            end.synchronize()
            self._seconds[number] = begin.elapsed_time(end) / 1e3
        self._events.clear()
        return self._seconds


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
