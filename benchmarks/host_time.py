"""Host time of single calls under autocast, in microseconds: what small models feel.

python benchmarks/host_time.py
"""

import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from halfstep import autocast
from halfstep._common.machine import device_name

REPEATS, CALLS = 15, 2000


def enter(context: Callable[[], torch.autocast | autocast]) -> Callable[[], None]:
    """Return a function that makes, enters and leaves a context."""

    def run() -> None:
        with context():
            pass

    return run


def microseconds(call: Callable[[], object]) -> float:
    """Time one call, as the mean of many."""
    start = time.perf_counter()
    for _ in range(CALLS):
        call()
    return (time.perf_counter() - start) / CALLS * 1e6


def main() -> None:
    torch.set_num_threads(1)
    x, weight = torch.ones(8, 8, dtype=torch.bfloat16), torch.ones(8, 8, dtype=torch.bfloat16)
    ours, torchs = autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16)
    rows: dict[str, tuple[Callable[[], object], torch.autocast | autocast | None]] = {
        "softmax, float32 asked for by hand": (lambda: F.softmax(x, -1, dtype=torch.float32), None),
        "softmax, halfstep.autocast (our kernel)": (lambda: F.softmax(x, -1), ours),
        "linear, torch.autocast": (lambda: F.linear(x, weight), torchs),
        "linear, halfstep.autocast": (lambda: F.linear(x, weight), ours),
        "make, enter and leave torch.autocast": (
            enter(lambda: torch.autocast("cpu", torch.bfloat16)),
            None,
        ),
        "make, enter and leave halfstep.autocast": (
            enter(lambda: autocast("cpu", torch.bfloat16)),
            None,
        ),
    }
    times: dict[str, list[float]] = {name: [] for name in rows}
    for _ in range(REPEATS):
        for name, (call, context) in rows.items():
            if context is None:
                times[name].append(microseconds(call))
                continue
            with context:
                times[name].append(microseconds(call))
    print(f"{device_name('cpu')}, PyTorch {torch.__version__}")
    for name, values in times.items():
        print(f"{name:48}{statistics.median(values):6.1f} us")


if __name__ == "__main__":
    main()
