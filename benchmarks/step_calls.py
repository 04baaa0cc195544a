"""What a step costs the host beside torch.amp's: Python calls and dispatched ops.

No clock: the figures are the same in every run. With ``--time`` a table of times follows, of paired
rounds on one thread. One iteration is ``scale``, ``step``, ``update`` of
12 parameters of 64 x 64 on the CPU; with clipping, ``step(max_norm=)`` beside ``unscale_`` and
``torch.nn.utils.clip_grad_norm_``. ``--buffers`` prints instead what it costs that a skipped step
restores the buffers of its module: ops, bytes, and the time of a step of a small CNN to that of one
that no scaler watches.

    python benchmarks/step_calls.py [--time | --buffers]
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from halfstep._gradients import scalars
from halfstep._pytorch import modes

WARM_UP = 20
"""The first steps of an optimizer are measured to notice clipping before unscaling."""


NUM_ROUNDS, NUM_ITERATIONS = 60, 50


@dataclass(frozen=True)
class Cost:
    """What one iteration costs.

    Attributes:
        calls: Calls of Python functions, those of the optimizer included.
        ops: Ops dispatched.
    """

    calls: int
    ops: int


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
    calls = 0

    def see(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    sys.setprofile(see)
    iterate()
    sys.setprofile(None)
    with _Ops() as ops:
        iterate()
    return Cost(calls, ops.count)


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


# --- buffers --------------------------------------------------------------------------------------


def resnet() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return a model with the 53 batch norms of a ResNet-50, of a quarter of its width."""
    widths = [16] * 7 + [64] * 4 + [32] * 8 + [128] * 5 + [64] * 12 + [256] * 7 + [128] * 6
    widths += [512] * 4
    layers: list[torch.nn.Module] = []
    for before, after in zip([3, *widths], widths, strict=False):
        layers += [torch.nn.Conv2d(before, after, 1), torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers), torch.randn(2, 3, 2, 2)


def small_cnn() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return three convolutions with batch norm, and 32 images of 32 x 32."""
    layers: list[torch.nn.Module] = []
    for before, after in ((3, 32), (32, 64), (64, 128)):
        conv = torch.nn.Conv2d(before, after, 3, stride=2, padding=1)
        layers += [conv, torch.nn.BatchNorm2d(after), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers), torch.randn(32, 3, 32, 32)


class _Block(torch.nn.Module):
    """A layer of a transformer with a causal mask of its own, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, dropout=0.0)
        self.register_buffer("mask", torch.full((256, 256), -torch.inf).triu(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, src_mask=self.mask)


def transformer() -> tuple[torch.nn.Module, torch.Tensor]:
    """Return six layers of a transformer, each with a mask of 256 x 256."""
    return torch.nn.Sequential(*(_Block() for _ in range(6))), torch.randn(1, 256, 128)


def _training(
    make: Callable[[], tuple[torch.nn.Module, torch.Tensor]], *, watches: bool, fused: bool
) -> tuple[torch.nn.Module, Callable[[float], None]]:
    torch.manual_seed(0)
    model, x = make()
    optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    scaler = halfstep.GradScaler(
        init_scale=8.0, module=model if watches else None, on_skips=lambda report: None
    )

    def iterate(factor: float = 1.0) -> None:
        optimizer.zero_grad()
        scaler.scale(model(x * factor).square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, iterate


def _buffer_ops(make: Any, *, fused: bool, factor: float, waits: bool) -> int:
    """Return the number of ops of an iteration beyond those of one whose module is not watched."""
    counts = []
    before, unseen = set(scalars.READABLE), modes.unseen_by_modes
    for watches in (True, False):
        _, iterate = _training(make, watches=watches, fused=fused)
        iterate()
        iterate()
        modes.unseen_by_modes = nullcontext
        if waits:
            scalars.READABLE.clear()
        with _Ops() as ops:
            iterate(factor)
        scalars.READABLE.update(before)
        modes.unseen_by_modes = unseen
        counts.append(ops.count)
    return counts[0] - counts[1]


def print_buffers() -> None:
    """Print what it costs to save and restore buffers."""
    torch.set_num_threads(1)
    print("| model | buffers | saved | ops: taken | skipped | fused, accelerator |")
    print("|---|---|---|---|---|---|")
    for make in (small_cnn, resnet, transformer):
        ops = [
            _buffer_ops(make, fused=False, factor=1.0, waits=False),
            _buffer_ops(make, fused=False, factor=torch.nan, waits=False),
            _buffer_ops(make, fused=True, factor=1.0, waits=True),
        ]
        buffers = list(make()[0].buffers())
        size = sum(buffer.nbytes for buffer in buffers) / 1024
        row = (make.__name__, len(buffers), f"{size:.0f} KiB", *ops)
        print(f"| {' | '.join(map(str, row))} |")
    _, watched = _training(small_cnn, watches=True, fused=False)
    _, other = _training(small_cnn, watches=False, fused=False)
    ratios = []
    for number in range(NUM_ROUNDS):
        times = {}
        for iterate in (watched, other) if number % 2 else (other, watched):
            start = time.perf_counter()
            iterate()
            times[iterate] = time.perf_counter() - start
        ratios.append(times[watched] / times[other])
    low, middle, high = statistics.quantiles(ratios[5:], n=4)
    print(f"time of a step of small_cnn, watched to not: {middle:.3f} ({low:.3f}-{high:.3f})")


def main() -> None:
    """Print the tables."""
    if "--buffers" in sys.argv[1:]:
        print_buffers()
        return
    print("| step | Python calls, torch.amp's | ratio | ops, torch.amp's |")
    print("|---|---|---|---|")
    for fused in (False, True):
        for clips in (False, True):
            ours = cost(halfstep.GradScaler, fused=fused, clips=clips)
            theirs = cost(torch.amp.GradScaler, fused=fused, clips=clips)
            name = ("fused" if fused else "plain") + (" + clip" if clips else "")
            ratio = f"{ours.calls / theirs.calls:.2f}"
            print(f"| {name} | {ours.calls}, {theirs.calls} | {ratio} | {ours.ops}, {theirs.ops} |")
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
