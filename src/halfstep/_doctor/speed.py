"""How fast a device multiplies matrices and convolves in each dtype."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F

MATRIX_SIDE = {"cpu": 768, "cuda": 4096}
"""Large enough to be limited by arithmetic, small enough for a fp16 CPU kernel to end soon."""

CONVOLUTION = {"cpu": (4, 32, 32), "cuda": (32, 256, 56)}
"""Images, channels, and side, under kernels of 3 x 3."""

FEWEST_ROUNDS, MOST_ROUNDS = 5, 30

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Speeds:
    """What was measured.

    Attributes:
        gflops: 1e9 operations a second, by ``"matmul"`` and ``"conv"``, then by name of the dtype.
        ratios: The same as multiples of fp32's: the median over pairs, measured in turn.
    """

    gflops: dict[str, dict[str, float]]
    ratios: dict[str, dict[str, float]]


@dataclass(frozen=True)
class _Work:
    kind: str
    name: str
    run: Callable[[], object]
    operations: float


def measure_speeds(
    device: str,
    seconds: float = 1.5,
    kinds: tuple[str, ...] = ("matmul", "conv"),
    on_round: Callable[[float], None] = lambda share: None,
) -> Speeds:
    """Measure all dtypes in turn, so that what else runs on the machine slows all alike.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
        seconds: About how long, not counting the first call of each.
        kinds: ``"matmul"``, ``"conv"`` or both.
        on_round: Told after each round which share of the time has gone.

    Sync: many.
    """
    works = [work for kind in kinds for work in _works(kind, device)]
    with torch.no_grad():
        for work in works:
            _duration(work.run, device)  # the first call sets up the kernel
        rounds: list[list[float]] = []
        began = time.perf_counter()
        while len(rounds) < MOST_ROUNDS:
            rounds.append([_duration(work.run, device) for work in works])
            gone = (time.perf_counter() - began) / seconds
            on_round(min(max(gone, len(rounds) / MOST_ROUNDS), 1.0))
            if gone >= 1 and len(rounds) >= FEWEST_ROUNDS:
                break
    return speeds_of([(work.kind, work.name, work.operations) for work in works], rounds)


def speeds_of(works: list[tuple[str, str, float]], rounds: list[list[float]]) -> Speeds:
    """Return what durations mean.

    Args:
        works: Kind, name of the dtype and number of operations.
        rounds: Seconds of each, for each round.
    """
    gflops: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, float]] = {}
    base = {kind: at for at, (kind, name, _) in enumerate(works) if name == "fp32"}
    for at, (kind, name, operations) in enumerate(works):
        # The best: other programs only slow it down.
        best = min(durations[at] for durations in rounds)
        gflops.setdefault(kind, {})[name] = operations / best / 1e9
        pairs = [durations[base[kind]] / durations[at] for durations in rounds]
        ratios.setdefault(kind, {})[name] = median(pairs)
    return Speeds(gflops, ratios)


def _works(kind: str, device: str) -> Iterator[_Work]:
    names = [*DTYPES, "tf32"] if device == "cuda" else list(DTYPES)
    for name in names:
        dtype = DTYPES.get(name, torch.float32)
        run, operations = (_matmul if kind == "matmul" else _convolution)(device, dtype)
        yield _Work(kind, name, partial(_with_tf32, run, name == "tf32"), operations)


def _matmul(device: str, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    side = MATRIX_SIDE[device]
    a = torch.ones(side, side, device=device, dtype=dtype)
    return partial(F.linear, a, a), 2.0 * side**3


def _convolution(device: str, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    images, channels, side = CONVOLUTION[device]
    x = torch.ones(images, channels, side, side, device=device, dtype=dtype)
    weight = torch.ones(channels, channels, 3, 3, device=device, dtype=dtype)
    return partial(F.conv2d, x, weight, padding=1), 2.0 * 9 * images * (channels * side) ** 2


def _duration(run: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def _with_tf32(run: Callable[[], object], allowed: bool) -> object:
    if not torch.cuda.is_available():
        return run()
    with _fp32_precision("tf32" if allowed else "ieee"):
        return run()


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """Set what fp32 means on CUDA, for a while."""
    backends: Any = torch.backends
    matmul, conv = backends.cuda.matmul, backends.cudnn.conv
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
