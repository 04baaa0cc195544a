"""What a diagnosis costs, in plain steps; and what watching costs while nothing is wrong.

    python benchmarks/diagnose_time.py [--size 43m] [--dtype bf16]

Prints the time of `halfstep.diagnose` on a step that is finite, on one whose forward pass overflows
and, in fp16, on one whose loss is scaled by too much, as multiples of the median plain step; each
is the median of three. And the ratio of a step inside of `scaler.diagnose()` to one outside, in
turns in one process.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

import halfstep
from halfstep._demo.gpt import GPT, GPTConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What makes a weight too large for the products of a dtype; in bf16 it is for float32 too.
TOO_MUCH = {"bf16": 1e38, "fp16": 1e6}
TIMES = 3
VOCAB = 256


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="43m")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--steps", type=int, default=10)
    arguments = parser.parse_args()

    torch.manual_seed(0)
    config = GPTConfig.of_size(arguments.size, VOCAB)
    model = GPT(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    scaler = halfstep.GradScaler("cpu", init_scale=2.0**10)
    tokens = torch.randint(0, VOCAB, (4, config.context))

    def step() -> None:
        optimizer.zero_grad()
        with halfstep.autocast("cpu", DTYPES[arguments.dtype]):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), tokens.flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    plain = statistics.median(times(step, arguments.steps)[2:])
    print(f"{arguments.size}, {arguments.dtype}: a plain step takes {plain * 1e3:.1f} ms")
    report("finite, with underflow", step, model, plain)
    up = model.blocks[-1].up.weight
    before = up.detach().clone()
    with torch.no_grad():
        up.mul_(TOO_MUCH[arguments.dtype])
    report("overflow in the forward pass", step, model, plain)
    with torch.no_grad():
        up.copy_(before)
    if arguments.dtype == "fp16":
        scaler.update(new_scale=2.0**40)
        report("scaled by too much", step, model, plain)
    scaler.update(new_scale=2.0**10)
    ratios = []
    for _ in range(arguments.steps):
        (outside,) = times(step, 1)
        with scaler.diagnose(model):
            (inside,) = times(step, 1)
        ratios.append(inside / outside)
    print(f"a watched step: {statistics.median(ratios):.4f} of one that is not watched")


def times(step: Callable[[], None], count: int) -> list[float]:
    """Return the seconds of each of some steps."""
    found = []
    for _ in range(count):
        began = time.perf_counter()
        step()
        found.append(time.perf_counter() - began)
    return found


def report(what: str, step: Callable[[], None], model: GPT, plain: float) -> None:
    """Diagnose a few times and print the median of what it took."""
    found = [halfstep.diagnose(step, model=model) for _ in range(TIMES)]
    seconds = statistics.median(each.seconds for each in found)
    print(
        f"{what}: {seconds / plain:.1f} plain steps, {found[0].num_replays} replays of "
        f"{seconds / found[0].num_replays / plain:.1f} ({found[0].verdict})"
    )


if __name__ == "__main__":
    main()
