"""What the cache of weight casts saves: halfstep.autocast against torch.autocast.

Two models: the GPT with 43 million parameters, whose casts cost time, and one of 4 layers and width
64, where only the host time of each call counts. All variants run in one process, in a new random
order each round; what counts is the median of the ratios within a round.

    python benchmarks/cache_time.py
    python benchmarks/cache_time.py --only "small model" --rounds 500
"""

import argparse
import random
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from halfstep import autocast, cache_info, clear_cache
from halfstep.demo.gpt import GPT, GPTConfig
from halfstep.demo.machine import device_name
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


def forward(model: Model, batch: int, length: int, *, grad: bool) -> Callable[[Context], None]:
    """Return what runs one forward pass."""
    tokens = model.tokens(batch, length)

    def run(context: Context) -> None:
        with torch.set_grad_enabled(grad), context():
            model.gpt(tokens)

    return run


def train(model: Model, micro_batches: int, length: int = 129) -> Callable[[Context], None]:
    """Return what runs one optimizer step after some forward and backward passes."""
    tokens = model.tokens(1, length)

    def run(context: Context) -> None:
        for _ in range(micro_batches):
            with context():
                logits = model.gpt(tokens[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    return run


def tasks(device: str) -> dict[str, Callable[[], Callable[[Context], None]]]:
    """Name what is measured; each is built when its turn comes."""
    return {
        "43 M: one token, no grad": lambda: forward(Model(LARGE, device), 1, 1, grad=False),
        "43 M: 4 micro-batches and a step": lambda: train(Model(LARGE, device), 4),
        "43 M: a step after each forward": lambda: train(Model(LARGE, device), 1),
        "small model: forward, no grad": lambda: forward(Model(SMALL, device), 1, 16, grad=False),
        "small model: forward": lambda: forward(Model(SMALL, device), 1, 16, grad=True),
        "small model: a step": lambda: train(Model(SMALL, device), 1, 33),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--rounds", type=int, default=40, help="of the large model; the small: x 10"
    )
    parser.add_argument("--only", default="", help="the tasks whose name contains this")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    dtype = torch.bfloat16
    variants: dict[str, Context] = {
        "torch.autocast": lambda: torch.autocast(args.device, dtype),
        "noise": lambda: torch.autocast(args.device, dtype),
        "halfstep": lambda: autocast(args.device, dtype),
        "policy torch": lambda: autocast(args.device, dtype, policy="torch"),
        "float32": nullcontext,
    }
    print(
        f"{device_name(args.device)}, {torch.get_num_threads()} threads, "
        f"PyTorch {torch.__version__}, bfloat16\n{'ms, and ratios to torch.autocast':34}"
        + "".join(f"{name:>22}" for name in variants)
    )
    for name, build in tasks(args.device).items():
        if args.only in name:
            run, seconds = build(), {variant: [] for variant in variants}
            clear_cache()
            for round_ in range(-3, args.rounds * (10 if "small" in name else 1)):
                for variant in random.sample(list(variants), len(variants)):
                    synchronize(torch.device(args.device))
                    start = time.perf_counter()
                    run(variants[variant])
                    synchronize(torch.device(args.device))
                    if round_ >= 0:
                        seconds[variant].append(time.perf_counter() - start)
            row = f"{name:34}{statistics.median(seconds['torch.autocast']) * 1e3:22.2f}"
            for variant in list(variants)[1:]:
                low, middle, high = ratios(seconds[variant], seconds["torch.autocast"])
                row += f"   {middle:6.3f} ({low:.3f}-{high:.3f})"[:22].rjust(22)
            print(row + f"   {cache_info().bytes / 2**20:.1f} MiB kept")
    print("medians; in brackets the quartiles of the ratios within a round")


if __name__ == "__main__":
    main()
