"""What keeping casts of weights saves: halfstep.autocast against torch.autocast.

Two models: the GPT with 43 million parameters, whose casts cost time, and one of 4 layers and width
64, in one thread, where only the host time of each call counts. All variants run in one process, in
a new random order each round; what counts is the median of the ratios within a round.

The large tensors of a step come and go, and where the C library gives their memory back to the
system each time, that is most of what one measures. glibc keeps it if told so:

    export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
    python benchmarks/cache_time.py
    python benchmarks/cache_time.py --only "small model" --rounds 500
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, GPTConfig

from halfstep import autocast
from halfstep._common.machine import device_name
from step_time import ratios, synchronize

Context = Callable[[], AbstractContextManager[None]]
SMALL = GPTConfig(vocab=256, context=64, layers=4, heads=4, width=64)
LARGE = GPTConfig.of_size("43m", vocab=256)


@dataclass
class Model:
    """A GPT, some tokens and an optimizer; built when it is first needed."""

    config: GPTConfig
    device: str
    gpt: GPT = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.gpt = GPT(self.config).to(self.device)
        self.optimizer = torch.optim.AdamW(self.gpt.parameters(), fused=True)

    def tokens(self, batch: int, length: int) -> torch.Tensor:
        """Draw some tokens."""
        return torch.randint(self.config.vocab, (batch, length), device=self.device)


Task = Callable[[Model, Context], None]


def forward(length: int, *, grad: bool, passes: int = 1) -> Task:
    """Return what runs forward passes."""

    def run(model: Model, context: Context) -> None:
        tokens = model.tokens(1, length)
        for _ in range(passes):
            with torch.set_grad_enabled(grad), context():
                model.gpt(tokens)

    return run


def train(micro_batches: int, length: int = 129, steps: int = 1) -> Task:
    """Return what runs optimizer steps, each after some forward and backward passes."""

    def run(model: Model, context: Context) -> None:
        tokens = model.tokens(1, length)
        for _ in range(steps):
            for _ in range(micro_batches):
                with context():
                    logits = model.gpt(tokens[:, :-1])
                    loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
                loss.backward()
            model.optimizer.step()
            model.optimizer.zero_grad()

    return run


TASKS: dict[str, tuple[GPTConfig, Task]] = {
    "43 M: one token, no grad": (LARGE, forward(1, grad=False)),
    "43 M: 4 micro-batches and a step": (LARGE, train(4)),
    "43 M: a step after each forward": (LARGE, train(1)),
    "small: 20 forwards, no grad": (SMALL, forward(16, grad=False, passes=20)),
    "small: 20 forwards": (SMALL, forward(16, grad=True, passes=20)),
    "small: 5 steps": (SMALL, train(1, 33, steps=5)),
}


def measure(
    variants: dict[str, Callable[[], None]], rounds: int, device: str
) -> dict[str, list[float]]:
    """Return the seconds of every run, one for each round and variant."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for round_ in range(-3, rounds):  # the first three warm up
        for name in random.sample(list(variants), len(variants)):
            synchronize(torch.device(device))
            start = time.perf_counter()
            variants[name]()
            synchronize(torch.device(device))
            if round_ >= 0:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="", help="the tasks whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    dtype, threads = torch.bfloat16, torch.get_num_threads()
    theirs: Context = lambda: torch.autocast(args.device, dtype)  # noqa: E731
    ours: Context = lambda: autocast(args.device, dtype)  # noqa: E731
    contexts = {
        "torch.autocast": theirs,
        "again": theirs,  # what is noise
        "halfstep": ours,
        "float32": nullcontext,
    }
    print(f"{device_name(args.device)}, PyTorch {torch.__version__}, bfloat16")
    print(f"{'':34}{'ms':>8}" + "".join(f"{name:>24}" for name in list(contexts)[1:]))
    for name, (config, task) in TASKS.items():
        if args.only not in name:
            continue
        torch.set_num_threads(1 if config is SMALL else threads)
        model = Model(config, args.device)
        variants = {variant: partial(task, model, context) for variant, context in contexts.items()}
        seconds = measure(variants, args.rounds, args.device)
        row = f"{name:34}{statistics.median(seconds['torch.autocast']) * 1e3:8.2f}"
        for variant in list(variants)[1:]:
            low, middle, high = ratios(seconds[variant], seconds["torch.autocast"])
            row += f"{middle:10.3f} ({low:.3f}-{high:.3f})"
        print(row)
    print("milliseconds of torch.autocast, and ratios to it: medians, and quartiles in brackets")


if __name__ == "__main__":
    main()
