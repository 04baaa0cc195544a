"""What a step costs the host beside torch.amp's: Python calls, dispatched ops, files that run.

No clock: the figures are the same in every run. With ``--time`` a table of times follows, of paired
rounds on one thread. One iteration is ``scale``, ``step``, ``update`` of
12 parameters of 64 x 64 on the CPU; with clipping, ``step(max_norm=)`` beside ``unscale_`` and
``torch.nn.utils.clip_grad_norm_``.

    python benchmarks/step_calls.py [--time]
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep

WARM_UP = 20
"""The first steps of an optimizer are measured to notice clipping before unscaling."""


NUM_ROUNDS, NUM_ITERATIONS = 60, 50


@dataclass(frozen=True)
class Cost:
    """What one iteration costs.

    Attributes:
        calls: Calls of Python functions, those of the optimizer included.
        ops: Ops dispatched.
        files: Files of halfstep that run.
    """

    calls: int
    ops: int
    files: frozenset[str]


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not str(func).startswith("profiler")
        return func(*args, **(kwargs or {}))


def cost(make_scaler: Callable[..., Any], *, fused: bool, clips: bool) -> Cost:
    """Return what one iteration costs."""
    iterate = _iteration(make_scaler, fused=fused, clips=clips)
    for _ in range(WARM_UP):
        iterate()
    calls, files = 0, set()

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        if event == "call":
            calls += 1
            _, inside, file = frame.f_code.co_filename.rpartition(f"{os.sep}halfstep{os.sep}")
            if inside:
                files.add(file)

    sys.setprofile(see)
    iterate()
    sys.setprofile(None)
    with _Ops() as ops:
        iterate()
    return Cost(calls, ops.count, frozenset(files))


def _iteration(make_scaler: Callable[..., Any], *, fused: bool, clips: bool) -> Callable[[], None]:
    params = [torch.nn.Parameter(torch.randn(64, 64)) for _ in range(12)]
    optimizer = torch.optim.AdamW(params, fused=fused, foreach=None if fused else True)
    scaler = make_scaler("cpu", init_scale=1024.0, growth_interval=10**6)
    for param in params:
        param.grad = torch.randn_like(param)
    is_ours = isinstance(scaler, halfstep.GradScaler)

    def iterate() -> None:
        scaler.scale(torch.ones(()))
        if clips and is_ours:
            scaler.step(optimizer, max_norm=1.0)
        else:
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
        scaler.update()

    return iterate


def time_ratios(*, fused: bool, clips: bool) -> tuple[float, list[float]]:
    """Return the milliseconds of an iteration of ours, and ratios to torch.amp's, a round each."""
    ours = _iteration(halfstep.GradScaler, fused=fused, clips=clips)
    theirs = _iteration(torch.amp.GradScaler, fused=fused, clips=clips)
    times: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for number in range(NUM_ROUNDS):
        for iterate in (ours, theirs) if number % 2 else (theirs, ours):
            start = time.perf_counter()
            for _ in range(NUM_ITERATIONS):
                iterate()
            times[iterate].append((time.perf_counter() - start) / NUM_ITERATIONS)
    ratios = [mine / other for mine, other in zip(times[ours], times[theirs], strict=True)]
    return 1e3 * statistics.median(times[ours]), ratios


def main() -> None:
    """Print the tables."""
    print("| step | files | Python calls, torch.amp's | ratio | ops, torch.amp's |")
    print("|---|---|---|---|---|")
    for fused in (False, True):
        for clips in (False, True):
            ours = cost(halfstep.GradScaler, fused=fused, clips=clips)
            theirs = cost(torch.amp.GradScaler, fused=fused, clips=clips)
            name = ("fused" if fused else "plain") + (" + clip" if clips else "")
            ratio = f"{ours.calls / theirs.calls:.2f}"
            print(
                f"| {name} | {len(ours.files)} | {ours.calls}, {theirs.calls} | {ratio} | "
                f"{ours.ops}, {theirs.ops} |"
            )
    if "--time" not in sys.argv[1:]:
        return
    torch.set_num_threads(1)
    print("\n| step | ms | to torch.amp's: median, quartiles |\n|---|---|---|")
    for fused in (False, True):
        for clips in (False, True):
            name = ("fused" if fused else "plain") + (" + clip" if clips else "")
            milliseconds, ratios = time_ratios(fused=fused, clips=clips)
            low, middle, high = statistics.quantiles(ratios, n=4)
            print(f"| {name} | {milliseconds:.3f} | {middle:.3f} ({low:.3f}-{high:.3f}) |")


if __name__ == "__main__":
    main()
