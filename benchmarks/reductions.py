"""Time of one read of the gradients for one number each, next to PyTorch's own reductions.

All candidates of a case run in one process on the same gradients, in turn and in a new random order
each round. "To reading" is the median of the ratios within a round, with the quartiles, to the
fastest call that reads everything: torch.dot in float32, torch.aminmax in the others. The error is
the largest relative one of a norm.

    python benchmarks/reductions.py
    python benchmarks/reductions.py --gradients 4096x256 --dtype float32 --rounds 100
"""

import argparse
import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, GPTConfig

from halfstep._common.machine import device_name
from halfstep._gradients.gradients import largest_magnitudes, sums_of_squares

GRADIENTS = ("4096x256", "GPT 43M", "1x64M")
DTYPES = ("float32", "bfloat16", "float16")

# Returns norms, or what only reads the gradients returns.
Candidate = Callable[[list[Tensor]], object]


def shapes_of(gradients: str) -> list[torch.Size]:
    if gradients == "GPT 43M":
        with torch.device("meta"):
            return [p.shape for p in GPT(GPTConfig.of_size("43m", vocab=256)).parameters()]
    count, size = {"4096x256": (4096, 256), "1x64M": (1, 1 << 26)}[gradients]
    return [torch.Size([size])] * count


def norms_by_dot(tensors: list[Tensor]) -> Tensor:
    flat = [tensor.view(-1) for tensor in tensors]
    return torch.stack([torch.dot(each, each) for each in flat]).double().sqrt()


def candidates(dtype: str) -> dict[str, Candidate]:
    reads: dict[str, Candidate] = {
        "torch.aminmax, each": lambda ts: [torch.aminmax(each) for each in ts],
        "sums_of_squares": lambda ts: sums_of_squares(ts).sqrt(),
        "largest_magnitudes": largest_magnitudes,
        "torch._foreach_norm": lambda ts: torch.stack(torch._foreach_norm(ts, 2)).double(),
        "torch._foreach_norm, float64": lambda ts: torch.stack(
            torch._foreach_norm(ts, 2, dtype=torch.float64)
        ),
    }
    return {"torch.dot, each": norms_by_dot} | reads if dtype == "float32" else reads


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def measure(
    tensors: list[Tensor], calls: dict[str, Candidate], rounds: int
) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in calls}
    for round_ in range(-2, rounds):
        for name in random.sample(list(calls), len(calls)):
            taken = seconds(lambda call=calls[name]: call(tensors))
            if round_ >= 0:
                times[name].append(taken)
    return times


def error(tensors: list[Tensor], found: object) -> str:
    """Return the largest relative error of the norms, nothing for what are none."""
    if not isinstance(found, Tensor):
        return ""
    norms = torch.stack([each.double().norm() for each in tensors])
    return f"{((found / norms - 1).abs().max()).item():.0e}"


def print_case(gradients: str, dtype: str, rounds: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(shape).to(getattr(torch, dtype)) for shape in shapes_of(gradients)]
    num_bytes = sum(each.nbytes for each in tensors)
    calls = candidates(dtype)
    times = measure(tensors, calls, rounds)
    reading, *_ = times.values()
    for name, taken in times.items():
        ratios = [a / b for a, b in zip(taken, reading, strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        median = statistics.median(taken)
        wrong = "" if name == "largest_magnitudes" else error(tensors, calls[name](tensors))
        print(
            f"{gradients:10}{dtype:10}{name:30}{median * 1e3:8.2f}{num_bytes / median / 1e9:8.1f}"
            f"   {middle:7.3f} ({low:.3f}-{high:.3f}){wrong:>9}"
        )


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--gradients", choices=GRADIENTS, nargs="+", default=GRADIENTS)
    parser.add_argument("--dtype", choices=DTYPES, nargs="+", default=DTYPES)
    args = parser.parse_args()

    print(f"{device_name('cpu')}, PyTorch {torch.__version__}, {args.rounds} rounds")
    print(f"{'':50}{'ms':>8}{'GB/s':>8}   {'to reading':^22}{'error':>9}")
    for gradients, dtype in itertools.product(args.gradients, args.dtype):
        print_case(gradients, dtype, args.rounds)


if __name__ == "__main__":
    main()
