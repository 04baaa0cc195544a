"""What the schedules of a scale cost and save: steps lost, gradients flushed to zero, final loss.

Two trainings under float16 autocast, where it matters how the scale moves:

bursts: a regression whose noise has heavy tails (Student's t, 2 degrees of freedom), an MLP of ten
    layers, clipped to norm 0.5. In a run the largest gradient varies by a factor of some hundred.
    A schedule that tries larger scales often loses a step each time.
too low: the GPT of `examples/train_text.py`, tiny, on the same text, its loss summed and divided by
    2^19 tokens as there, from a scale of 1: most gradients underflow until the scale has grown.

*Lost*: steps skipped. *Underflow*: entries that are not zero in a float32 backward pass of the same
weights and batch, and zero in what float16 gave, every tenth step. *Loss*: bursts, the mean square
error to the noiseless function on new data; too low, the mean over the last tenth of the steps.
All are means over the seeds; in brackets the smallest and largest.

And the scale alone, in 2,000 iterations whose loss is inf or NaN by a script: either where the
scale is too large, as in a gradient penalty, or whatever the scale is (a NaN batch). *Taken*:
steps; *scale*: the mean of its log2 over the iterations, for torch.amp, for a scale that such a
loss does not change (*held*), and for halfstep. *Possible*: steps with the best scale.

    python benchmarks/scale_schedules.py
    python benchmarks/scale_schedules.py --only scripts
    python benchmarks/scale_schedules.py --seeds 5 --only bursts
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, MEAN_OVER, Corpus, GPTConfig, draw_batches

from halfstep import GradScaler, autocast
from halfstep._common.machine import device_name
from halfstep._scaler.scale_state import Dynamic, ScaleState, Schedule, Static, next_state

Batch = tuple[Tensor, Tensor]
COMPARE_EVERY = 10


@dataclass
class Training:
    """One training, ready to start.

    Attributes:
        model: Its weights are drawn.
        batches: Inputs and targets, one for each step.
        loss: Of outputs and targets, in float32.
        learning_rate: Of Adam.
        max_norm: What gradients are clipped to, None for nothing.
        evaluate: Returns the final loss, from the losses of all steps.
    """

    model: nn.Module
    batches: Iterator[Batch]
    loss: Callable[[Tensor, Tensor], Tensor]
    learning_rate: float
    max_norm: float | None
    evaluate: Callable[[list[float]], float]


def bursts(seed: int, steps: int = 600) -> Training:
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(seed)
    teacher = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).requires_grad_(False)
    layers = [layer for _ in range(9) for layer in (nn.Linear(32, 32), nn.ReLU())]
    model = nn.Sequential(*layers, nn.Linear(32, 1))
    new = torch.randn(2048, 32, generator=generator)

    def batches() -> Iterator[Batch]:
        for _ in range(steps):
            inputs = torch.randn(64, 32, generator=generator)
            # A normal variable over the root of an exponential one is Student's t with 2 degrees.
            exponential = torch.empty(64, 1).exponential_(generator=generator)
            noise = torch.randn(64, 1, generator=generator) / exponential.sqrt()
            yield inputs, 3 * teacher(inputs) + 0.3 * noise

    def evaluate(losses: list[float]) -> float:
        with torch.no_grad():
            return F.mse_loss(model(new), 3 * teacher(new)).item()

    return Training(model, batches(), F.mse_loss, 1e-3, 0.5, evaluate)


def too_low(seed: int, steps: int = 240) -> Training:
    torch.manual_seed(seed)
    corpus = Corpus()
    model = GPT(GPTConfig.of_size("tiny", corpus.vocab))
    batches = draw_batches(corpus.train, steps, 8, model.config.context, seed, "cpu")

    def loss(logits: Tensor, targets: Tensor) -> Tensor:
        summed = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
        return summed / MEAN_OVER

    def evaluate(losses: list[float]) -> float:
        last = fmean(losses[-steps // 10 :])
        return last * MEAN_OVER / (8 * model.config.context)

    return Training(model, batches, loss, 8e-3, None, evaluate)


@dataclass
class Figures:
    """What is measured, one entry for each seed."""

    lost: list[float] = field(default_factory=list)
    underflow: list[float] = field(default_factory=list)
    loss: list[float] = field(default_factory=list)


def train(training: Training, scaler: GradScaler | None, figures: Figures) -> None:
    """Train under float16 autocast, or in float32 if there is no scaler."""
    model, losses, shares, lost = training.model, [], [], 0
    optimizer = torch.optim.Adam(model.parameters(), lr=training.learning_rate)
    uses_float16 = scaler is not None
    scaler = scaler or GradScaler(init_scale=1.0, schedule=Static())
    for step, (inputs, targets) in enumerate(training.batches):
        optimizer.zero_grad()
        with autocast("cpu", torch.float16, enabled=uses_float16):
            outputs = model(inputs)
        loss = training.loss(outputs.float(), targets)
        scaler.scale(loss).backward()
        if uses_float16 and step % COMPARE_EVERY == 0:
            shares.append(underflow_share(training, inputs, targets))
        scaler.step(optimizer, max_norm=training.max_norm)
        scaler.update()
        lost += scaler.outcome(optimizer).skipped
        losses.append(loss.item())
    figures.lost.append(lost)
    figures.underflow.append(fmean(shares) if shares else 0.0)
    figures.loss.append(training.evaluate(losses))


def underflow_share(training: Training, inputs: Tensor, targets: Tensor) -> float:
    """Share of the entries not zero in float32 that are zero in ``.grad``."""
    params = list(training.model.parameters())
    exact = torch.autograd.grad(training.loss(training.model(inputs), targets), params)
    not_zero = sum(int(grad.ne(0).sum()) for grad in exact)
    flushed = sum(
        int((grad.ne(0) & param.grad.eq(0)).sum())
        for grad, param in zip(exact, params, strict=True)
        if param.grad is not None
    )
    return flushed / not_zero


TRAININGS: dict[str, tuple[Callable[[int], Training], list[tuple[str, float, Schedule | None]]]] = {
    "bursts": (
        bursts,
        [
            ("float32", 1.0, None),
            ("Static() at 2^10", 2.0**10, Static()),
            ("Dynamic()", 2.0**16, Dynamic()),
            ("Dynamic(growth_interval=20)", 2.0**16, Dynamic(growth_interval=20)),
        ],
    ),
    "too low": (
        too_low,
        [
            ("float32", 1.0, None),
            ("Static() at 1", 1.0, Static()),
            ("Dynamic() from 1", 1.0, Dynamic()),
            ("Dynamic(growth_interval=20) from 1", 1.0, Dynamic(growth_interval=20)),
            ("Dynamic() from 2^16", 2.0**16, Dynamic()),
        ],
    ),
}


# --- the scale alone ------------------------------------------------------------------------------

NUM_ITERATIONS = 2000
Script: TypeAlias = Callable[[Random], Callable[[int, float], bool]]
"""Makes a function of iteration and scale that says whether the loss is finite."""


def below(exponent: Callable[[Random, int], float]) -> Script:
    return lambda rng: lambda i, scale: scale <= 2 ** exponent(rng, i)


def nan_batches(share: float) -> Script:
    return lambda rng: lambda i, scale: rng.random() >= share


SCRIPTS: dict[str, Script] = {
    "finite up to 2^10": below(lambda rng, i: 10),
    "up to 2^14, falling to 2^4": below(lambda rng, i: 14 - 10 * i / NUM_ITERATIONS),
    "up to 2^(10 +- 0.5), at random": below(lambda rng, i: rng.gauss(10, 0.5)),
    "20 NaN batches in a row": lambda rng: lambda i, scale: not 100 <= i < 120,
    "every tenth batch NaN": lambda rng: lambda i, scale: i % 10 != 9,
    "0.1 % NaN batches": nan_batches(0.001),
    "1 % NaN batches": nan_batches(0.01),
    "10 % NaN batches": nan_batches(0.1),
    "30 % NaN batches": nan_batches(0.3),
}


def scales_of(name: str, is_finite: Callable[[int, float], bool]) -> tuple[int, float]:
    """Return the number of taken steps, and the mean of log2 of the scale."""
    state = ScaleState.first(65536.0, Dynamic())
    scale, tracker = torch.tensor(65536.0), torch.zeros((), dtype=torch.int32)
    taken, log2s = 0, []
    for i in range(NUM_ITERATIONS):
        now = scale.item() if name == "torch.amp" else state.scale
        log2s.append(math.log2(max(now, 2.0**-149)))
        is_good = is_finite(i, now)
        taken += is_good
        if name == "torch.amp":
            found_inf = torch.tensor(float(not is_good))
            torch._amp_update_scale_(scale, tracker, found_inf, 2.0, 0.5, 2000)
        elif is_good or name == "halfstep":
            state = next_state(state, found_inf=not is_good, loss_is_finite=is_good)
    return taken, fmean(log2s)


def compare_scripts(num_seeds: int) -> None:
    names = ("torch.amp", "held", "halfstep")
    print("\n" + f"{'taken and scale':32}{'possible':>8}" + "".join(f"{n:>16}" for n in names))
    for label, script in SCRIPTS.items():
        runs = [[scales_of(n, script(Random(s))) for s in range(num_seeds)] for n in names]
        possible = fmean(
            sum(map(script(Random(s)), range(NUM_ITERATIONS), [0.0] * NUM_ITERATIONS))
            for s in range(num_seeds)
        )
        columns = (
            f"{fmean(taken for taken, _ in each):9.0f}{fmean(log2 for _, log2 in each):7.1f}"
            for each in runs
        )
        print(f"{label:32}{possible:8.0f}" + "".join(columns))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", choices=[*TRAININGS, "scripts"])
    args = parser.parse_args()
    torch.set_num_threads(1)  # the models are small
    print(f"{device_name('cpu')}, PyTorch {torch.__version__}, {args.seeds} seeds")
    if args.only in (None, "scripts"):
        compare_scripts(args.seeds)
    for name, (make, rows) in TRAININGS.items():
        if args.only not in (None, name):
            continue
        print(f"\n{name:36}{'lost':^18}{'underflow':^11}{'loss':^24}")
        for label, init_scale, schedule in rows:
            figures = Figures()
            for seed in range(args.seeds):
                if sys.stderr.isatty():
                    print(f"\r{label}, seed {seed} ", end="", file=sys.stderr, flush=True)
                scaler = GradScaler(None, init_scale, schedule=schedule) if schedule else None
                train(make(seed), scaler, figures)
            if sys.stderr.isatty():
                print("\r", end="\033[K", file=sys.stderr, flush=True)
            print(
                f"{label:36}{fmean(figures.lost):6.1f} "
                f"({min(figures.lost):3.0f} to {max(figures.lost):3.0f})"
                f"{fmean(figures.underflow):10.3%}"
                f"{fmean(figures.loss):9.4f} "
                f"({min(figures.loss):.4f} to {max(figures.loss):.4f})"
            )


if __name__ == "__main__":
    main()
