"""What a step costs the host beside torch.amp's: Python calls and dispatched ops.

No clock: the figures are the same in every run. torch.amp's scaler runs in a process of its own
(``baseline.py``). One iteration is ``scale``, ``step``, ``update`` of 12 parameters of 64 x 64;
with clipping, ``step(max_norm=)`` beside ``unscale_`` and ``torch.nn.utils.clip_grad_norm_``, or
these in both. With ``--time`` a table of times follows, of rounds in turn on one thread; on a CPU a
round counts the fastest of 50 iterations, which other programs disturb least. ``--idle`` times
optimizers that do nothing, and so the scaler alone.
``--buffers`` prints instead what it costs that a skipped step restores the buffers of its module:
ops, bytes, and the time of a step of a small CNN to that of one that no scaler watches.

    python benchmarks/step_calls.py [--time [--idle] [--device cuda] | --buffers]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import halfstep
from baseline import AGAIN, measure, ratio, seconds
from halfstep._gradients import scalars
from halfstep._pytorch import modes

WARM_UP = 20
"""The first steps of an optimizer are measured to notice clipping before unscaling."""


NUM_ROUNDS, NUM_ITERATIONS = 60, 50


class _Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not str(func).startswith("profiler")
        return func(*args, **(kwargs or {}))


def cost(make_scaler: Callable[..., Any], **options: bool) -> tuple[int, int]:
    """Return the Python calls of an iteration, those of the optimizer included, and its ops."""
    iterate = _iteration(make_scaler, "cpu", **options)
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
    return calls, ops.count


def nothing(*_: object) -> None:
    """Take the place of an optimizer's own work."""


def _iteration(
    make_scaler: Callable[..., Any],
    device: str,
    *,
    fused: bool = False,
    clips: bool = False,
    by_torch: bool = False,
    is_gan: bool = False,
    is_idle: bool = False,
) -> Callable[[], None]:
    params = [torch.nn.Parameter(torch.randn(64, 64, device=device)) for _ in range(12)]
    make_optimizer = partial(torch.optim.AdamW, fused=fused, foreach=None if fused else True)
    optimizer = make_optimizer(params)
    if is_gan:
        others = [torch.nn.Parameter(torch.randn(64, 64, device=device)) for _ in range(12)]
        other = make_optimizer(others)
        if is_idle:
            other.step = nothing
        for param in others:
            param.grad = torch.randn_like(param)
    if is_idle:
        optimizer.step = nothing
    scaler = make_scaler(device, init_scale=1024.0, growth_interval=10**6)
    for param in params:
        param.grad = torch.randn_like(param)
    loss = torch.ones((), device=device)
    clips_itself = clips and not by_torch and type(scaler) is not torch.amp.GradScaler

    def iterate() -> None:
        scaler.scale(loss)
        if clips_itself:
            scaler.step(optimizer, max_norm=1.0)
        else:
            if clips:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
        if is_gan:
            scaler.scale(loss)
            scaler.step(other)
        scaler.update()

    return iterate


WAYS = {
    "": {},
    " + clip": {"clips": True},
    " + unscale_ + torch's clip": {"clips": True, "by_torch": True},
}
KINDS = {
    name + way: {"fused": name == "fused", **options}
    for name in ("plain", "fused")
    for way, options in WAYS.items()
} | {"plain, two optimizers with a loss each": {"is_gan": True}}
LIBRARIES = "halfstep", "torch.amp"


def counted(library: Any) -> dict[str, Callable[[], tuple[int, int]]]:
    """Return what returns the calls and ops of an iteration, by its kind."""
    return {
        f"{library.__name__}, {kind}": partial(cost, library.GradScaler, **options)
        for kind, options in KINDS.items()
    }


def timed(library: Any, device: str, is_idle: bool) -> dict[str, Callable[[], float]]:
    """Return what returns the seconds of an iteration, by its kind."""

    def iterations(iterate: Callable[[], None]) -> None:
        for _ in range(NUM_ITERATIONS):
            iterate()

    def fastest(iterate: Callable[[], None]) -> float:
        if device == "cpu":
            return min(seconds(iterate, device) for _ in range(NUM_ITERATIONS))
        return seconds(partial(iterations, iterate), device) / NUM_ITERATIONS

    return {
        f"{library.__name__}, {kind}": partial(
            fastest, _iteration(library.GradScaler, device, is_idle=is_idle, **options)
        )
        for kind, options in KINDS.items()
    }


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
    pairs = []
    for number in range(NUM_ROUNDS):
        times = {}
        for iterate in (watched, other) if number % 2 else (other, watched):
            start = time.perf_counter()
            iterate()
            times[iterate] = time.perf_counter() - start
        pairs.append((times[watched], times[other]))
    print(f"time of a step of small_cnn, watched to not: {ratio(*zip(*pairs[5:], strict=True))}")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--time", action="store_true", help="a table of times, too")
    parser.add_argument("--idle", action="store_true", help="of optimizers that do nothing")
    parser.add_argument("--buffers", action="store_true", help="what restored buffers cost instead")
    parser.add_argument("--device", default="cpu", help="of the times")
    args = parser.parse_args()
    if args.buffers:
        print_buffers()
        return
    print("| step | Python calls, torch.amp's | ratio | ops, torch.amp's |")
    print("|---|---|---|---|")
    costs = measure(counted, has_again=False)
    for kind in KINDS:
        (calls, ops), (their_calls, their_ops) = (costs[f"{lib}, {kind}"][0] for lib in LIBRARIES)
        of_calls = f"{calls / their_calls:.2f}"
        print(f"| {kind} | {calls}, {their_calls} | {of_calls} | {ops}, {their_ops} |")
    if not args.time:
        return
    torch.set_num_threads(1)
    times = measure(timed, args.device, args.idle, rounds=NUM_ROUNDS, warm_up=2)
    print(f"\n{'':34}{'ms':>8}   {'to torch.amp':^20}   {'torch.amp, again':^20}")
    for kind in KINDS:
        ours, theirs = (times[f"{library}, {kind}"] for library in LIBRARIES)
        again = ratio(times[f"torch.amp, {kind}{AGAIN}"], theirs)
        milliseconds = 1e3 * statistics.median(ours)
        print(f"{kind:34}{milliseconds:8.3f}   {ratio(ours, theirs)}   {again}")


if __name__ == "__main__":
    main()
