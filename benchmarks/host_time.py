"""Host time of single calls under autocast, in microseconds: what small models feel.

torch.autocast runs in a process of its own (``baseline.py``).

    python benchmarks/host_time.py
"""

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from baseline import AGAIN, measure, ratio, seconds, synchronize
from halfstep._common.machine import device_name

NUM_ROUNDS, NUM_CALLS = 15, 2000


def rows(device: str) -> dict[str, Callable[[], object]]:
    """Return what is called under autocast."""
    low = torch.ones(8, 8, device=device, dtype=torch.bfloat16)
    wide, weight, scale = low.float(), torch.nn.Parameter(low.float()), low[0].float()
    tokens = torch.zeros(8, dtype=torch.long, device=device)
    return {
        "linear, with gradient": lambda: F.linear(wide, weight),
        "layer_norm": lambda: F.layer_norm(wide, (8,), scale),
        "embedding": lambda: F.embedding(tokens, weight),
        "softmax, float32 asked for": lambda: F.softmax(low, -1, dtype=torch.float32),
    }


CONTEXT, NESTED = "make, enter and leave a context", "the same, inside of another"


def timed(library: Any, device: str) -> dict[str, Callable[[], float]]:
    """Return what times a call, as the mean of many, without waiting for the device."""
    make = partial(library.autocast, device, torch.bfloat16)

    def enter() -> None:
        with make():
            pass

    def many(call: Callable[[], object], context: Callable[[], Any]) -> float:
        def run() -> None:
            for _ in range(NUM_CALLS):
                call()

        for _ in range(2):  # halfstep's kernels of products watch the first contexts, and leave
            with context():
                call()
        synchronize(device)
        with context():
            return seconds(run, "cpu") / NUM_CALLS * 1e6

    runs = {name: partial(many, call, make) for name, call in rows(device).items()}
    runs |= {CONTEXT: partial(many, enter, nullcontext), NESTED: partial(many, enter, make)}
    return {f"{library.__name__}: {name}": run for name, run in runs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    torch.set_num_threads(1)
    times = measure(timed, args.device, rounds=NUM_ROUNDS, warm_up=1)
    print(f"{device_name(args.device)}, PyTorch {torch.__version__}")
    print(f"{'us':32}{'torch':>8}{'halfstep':>10}   {'to torch.autocast':^20}   {'again':^20}")
    for name in (*rows("cpu"), CONTEXT, NESTED):
        theirs, ours = times[f"torch.amp: {name}"], times[f"halfstep: {name}"]
        again = ratio(times[f"torch.amp: {name}{AGAIN}"], theirs)
        both = f"{statistics.median(theirs):8.1f}{statistics.median(ours):10.1f}"
        print(f"{name:32}{both}   {ratio(ours, theirs)}   {again}")


if __name__ == "__main__":
    main()
