"""What a step takes in float32, in lower precision, and with islands."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from statistics import median
from typing import Any

import torch

from halfstep._trace.trace import trace
from halfstep._tune.passes import Bench
from halfstep._tune.task import Task
from halfstep._tune.watching import Phase, hooked

STEP = "(step)"
"""Stands for a whole step among the names of modules."""


def timed_step(bench: Bench, scale: float, *, lowered: bool) -> dict[str, float]:
    """Run a step and return its seconds, and those in the forward passes of its modules.

    Sync: several for each module, on an accelerator.
    """
    now = _clock(bench.task.device(bench.batch))
    seconds: dict[str, float] = {}
    begin = now()
    bench.step(_stopwatch(bench.task, seconds, now), lowered=lowered, scale=scale)
    return {STEP: now() - begin, **seconds}


def medians(runs: list[dict[str, float]]) -> dict[str, float]:
    """Return the median of each number over several runs.

    Example:
        >>> medians([{"a": 1.0}, {"a": 9.0}, {"a": 2.0}])
        {'a': 2.0}
    """
    return {name: median(run[name] for run in runs if name in run) for name in runs[0]}


def casts_of(bench: Bench, scale: float) -> tuple[int, int]:
    """Run a step in lower precision and return the number of casts, and their bytes."""
    with trace(bench.task.model) as traced:
        bench.step(_stopwatch(bench.task, {}, time.perf_counter), lowered=True, scale=scale)
    casts = [cast for row in traced.ops for cast in row.casts]
    return len(casts), sum(cast.bytes for cast in casts)


def ops_of(bench: Bench, scale: float) -> dict[str, list[str]]:
    """Run a step in lower precision and return the ops that ran in it in the forward pass.

    By module, with the names that rules have for them; an op belongs to the innermost module. Of
    those outside of all modules, what a rule has lowered is left out: a rule that keeps it in
    float32 would do so in all modules.
    """
    with trace(bench.task.model) as traced:
        bench.step(_stopwatch(bench.task, {}, time.perf_counter), lowered=True, scale=scale)
    found: dict[str, dict[str, None]] = {}
    low = str(bench.lowering.dtype).removeprefix("torch.")
    for row in traced.ops:
        is_meant = row.phase == "forward" and row.compute == low
        if is_meant and (row.module or row.action != "lower"):
            found.setdefault(row.module, {})[row.name] = None
    return {module: list(names) for module, names in found.items()}


@contextmanager
def _stopwatch(task: Task, seconds: dict[str, float], now: Callable[[], float]) -> Iterator[Phase]:
    begun: dict[tuple[str, int], float] = {}

    def before(name: str, call: int, _: Any) -> None:
        begun[name, call] = now()

    def after(name: str, call: int, _: Any) -> None:
        seconds[name] = seconds.get(name, 0.0) + now() - begun[name, call]

    watch: AbstractContextManager[Phase] = hooked(task, before, after)
    with watch as phase:
        yield phase


def _clock(device: str) -> Callable[[], float]:
    """Return a clock that waits for the device."""
    if device == "cpu":
        return time.perf_counter

    def now() -> float:
        torch.get_device_module(device).synchronize()
        return time.perf_counter()

    return now
