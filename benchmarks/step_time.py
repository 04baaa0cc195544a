"""Time of one training step under halfstep.autocast against torch.autocast and against float32.

torch.autocast and float32 run in processes of their own (``baseline.py``), in turn with halfstep's.
"torch.autocast after halfstep's" runs in the process of the latter, whose kernels it meets. What
counts is the median of the ratios within a round. In float16 the step is a whole iteration of
the library's scaler. A last table has no clock: the ops of a step, the bytes that they read and
write, calls of Python, halfstep's kernels that are entered and, on a GPU, launches.

    python benchmarks/step_time.py
    python benchmarks/step_time.py --size small --rounds 50 --dtype float16
    python benchmarks/step_time.py --size cnn --batch 8
    python benchmarks/step_time.py --compile --rounds 16
"""

import argparse
import cProfile
import pstats
import statistics
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

sys.path.insert(0, str(Path(__file__).parents[1]))
from benchmarks.baseline import AGAIN, measure, ratio, seconds, synchronize
from examples.train_text import GPT, SIZES, GPTConfig

from halfstep._common.machine import device_name

Context = Callable[[], AbstractContextManager[Any]]
TORCH, FLOAT32 = "torch.autocast", "float32"
OURS, AFTERWARDS = "halfstep.autocast", "torch.autocast after halfstep's"


def contexts(library: Any, device: str, dtype: torch.dtype) -> dict[str, Context]:
    """Return the contexts to compare in a process of a library."""
    theirs = partial(torch.autocast, device, dtype)
    if library is torch.amp:
        return {TORCH: theirs, FLOAT32: nullcontext}
    return {OURS: partial(library.autocast, device, dtype), AFTERWARDS: theirs}


CNN = "cnn"


class Training:
    """A GPT or a CNN, a random batch, AdamW and perhaps a scaler; ``step`` is what gets timed."""

    def __init__(
        self,
        size: str,
        batch: int,
        length: int,
        device: str,
        *,
        compiled: bool = False,
        make_scaler: Callable[[str], Any] | None = None,
    ) -> None:
        torch.manual_seed(0)
        if size == CNN:
            self.model: nn.Module = cnn().to(device)
            self.inputs = torch.randn(batch, 3, 32, 32, device=device)
            self.targets = torch.randint(10, (batch,), device=device)
        else:
            config = GPTConfig.of_size(size, vocab=256)
            self.model = GPT(config).to(device)
            shape = (batch, min(length, config.context) + 1)
            tokens = torch.randint(config.vocab, shape, device=device)
            self.inputs, self.targets = tokens[:, :-1], tokens[:, 1:].flatten()
        if compiled:
            self.model.compile()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        self.scaler = make_scaler(device) if make_scaler else None

    def step(self, context: AbstractContextManager[Any]) -> None:
        """Train one step."""
        self.optimizer.zero_grad()
        with context:
            loss = F.cross_entropy(self.model(self.inputs).flatten(0, -2), self.targets)
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
            return
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()


def cnn() -> nn.Module:
    """Return six convolutions with batch norm, for images of 32 x 32."""
    layers: list[nn.Module] = []
    for before, after, stride in (
        (3, 32, 1), (32, 32, 1), (32, 64, 2), (64, 64, 1), (64, 128, 2), (128, 128, 1),
    ):  # fmt: skip
        conv = nn.Conv2d(before, after, 3, stride=stride, padding=1, bias=False)
        layers += [conv, nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


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


def calls_of(training: Training, context: AbstractContextManager[None]) -> tuple[int, int]:
    """Return the number of calls of Python, and of halfstep's kernels that are entered."""
    with cProfile.Profile() as profile:
        training.step(context)
    stats: Any = pstats.Stats(profile)
    kernels = [
        calls[1]
        for (file, _, name), calls in stats.stats.items()
        if (Path(file).name, name) == ("kernels.py", "kernel")
    ]
    return stats.total_calls, sum(kernels)


def launches_of(training: Training, context: AbstractContextManager[None]) -> int:
    """Return the number of kernels that a step launches on a GPU."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        training.step(context)
        synchronize(training.inputs.device.type)
    return sum("LaunchKernel" in event.name for event in profile.events())


def training_of(library: Any, args: argparse.Namespace) -> Training:
    make_scaler = library.GradScaler if args.dtype == "float16" else None
    shape = args.size, args.batch, args.length, args.device
    return Training(*shape, compiled=args.compile, make_scaler=make_scaler)


def timed_steps(library: Any, args: argparse.Namespace) -> dict[str, Callable[[], float]]:
    """Return what makes a step and returns its seconds, by context."""
    training, dtype = training_of(library, args), getattr(torch, args.dtype)

    def timed(context: Context) -> float:
        return seconds(lambda: training.step(context()), args.device)

    each = contexts(library, args.device, dtype).items()
    return {name: partial(timed, context) for name, context in each}


def counted_steps(library: Any, args: argparse.Namespace) -> dict[str, Callable[[], Any]]:
    """Return what makes a step and returns what is counted in it, by context."""
    training, dtype = training_of(library, args), getattr(torch, args.dtype)

    def counted(context: Context) -> tuple[int, ...]:
        for _ in range(4):  # halfstep's kernels of products watch the first contexts, and leave
            training.step(context())
        ops = ops_of(training, context())
        launches = launches_of(training, context()) if args.device == "cuda" else 0
        return ops.count, ops.bytes, *calls_of(training, context()), launches

    each = contexts(library, args.device, dtype).items()
    return {name: partial(counted, context) for name, context in each}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--size", choices=[*SIZES, CNN], default="43m")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=256, help="tokens in a sequence")
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--dtype", choices=["bfloat16", "float16"], default="bfloat16")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="the model, with torch.compile")
    args = parser.parse_args()

    print(
        f"{args.size}, a batch of {args.batch}, for a GPT {args.length} tokens each, {args.dtype}"
        f"{', compiled' * args.compile}; {device_name(args.device)}, PyTorch {torch.__version__}"
    )
    times = measure(timed_steps, args, rounds=args.rounds, warm_up=4)
    print(f"{'':36}{'ms':>8}   {'to torch.autocast':^20}   {'to float32':^20}")
    for name, each in times.items():
        if name != FLOAT32 + AGAIN:
            row = f"{name:36}{statistics.median(each) * 1e3:8.1f}"
            print(row + "".join(f"   {ratio(each, times[base])}" for base in (TORCH, FLOAT32)))
    print("medians; in brackets the quartiles of the ratios within a round")
    if not args.compile:
        counts = measure(counted_steps, args, has_again=False)
        for name, ((ops, size, calls, kernels, launches),) in counts.items():
            print(
                f"{name:36}{ops:6} ops{size / 1e6:10.2f} MB read and written{calls:8,} calls of "
                f"Python, {kernels} kernels of halfstep{f', {launches} launches' * bool(launches)}"
            )


if __name__ == "__main__":
    main()
