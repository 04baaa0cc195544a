"""What keeping casts of weights saves: halfstep.autocast against torch.autocast.

Three models: the GPT with 43 million parameters, whose casts cost time, one of 1 GB for weights
that a context uses again, and one of 4 layers and width 64, in one thread, where only the host time
of each call counts. torch.autocast and float32 run in processes of their own (``baseline.py``);
what counts is the median of the ratios within a round.

The large tensors of a step come and go, and where the C library gives their memory back to the
system each time, that is most of what one measures. glibc keeps it if told so:

    export MALLOC_MMAP_THRESHOLD_=4294967296 MALLOC_TRIM_THRESHOLD_=4294967296
    python benchmarks/cache_time.py
    python benchmarks/cache_time.py --only small --rounds 100 --policy torch
"""

import argparse
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, GPTConfig

from baseline import AGAIN, measure, ratio, seconds
from halfstep._autocast import native
from halfstep._common.machine import device_name

Context = Callable[[], AbstractContextManager[None]]
SMALL = GPTConfig(vocab=256, context=64, layers=4, heads=4, width=64)
LARGE = GPTConfig.of_size("43m", vocab=256)
HUGE = GPTConfig(vocab=256, context=64, layers=20, heads=16, width=1024)  # 1.0 GB in float32
TORCH, FLOAT32 = "torch.amp", "float32"
EACH_USE = "halfstep, cast each use"
"""By PyTorch's kernels also where weights are used again in a context."""


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


def generate(model: Model, context: Context) -> None:
    """Use each weight 64 times in one context."""
    tokens = model.tokens(1, 1)
    with torch.no_grad(), context():
        for _ in range(64):
            model.gpt(tokens)


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
    "43 M: 64 tokens, one context": (LARGE, generate),
    "1 GB: 64 tokens, one context": (HUGE, generate),
    "43 M: 4 micro-batches and a step": (LARGE, train(4)),
    "43 M: a step after each forward": (LARGE, train(1)),
    "small: 20 forwards, no grad": (SMALL, forward(16, grad=False, passes=20)),
    "small: 20 forwards": (SMALL, forward(16, grad=True, passes=20)),
    "small: 5 steps": (SMALL, train(1, 33, steps=5)),
}


def timed_tasks(
    library: Any, name: str, device: str, policy: str
) -> dict[str, Callable[[], float]]:
    """Return what runs a task and returns its seconds, by context."""
    config, task = TASKS[name]
    model = Model(config, device)
    make = partial(library.autocast, device, torch.bfloat16)
    contexts: dict[str, Context]
    if library is torch.amp:
        contexts = {TORCH: make, FLOAT32: nullcontext}
    else:
        make = partial(make, policy=policy)
        contexts = {library.__name__: make, EACH_USE: make}

    def timed(variant: str) -> float:
        if library is not torch.amp:
            watch(device, is_native=variant == EACH_USE)
        return seconds(lambda: task(model, contexts[variant]), device)

    return {variant: partial(timed, variant) for variant in contexts}


def watch(device: str, *, is_native: bool) -> None:
    """Have PyTorch's kernels compute products, or let halfstep's see in the task what is needed."""
    here = native.products.get(device)
    if here is None:
        return
    for each in here.watches.values():
        if is_native:
            each.needs_kernels, each.left = False, 10**9
        elif each.left > native.NUM_UNWATCHED:
            each.resume()
    here.settle()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", default="", help="the tasks whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--policy", default="standard")
    args = parser.parse_args()
    threads = torch.get_num_threads()
    print(f"{device_name(args.device)}, PyTorch {torch.__version__}, bfloat16")
    shown = ["halfstep", TORCH + AGAIN, EACH_USE, FLOAT32]
    print(f"{'':34}{'ms':>8}" + "".join(f"{name:>24}" for name in shown))
    for name, (config, _) in TASKS.items():
        if args.only not in name:
            continue
        torch.set_num_threads(1 if config is SMALL else threads)
        times = measure(timed_tasks, name, args.device, args.policy, rounds=args.rounds, warm_up=4)
        row = f"{name:34}{statistics.median(times[TORCH]) * 1e3:8.2f}"
        print(row + "".join(f"    {ratio(times[each], times[TORCH])}" for each in shown))
    print("milliseconds of torch.autocast, and ratios to it: medians, and quartiles in brackets")


if __name__ == "__main__":
    main()
