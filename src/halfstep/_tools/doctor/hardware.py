"""The machine: measured speeds, and the advised precision."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F

from halfstep._common.machine import device_name
from halfstep._common.numbers import seconds
from halfstep._pytorch.devices import has_safe_float16

Precision: TypeAlias = Literal["fp32", "tf32", "bf16", "fp16"]

WORTH_IT = 1.2  # the smallest multiple of the fp32 speed that counts as fast
STEADY = 1.1  # the largest ratio of the two best times of a work that confirm each other
NOISY = 1.5  # the smallest ratio of the median to the best time that makes a measurement noisy
AS_GOOD = 0.8
"""The smallest fraction of the fp16 speed at which bf16 is preferred: it needs no scaler."""


@dataclass(frozen=True)
class Advice:
    """A precision and the reason for it, in one sentence."""

    precision: Precision
    reason: str


@dataclass(frozen=True)
class MachineReport:
    """A device, its measured speeds, and the advice for it."""

    device: str  # "cpu" or "cuda"
    name: str  # of the processor or GPU
    speeds: Speeds
    advice: Advice


def inspect_machine() -> MachineReport:
    """Measure the accelerator of this machine if it is a CUDA device, else the CPU.

    This takes a second or two. Sync: many.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    speeds = measure_speeds(device)
    advice = advise(speeds.ratios, has_safe_fp16=device == "cpu" or has_safe_float16())
    if speeds.noise:
        advice = Advice(advice.precision, f"{advice.reason}. Not sure: {speeds.noise}")
    return MachineReport(device, device_name(device), speeds, advice)


def advise(ratios: Mapping[str, Mapping[str, float]], *, has_safe_fp16: bool = True) -> Advice:
    """Return the advised training precision, from the ratios of :class:`Speeds`.

    ``has_safe_fp16``: whether convolutions in float16 are right.
    """
    matmul = ratios["matmul"]
    bf16, fp16, tf32 = matmul["bf16"], matmul["fp16"], matmul.get("tf32", 0.0)
    if bf16 >= WORTH_IT and (bf16 >= AS_GOOD * fp16 or not has_safe_fp16):
        reason = f"matrix products run at {bf16:.2g} x the speed of fp32"
        return Advice("bf16", f"{reason}{_conv(ratios, 'bf16')}, and no scaler is needed")
    if fp16 >= WORTH_IT and has_safe_fp16:
        reason = f"matrix products run at {fp16:.2g} x the speed of fp32, in bf16 at {bf16:.2g} x"
        return Advice("fp16", f"{reason}{_conv(ratios, 'fp16')}; with a GradScaler")
    slow = f"bf16 runs at {bf16:.2g} x and fp16 at {fp16:.2g} x the speed of fp32"
    if not has_safe_fp16:
        return Advice("fp32", f"{slow}, but fp16 convolutions give NaN on this card")
    if tf32 >= WORTH_IT:
        return Advice("tf32", f"{slow}, TF32 at {tf32:.2g} x")
    return Advice("fp32", f"{slow} in matrix products: lower precision saves memory, not time")


def _conv(ratios: Mapping[str, Mapping[str, float]], name: str) -> str:
    ratio = ratios.get("conv", {}).get(name)
    return "" if ratio is None else f" (convolutions at {ratio:.2g} x)"


# --- measured speeds ------------------------------------------------------------------------------


MATRIX_SIDE = {"cpu": 768, "cuda": 4096}
"""The side of the matrices: compute-bound, but small enough for a slow fp16 kernel on a CPU."""

CONVOLUTION = {"cpu": (4, 32, 32), "cuda": (32, 256, 56)}
"""The images, channels and side of the input of 3 x 3 convolutions."""

FEWEST_ROUNDS, MOST_ROUNDS = 3, 30
MOST_CALLS, LONG = 4, 0.2
"""The calls of a work in a round, and the seconds after which no further one begins."""

LONGEST = 3  # how often the usual duration may pass while the best times are not confirmed

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Speeds:
    """Measured speeds by ``"matmul"`` and ``"conv"``, then by name of the dtype."""

    gflops: dict[str, dict[str, float]]  # 1e9 operations a second
    ratios: dict[str, dict[str, float]]  # to fp32
    noise: str = ""  # the work whose times scatter; empty if none does


def measure_speeds(device: str, seconds: float = 1.5) -> Speeds:
    """Measure all dtypes in turn, so that other programs slow all of them equally.

    It takes about ``seconds`` after the first calls, up to ``LONGEST`` times that if the best times
    differ. Sync: many.
    """
    works = [work for kind in ("matmul", "conv") for work in _works(kind, device)]
    with torch.no_grad():
        for *_, run in works:
            _duration(run, device)  # the first call sets up the kernel
        rounds: list[list[float]] = []
        began = time.perf_counter()
        while len(rounds) < MOST_ROUNDS:
            rounds.append([_best(run, device) for *_, run in works])
            gone = (time.perf_counter() - began) / seconds
            is_steady = all(map(_is_steady, zip(*rounds, strict=True)))
            if len(rounds) >= FEWEST_ROUNDS and (gone >= LONGEST or (gone >= 1 and is_steady)):
                break
    return speeds_of([work[:3] for work in works], rounds)


def speeds_of(works: list[tuple[str, str, float]], rounds: list[list[float]]) -> Speeds:
    """Return speeds from the seconds of each work in each round.

    A work has a kind, the name of a dtype, and a number of operations. Its best time counts, since
    other programs can only slow it down.
    """
    gflops: dict[str, dict[str, float]] = {}
    ratios: dict[str, dict[str, float]] = {}
    noise = ""
    for (kind, name, operations), times in zip(works, zip(*rounds, strict=True), strict=True):
        rate = gflops.setdefault(kind, {})[name] = operations / min(times) / 1e9
        ratios.setdefault(kind, {})[name] = rate / gflops[kind]["fp32"]
        if not _is_steady(times) or median(times) >= NOISY * min(times):
            what = {"matmul": "matrix products", "conv": "convolutions"}[kind]
            noise = noise or (
                f"{what} in {name} took {seconds(min(times))} to {seconds(max(times))}; "
                "repeat the measurement while nothing else runs"
            )
    return Speeds(gflops, ratios, noise)


def _is_steady(times: Sequence[float]) -> bool:
    """Return whether the two best times confirm each other."""
    best, second, *_ = [*sorted(times), min(times)]
    return second <= STEADY * best


def _works(kind: str, device: str) -> Iterator[tuple[str, str, float, Callable[[], object]]]:
    """Yield the kind, the name of the dtype, the number of operations and the function to time."""
    make = _matmul if kind == "matmul" else _convolution
    for name in [*DTYPES, "tf32"] if device == "cuda" else DTYPES:
        run, operations = make(device, DTYPES.get(name, torch.float32))
        if device == "cuda":
            run = _fp32_precision("tf32" if name == "tf32" else "ieee")(run)
        yield kind, name, operations, run


def _matmul(device: str, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    side = MATRIX_SIDE[device]
    a = torch.ones(side, side, device=device, dtype=dtype)
    return partial(F.linear, a, a), 2.0 * side**3


def _convolution(device: str, dtype: torch.dtype) -> tuple[Callable[[], object], float]:
    images, channels, side = CONVOLUTION[device]
    x = torch.ones(images, channels, side, side, device=device, dtype=dtype)
    weight = torch.ones(channels, channels, 3, 3, device=device, dtype=dtype)
    return partial(F.conv2d, x, weight, padding=1), 2.0 * 9 * images * (channels * side) ** 2


def _best(run: Callable[[], object], device: str) -> float:
    """Return the best time of a few calls in a row: after a break, threads have to start again."""
    times: list[float] = []
    while len(times) < MOST_CALLS and sum(times) < LONG:
        times.append(_duration(run, device))
    return min(times)


def _duration(run: Callable[[], object], device: str) -> float:
    started = time.perf_counter()
    run()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


@contextmanager
def _fp32_precision(precision: str) -> Iterator[None]:
    """Set the precision of fp32 on CUDA inside the block."""
    matmul, conv = torch.backends.cuda.matmul, torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before = matmul.fp32_precision, conv.fp32_precision
    matmul.fp32_precision = conv.fp32_precision = precision
    try:
        yield
    finally:
        matmul.fp32_precision, conv.fp32_precision = before
