"""Time between backward and the optimizer's own work, against torch.amp.GradScaler.

That is: checking, unscaling and clipping of the gradients, and `update`. The optimizers do nothing,
under both scalers. torch.amp's runs in a process of its own (``baseline.py``), on the same
gradients; what counts is the median of the ratios within a round.

    python benchmarks/gradient_time.py
    python benchmarks/gradient_time.py --quick
    python benchmarks/gradient_time.py --gradients 4096x256 --dtype float32 --rounds 200
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from baseline import AGAIN, measure, ratio, seconds
from halfstep._common.machine import device_name
from halfstep._pytorch import devices
from reductions import DTYPES, GRADIENTS, shapes_of

MAX_NORM = 1.0
WARM_UP = 5
"""In the first three steps of an optimizer halfstep looks for gradients clipped too early."""

TORCH = "torch.amp"
DOT = "torch.dot"
"""Reads a float32 gradient once; the bytes of another one, too."""


class Plain(torch.optim.SGD):
    """Has its gradients unscaled for it."""

    def step(self, closure: Any = None) -> None:
        """Do nothing."""


class Fused(Plain):
    """Takes the scale and found_inf, as the fused optimizers of PyTorch."""

    _step_supports_amp_scaling = True


Variants = dict[str, Callable[[Any, Plain], object]]


@dataclass(frozen=True)
class Case:
    """Which gradients, of which dtype, for which optimizer, clipped or not."""

    gradients: str
    dtype: str
    optimizer: type[Plain]
    clip: bool

    def __str__(self) -> str:
        clipped = ", clipped" * self.clip
        return f"{self.gradients:10}{self.dtype:10}{self.optimizer.__name__.lower():7}{clipped}"

    def variants(self, library: Any) -> Variants:
        """What is called between backward and update, in a process of a library."""
        is_float16 = self.dtype == "float16"  # to unscale it in place is an error, of torch.amp too
        if library is torch.amp:
            if not self.clip:
                return {TORCH: step}
            return {} if is_float16 else {TORCH: clip_with_torch}
        if not self.clip:
            return {"step()": step}
        return {"step(max_norm)": clip_in_step}


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
        return seconds(call, self.device.type)


def timed(library: Any, name: str, dtype: str, device: str) -> dict[str, Callable[[], float]]:
    """Return what returns the seconds of each variant of each case, by both."""
    gradients = Gradients(name, dtype, device)
    runs: dict[str, Callable[[], float]] = {}
    # torch.amp raises for bfloat16 on CUDA.
    if library is not torch.amp or getattr(torch, dtype) in devices.facts(device).unscales:
        for case in cases(name, dtype):
            for variant, call in case.variants(library).items():
                optimizer = case.optimizer(gradients.params)
                run = iteration(library.GradScaler(device), call, optimizer, gradients)
                runs[f"{case}: {variant}"] = run
    if library is torch.amp and len(gradients.grads) == 1:
        flat = gradients.grads[0].view(torch.float32)
        runs[DOT] = lambda: gradients.timed(lambda: torch.dot(flat, flat))
    return runs


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


def print_rows(case: Case, times: dict[str, list[float]]) -> None:
    of_torch = f"{case}: {TORCH}"
    for name in case.variants(None):
        ours = times[f"{case}: {name}"]
        row = f"{str(case).partition(',')[0]}{name:24}{statistics.median(ours) * 1e3:8.2f}"
        if of_torch in times:
            theirs = times[of_torch]
            row += f"{statistics.median(theirs) * 1e3:10.2f}"
            row += f"   {ratio(ours, theirs)}   {ratio(times[of_torch + AGAIN], theirs)}"
        if DOT in times:
            row = f"{row:109}{ratio(ours, times[DOT])}"
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
        rounds = {"rounds": args.rounds, "warm_up": WARM_UP}
        times = measure(timed, name, dtype, args.device, **rounds)
        for case in cases(name, dtype):
            print_rows(case, times)
    print("Noise: torch.amp to itself. Dot: one torch.dot")
    print("medians; in brackets the quartiles of the ratios within a round")


if __name__ == "__main__":
    main()
