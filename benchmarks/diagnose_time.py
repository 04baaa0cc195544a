"""What a diagnosis costs, in plain steps, first use included; and what watching costs.

    python benchmarks/diagnose_time.py [--size 43m] [--dtype bf16] [--threads 1]

Each kind of step is diagnosed in processes of its own: once when halfstep's diagnosis is not even
imported, and twice more. Printed are the medians of three processes: of the first diagnosis, in
seconds and plain steps, and of the best of the later ones. Plain steps run under `torch.autocast`
and its scaler (`--ours`: under halfstep's), so that a policy is prepared for the first time in the
diagnosis. At the end, the ratio of a step inside of `halfstep.diagnose(scaler)` to one outside, in
turns.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, GPTConfig

import halfstep

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# What makes a weight too large for the products of a dtype; in bf16 it is for float32 too.
TOO_MUCH = {"bf16": 1e38, "fp16": 1e6}
CASES = ("finite, with underflow", "overflow in the forward pass", "scaled by too much")
Clock = Callable[[], float]
TIMES = 3
VOCAB = 256


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", default="43m", help="of a GPT, or toy, or deep")
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--ours", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="time of the processor, with 1 thread")
    parser.add_argument("--case", choices=CASES, help="only this one, in this process, as JSON")
    arguments = parser.parse_args()
    if arguments.threads or arguments.cpu:
        torch.set_num_threads(arguments.threads or 1)
    clock = time.process_time if arguments.cpu else time.perf_counter
    if arguments.case:
        print(json.dumps(diagnosed(arguments, clock)))
        return
    for case in CASES if arguments.dtype == "fp16" else CASES[:2]:
        report(case, [in_process(case) for _ in range(TIMES)])
    print(f"a watched step: {watched(arguments, clock):.4f} of one that is not watched")


def in_process(case: str) -> dict[str, float]:
    """Measure one case in a process of its own."""
    command = [sys.executable, __file__, *sys.argv[1:], "--case", case]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    found: dict[str, float] = json.loads(output)
    return found


def report(case: str, found: list[dict[str, float]]) -> None:
    """Print the medians of a case."""
    plain, first, later, replays = (
        statistics.median(each[name] for each in found)
        for name in ("plain", "first", "later", "replays")
    )
    print(
        f"{case}: a plain step takes {plain * 1e3:.1f} ms; first {first:.2f} s, "
        f"{first / plain:.1f} plain steps; later {later:.2f} s, {later / plain:.1f}; "
        f"{replays:.0f} replays",
        flush=True,
    )


def diagnosed(arguments: argparse.Namespace, clock: Clock) -> dict[str, float]:
    """Return the seconds of a plain step, of the first diagnosis and of the best later one."""
    model, step, scaler, weight = training(arguments)
    plain = statistics.median(times(step, arguments.steps, clock)[2:])
    if arguments.case == CASES[1]:
        with torch.no_grad():
            weight.mul_(TOO_MUCH[arguments.dtype])
    elif arguments.case == CASES[2]:
        scaler.update(new_scale=2.0**40)
    seconds = []
    for _ in range(TIMES):
        began = clock()
        found = halfstep.diagnose(step, model=model)
        seconds.append(clock() - began)
    return {
        "plain": plain,
        "first": seconds[0],
        "later": min(seconds[1:]),
        "replays": found.num_replays,
    }


def training(
    arguments: argparse.Namespace,
) -> tuple[nn.Module, Callable[[], None], Any, torch.Tensor]:
    """Return a model, its training step, the scaler, and a weight that can make the step bad."""
    torch.manual_seed(0)
    model, loss_of, weight = MODELS.get(arguments.size, gpt)(arguments.size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    library = halfstep if arguments.ours else torch.amp
    scaler = library.GradScaler("cpu", init_scale=2.0**10)

    def step() -> None:
        optimizer.zero_grad()
        with library.autocast("cpu", DTYPES[arguments.dtype]):
            loss = loss_of()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()

    return model, step, scaler, weight


Made = tuple[nn.Module, Callable[[], torch.Tensor], torch.Tensor]


def gpt(size: str) -> Made:
    """Return a GPT of a size."""
    config = GPTConfig.of_size(size, VOCAB)
    model = GPT(config)
    tokens = torch.randint(0, VOCAB, (4, config.context))

    def loss_of() -> torch.Tensor:
        return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())

    return model, loss_of, model.blocks[-1].up.weight


def toy(_: str) -> Made:
    """Return two layers."""
    model = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 1))
    x = torch.randn(32, 16)
    return model, lambda: model(x).float().square().mean(), model[2].weight


def deep(_: str) -> Made:
    """Return 300 tiny layers, whose time is that of calling them."""
    layers = [layer for _ in range(300) for layer in (nn.Linear(4, 4), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(4, 1))
    x = torch.randn(4, 4)
    return model, lambda: model(x).float().square().mean(), model[-1].weight


MODELS: dict[str, Callable[[str], Made]] = {"toy": toy, "deep": deep}


def watched(arguments: argparse.Namespace, clock: Clock) -> float:
    """Return the ratio of watched steps to others."""
    arguments.ours = True
    model, step, scaler, _ = training(arguments)
    ratios = []
    for _ in range(arguments.steps):
        (outside,) = times(step, 1, clock)
        with halfstep.diagnose(scaler, model=model):
            (inside,) = times(step, 1, clock)
        ratios.append(inside / outside)
    return statistics.median(ratios)


def times(step: Callable[[], None], count: int, clock: Clock) -> list[float]:
    """Return the seconds of each of some steps."""
    found = []
    for _ in range(count):
        began = clock()
        step()
        found.append(clock() - began)
    return found


if __name__ == "__main__":
    main()
