"""What recording costs: steps of a GPT that are recorded against steps that are not.

Steps without a record, with one that samples nothing, and sampled ones come in turn in one process.
What counts is the median of the ratios within a round. A record's own work in a step that is not
sampled is far below the noise of a step, so that its seconds are added up as well.

    python benchmarks/record_time.py
    python benchmarks/record_time.py --dtype float16 --size small --rounds 100
"""

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, SIZES, GPTConfig

import halfstep
from halfstep._common.machine import device_name
from halfstep._tools.record.recorder import Recorder
from step_time import ratios


class Training:
    """A GPT, a batch of random tokens and fused AdamW, with clipping and the scaler for float16."""

    def __init__(self, size: str, batch: int, length: int, dtype: torch.dtype, device: str) -> None:
        torch.manual_seed(0)
        config = GPTConfig.of_size(size, vocab=256)
        self.model = GPT(config).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.scaler = halfstep.GradScaler(device, enabled=dtype is torch.float16)
        shape = (batch, min(length, config.context) + 1)
        self.tokens = torch.randint(config.vocab, shape, device=device)
        self.dtype = dtype

    def step(self) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        with halfstep.autocast(self.tokens.device.type, self.dtype):
            logits = self.model(self.tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), self.tokens[:, 1:].flatten())
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.tokens.device.type == "cuda":
            torch.cuda.synchronize()


class Stopwatch:
    """Adds up the seconds that pass in the methods by which a recorder is called."""

    METHODS = ("on_loss", "on_backward", "on_norm", "on_iteration", "after_step")

    def __init__(self) -> None:
        self.seconds = 0.0
        for name in self.METHODS:
            setattr(Recorder, name, self._timed(getattr(Recorder, name)))

    def _timed(self, method: Callable[..., None]) -> Callable[..., None]:
        def timed(*args: Any, **kwargs: Any) -> None:
            start = time.perf_counter()
            method(*args, **kwargs)
            self.seconds += time.perf_counter() - start

        return timed


def measure(training: Training, rounds: int) -> tuple[dict[str, list[float]], list[float]]:
    """Return the seconds of steps by kind, and those of the record's own work without a sample."""
    folder = tempfile.mkdtemp()
    # The first step of a record is left out: it looks for models and, with samples, measures.
    kinds: dict[str, Callable[[], AbstractContextManager[Any]]] = {
        "not recorded": nullcontext,
        "not recorded, again": nullcontext,
        "recorded": lambda: halfstep.record(folder, training.model, every=0),
        "recorded and sampled": lambda: halfstep.record(folder, training.model, every=1),
    }
    watch, own = Stopwatch(), []
    times: dict[str, list[float]] = {name: [] for name in kinds}
    for round_ in range(-1, rounds):  # the first warms up
        for name in random.sample(list(kinds), len(kinds)):
            with kinds[name]():
                training.step()
                watch.seconds, start = 0.0, time.perf_counter()
                training.step()
                seconds = time.perf_counter() - start
            if round_ >= 0:
                times[name].append(seconds)
                if name == "recorded":
                    own.append(watch.seconds)
        if sys.stderr.isatty():
            print(f"\rround {max(round_ + 1, 0)} of {rounds} ", end="", file=sys.stderr, flush=True)
    if sys.stderr.isatty():
        print(file=sys.stderr)
    return times, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="43m")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()

    dtype = getattr(torch, args.dtype)
    training = Training(args.size, args.batch, args.length, dtype, args.device)
    print(
        f"{training.model.num_parameters() / 1e6:.1f} M parameters, {args.batch} x {args.length} "
        f"tokens, {args.dtype}; {device_name(args.device)}, PyTorch {torch.__version__}"
    )
    times, own = measure(training, args.rounds)
    print(f"{'':24}{'ms':>8}   {'to not recorded':^20}")
    for name, seconds in times.items():
        low, middle, high = ratios(seconds, times["not recorded"])
        milliseconds = statistics.median(seconds) * 1e3
        print(f"{name:24}{milliseconds:8.1f}   {middle:6.3f} ({low:.3f}-{high:.3f})")
    always = statistics.median(own) / statistics.median(times["not recorded"])
    sampled = ratios(times["recorded and sampled"], times["not recorded"])[1] - 1
    print(f"the record's own work in a step: {statistics.median(own) * 1e6:.0f} us, {always:.3%}")
    print(f"with every=50: {always + sampled / 50:.2%}")
    print("medians; in brackets the quartiles of the ratios within a round")


if __name__ == "__main__":
    main()
