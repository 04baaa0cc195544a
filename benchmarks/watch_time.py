"""What a watch costs a healthy loop: ``python benchmarks/watch_time.py``.

Steps with and without a watch, in turn, on one thread. The loss is computed by hand from so many
functions of PyTorch. Printed: the medians, and the extra time of a function.
"""

from __future__ import annotations

import statistics
import time

import torch
from torch import Tensor, nn

from halfstep._tools.watch.watch import Watch

NUM_STEPS, NUM_PAIRS = 10, 15


def step_of(width: int, num_functions: int) -> tuple[nn.Module, object]:
    """Return a model, and a function that trains it for :data:`NUM_STEPS` steps."""
    torch.manual_seed(0)
    layers = [module for _ in range(8) for module in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(64, width)

    def train() -> None:
        for _ in range(NUM_STEPS):
            loss: Tensor = model(x)
            for _ in range(num_functions - 1):
                loss = loss + 1.0
            optimizer.zero_grad()
            loss.mean().backward()
            optimizer.step()

    return model, train


def milliseconds(train: object) -> float:
    """Return the time of a step."""
    begun = time.perf_counter()
    train()  # type: ignore[operator]
    return (time.perf_counter() - begun) / NUM_STEPS * 1e3


def main() -> None:
    """Print a line for each size."""
    torch.set_num_threads(1)
    for width, num_functions in ((16, 2), (16, 40), (512, 2), (512, 40)):
        _, train = step_of(width, num_functions)
        milliseconds(train)
        plain, watched = [], []
        for _ in range(NUM_PAIRS):
            plain.append(milliseconds(train))
            with Watch():
                watched.append(milliseconds(train))
        before, after = statistics.median(plain), statistics.median(watched)
        print(
            f"width {width:>3}, {num_functions:>2} functions: {before:.2f} ms, watched "
            f"{after:.2f} ms: {after / before:.2f}, {(after - before) * 1e3:.0f} us more"
        )


if __name__ == "__main__":
    main()
