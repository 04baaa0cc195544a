"""Time between backward and the optimizer's own work, against torch.amp.GradScaler.

That is: checking, unscaling and clipping of the gradients, and `update`. The optimizers do nothing,
under both scalers. All variants of a case run in one process on the same gradients, in turn and in
a new random order each round; what counts is the median of the ratios within a round.

    python benchmarks/gradient_time.py
    python benchmarks/gradient_time.py --quick
    python benchmarks/gradient_time.py --gradients 4096x256 --dtype float32 --rounds 200
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from halfstep import GradScaler
from halfstep._common.machine import device_name
from halfstep._pytorch import devices
from reductions import DTYPES, GRADIENTS, shapes_of

MAX_NORM = 1.0
WARM_UP = 5
"""In the first three steps of an optimizer halfstep looks for gradients clipped too early."""

TORCH = "torch.amp"
AGAIN = "torch.amp, again"
"""The same once more: what is noise."""

DOT = "torch.dot"
"""Reads a float32 gradient once; the bytes of another one, too."""


class Plain(torch.optim.SGD):
    """Has its gradients unscaled for it."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class Fused(Plain):
    """Takes the scale and found_inf, as the fused optimizers of PyTorch."""

    _step_supports_amp_scaling = True


Variant = tuple[Any, Callable[[Any, Plain], object]]


@dataclass(frozen=True)
class Case:
    """Which gradients, of which dtype, for which optimizer, clipped or not."""

    gradients: str
    dtype: str
    optimizer: type[Plain]
    clip: bool

    def variants(self) -> dict[str, Variant]:
        """What to compare: a kind of scaler, and what is called between backward and update."""
        theirs, ours = torch.amp.GradScaler, GradScaler
        if not self.clip:
            return {TORCH: (theirs, step), AGAIN: (theirs, step), "step()": (ours, step)}
        in_step: dict[str, Variant] = {"step(max_norm)": (ours, clip_in_step)}
        if self.dtype == "float16":  # to unscale it in place is an error, of torch.amp too
            return in_step
        before: dict[str, Variant] = dict.fromkeys((TORCH, AGAIN), (theirs, clip_with_torch))
        return before | {"clip_grad_norm_()": (ours, clip_with_scaler)} | in_step


def cases(gradients: str, dtype: str) -> Iterator[Case]:
    for optimizer, clip in itertools.product((Plain, Fused), (False, True)):
        if optimizer is Fused or dtype != "float16":
            yield Case(gradients, dtype, optimizer, clip)


def step(scaler: Any, optimizer: Plain) -> None:
    scaler.step(optimizer)


def clip_with_torch(scaler: Any, optimizer: Plain) -> None:
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(optimizer.param_groups[0]["params"], MAX_NORM, foreach=True)
    scaler.step(optimizer)


def clip_with_scaler(scaler: Any, optimizer: Plain) -> None:
    scaler.clip_grad_norm_(optimizer, MAX_NORM)
    scaler.step(optimizer)


def clip_in_step(scaler: Any, optimizer: Plain) -> None:
    scaler.step(optimizer, max_norm=MAX_NORM)


class Gradients:
    """Parameters with gradients that are as fresh from backward whenever they are needed."""

    def __init__(self, name: str, dtype: str, device: str) -> None:
        torch.manual_seed(0)
        shapes, kind = shapes_of(name), getattr(torch, dtype)
        self.device = torch.device(device)
        self.params = [
            torch.nn.Parameter(torch.empty(shape, dtype=kind, device=device)) for shape in shapes
        ]
        self.fresh = [torch.randn(shape, device=device).to(kind) for shape in shapes]
        for param, fresh in zip(self.params, self.fresh, strict=True):
            param.grad = torch.empty_like(fresh)
        self.grads = [param.grad for param in self.params]

    def refresh(self) -> None:
        """Fill in what backward left."""
        torch._foreach_copy_(self.grads, self.fresh)

    def timed(self, call: Callable[[], object]) -> float:
        """Return the seconds of a call that finds fresh gradients."""
        self.refresh()
        self.synchronize()
        start = time.perf_counter()
        call()
        self.synchronize()
        return time.perf_counter() - start

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)


def measure(case: Case, gradients: Gradients, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every variant in every round."""
    runs: dict[str, Callable[[], float]] = {}
    is_theirs = gradients.grads[0].dtype in devices.facts(gradients.device.type).unscales
    for name, (make, call) in case.variants().items():
        if name in (TORCH, AGAIN) and not is_theirs:
            continue  # torch.amp raises for bfloat16 on CUDA
        scaler = make(gradients.device.type)
        runs[name] = iteration(scaler, call, case.optimizer(gradients.params), gradients)
    if len(gradients.grads) == 1:
        flat = gradients.grads[0].view(torch.float32)
        runs[DOT] = lambda: gradients.timed(lambda: torch.dot(flat, flat))
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_ in range(-WARM_UP, rounds):
        for name in random.sample(list(runs), len(runs)):
            seconds = runs[name]()
            if round_ >= 0:
                times[name].append(seconds)
    return times


def iteration(
    scaler: Any, call: Callable[[Any, Plain], object], optimizer: Plain, gradients: Gradients
) -> Callable[[], float]:
    loss = torch.ones((), device=gradients.device)

    def timed() -> None:
        call(scaler, optimizer)
        scaler.update()

    def run() -> float:
        scaler.scale(loss)
        return gradients.timed(timed)

    return run


def ratio(times: list[float], to: list[float]) -> str:
    """Return the median of the ratios within a round, and their quartiles."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, to, strict=True)], n=4)
    return f"{middle:6.3f} ({low:.3f}-{high:.3f})"


def print_rows(case: Case, times: dict[str, list[float]]) -> None:
    title = f"{case.gradients:10}{case.dtype:10}{case.optimizer.__name__.lower():7}"
    for name in [name for name in times if name not in (TORCH, AGAIN, DOT)]:
        row = f"{title}{name:24}{statistics.median(times[name]) * 1e3:8.2f}"
        if TORCH in times:
            row += f"{statistics.median(times[TORCH]) * 1e3:10.2f}"
            row += f"   {ratio(times[name], times[TORCH])}   {ratio(times[AGAIN], times[TORCH])}"
        if DOT in times:
            row = f"{row:109}{ratio(times[name], times[DOT])}"
        print(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--quick", action="store_true", help="10 rounds, float32, no large tensor")
    parser.add_argument("--gradients", choices=GRADIENTS, nargs="+", default=GRADIENTS)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="of the CPU")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.quick:
        args.rounds, args.gradients, args.dtype = 10, GRADIENTS[:2], DTYPES[:1]

    print(f"{device_name(args.device)}, PyTorch {torch.__version__}, {args.rounds} rounds")
    print(f"{'':41}{'ms':>8}{'torch.amp':>10}   {'ours to torch.amp':^20}   {'noise':^20}   to dot")
    for name, dtype in itertools.product(args.gradients, args.dtype):
        gradients = Gradients(name, dtype, args.device)
        for case in cases(name, dtype):
            if sys.stderr.isatty():
                print(f"\r{case} ", end="\r", file=sys.stderr, flush=True)
            print_rows(case, measure(case, gradients, args.rounds))
    print("Noise: torch.amp to itself. Dot: one torch.dot")
    print("medians; in brackets the quartiles of the ratios within a round")


if __name__ == "__main__":
    main()
