"""Time of one training step under halfstep.autocast against torch.autocast and against float32.

All variants run in one process, in turn and in a new random order each round, so that whatever
else the machine does hits them alike. What counts is the median of the ratios within a round. A
last table has no clock: the ops of a step, the bytes that they read and write, and Python's calls.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --size small --rounds 50 --dtype float16
    python benchmarks/step_time.py --compile --rounds 16
"""

import argparse
import cProfile
import pstats
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, SIZES, GPTConfig

from halfstep import autocast
from halfstep._common.machine import device_name

Variant = Callable[[], AbstractContextManager[None]]


def variants(device: str, dtype: torch.dtype) -> dict[str, Variant]:
    """The contexts to compare; the first two are what the others are divided by."""
    return {
        "torch.autocast": lambda: torch.autocast(device, dtype),
        "float32": nullcontext,
        "torch.autocast, again": lambda: torch.autocast(device, dtype),  # what is noise
        "halfstep.autocast": lambda: autocast(device, dtype),
        "halfstep.autocast(policy='torch')": lambda: autocast(device, dtype, policy="torch"),
    }


class Training:
    """A GPT, a batch of random tokens and AdamW; ``step`` is what gets timed."""

    def __init__(self, size: str, batch: int, length: int, device: str, *, compiled: bool) -> None:
        torch.manual_seed(0)
        config = GPTConfig.of_size(size, vocab=256)
        self.model = GPT(config).to(device)
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        shape = (batch, min(length, config.context) + 1)
        self.tokens = torch.randint(config.vocab, shape, device=device)

    def step(self, context: AbstractContextManager[None]) -> float:
        """Train one step and return its seconds."""
        synchronize(self.tokens.device)
        start = time.perf_counter()
        self.optimizer.zero_grad()
        with context:
            logits = self.model(self.tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        synchronize(self.tokens.device)
        return time.perf_counter() - start


def synchronize(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize(device)


def measure(
    training: Training, contexts: dict[str, Variant], rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of every step, one for each round and variant."""
    times: dict[str, list[float]] = {name: [] for name in contexts}
    for round_ in range(-2, rounds):  # the first two warm up
        for name in random.sample(list(contexts), len(contexts)):
            seconds = training.step(contexts[name]())
            if round_ >= 0:
                times[name].append(seconds)
        if sys.stderr.isatty():
            print(f"\rround {max(round_ + 1, 0)} of {rounds} ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return times


class Ops(TorchDispatchMode):
    """The number of ops that run, and the bytes of the tensors that they take and return."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not (func.is_view or str(func).startswith("profiler")):
            self.count += 1
            self.bytes += sum(
                leaf.nbytes
                for leaf in tree_leaves((args, kwargs, result))
                if isinstance(leaf, torch.Tensor)
            )
        return result


def ops_of(training: Training, context: AbstractContextManager[None]) -> Ops:
    with Ops() as ops:
        training.step(context)
    return ops


def calls_of(training: Training, context: AbstractContextManager[None]) -> int:
    """Return the number of calls of Python, which the host makes one after the other."""
    with cProfile.Profile() as profile:
        training.step(context)
    return pstats.Stats(profile).total_calls


def ratios(times: list[float], to: list[float]) -> tuple[float, float, float]:
    """Return the quartiles of the ratios within each round."""
    low, middle, high = statistics.quantiles([a / b for a, b in zip(times, to, strict=True)], n=4)
    return low, middle, high


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="43m")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="the model, with torch.compile")
    args = parser.parse_args()

    training = Training(args.size, args.batch, args.length, args.device, compiled=args.compile)
    contexts = variants(args.device, getattr(torch, args.dtype))
    print(
        f"{training.model.num_parameters() / 1e6:.1f} M parameters, {args.batch} x {args.length} "
        f"tokens, {args.dtype}{', compiled' * args.compile}; {device_name(args.device)}, "
        f"PyTorch {torch.__version__}"
    )
    times = measure(training, contexts, args.rounds)
    print(f"{'':36}{'ms':>8}   {'to torch.autocast':^20}   {'to float32':^20}")
    for name, seconds in times.items():
        row = f"{name:36}{statistics.median(seconds) * 1e3:8.1f}"
        for base in ("torch.autocast", "float32"):
            low, middle, high = ratios(seconds, times[base])
            row += f"   {middle:6.3f} ({low:.3f}-{high:.3f})"
        print(row)
    print("medians; in brackets the quartiles of the ratios within a round")
    if not args.compile:
        for name, make in contexts.items():
            ops = ops_of(training, make())
            print(
                f"{name:36}{ops.count:8} ops{ops.bytes / 1e6:12.2f} MB read and written"
                f"{calls_of(training, make()):10,} calls of Python"
            )


if __name__ == "__main__":
    main()
