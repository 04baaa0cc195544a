"""Loss that trainings reach in each precision: a GPT and an LSTM on text, a CNN on digits.

Every precision trains the same models from the same seeds on the same batches. The loss is that of
held-out data at the end, evaluated as it is trained: mean and standard deviation over the seeds.
Lost updates are those of the last ten steps. Needs scikit-learn for its digits.

    python benchmarks/quality.py
    python benchmarks/quality.py --seeds 2 --steps 100 --only digits
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.train_text import GPT, Corpus, GPTConfig, draw_batches, held_out_windows

import halfstep
from halfstep._common.machine import device_name
from halfstep._common.nested import tensors_reached

LAST = 10

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@dataclass(frozen=True)
class Precision:
    """How a training computes.

    Attributes:
        name: What the table calls it.
        parameters: The dtype of the parameters.
        autocast: The dtype of autocast, None for none.
        store: That of the master weights, None for none.
        scales: Whether a GradScaler scales the loss.
    """

    name: str
    parameters: torch.dtype = FP32
    autocast: torch.dtype | None = None
    store: Any = None
    scales: bool = False


PRECISIONS = [
    Precision("float32"),
    Precision("autocast bfloat16", autocast=BF16),
    Precision("autocast float16, GradScaler", autocast=FP16, scales=True),
    Precision("bfloat16", BF16, BF16),
    Precision("bfloat16, split", BF16, BF16, "split"),
    Precision("bfloat16, float32", BF16, BF16, "float32"),
    Precision("float16, float32, GradScaler", FP16, FP16, "float32", scales=True),
]


class LSTM(nn.Module):
    """Characters to the logits of the next ones."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(vocab, 64), nn.Linear(128, vocab)
        self.lstm = nn.LSTM(64, 128, batch_first=True)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return logits ``[batch, time, vocab]``."""
        logits: Tensor = self.head(self.lstm(self.embedding(tokens))[0])
        return logits


class CNN(nn.Sequential):
    """Images of 8 x 8 to the logits of ten digits."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Flatten()),
            nn.Linear(512, 10),
        )


@dataclass(frozen=True)
class Task:
    """A model and its data.

    Attributes:
        make: Makes the model.
        rate: The learning rate.
        batches: Yields inputs and targets of a number of steps, by the seed.
        held_out: Inputs and targets that are not trained on.
    """

    make: Callable[[], nn.Module]
    rate: float
    batches: Callable[[int, int], Iterable[tuple[Tensor, Tensor]]]
    held_out: list[tuple[Tensor, Tensor]]


def text(make: Callable[[int], nn.Module], context: int, rate: float) -> Task:
    corpus = Corpus()
    return Task(
        lambda: make(corpus.vocab),
        rate,
        lambda steps, seed: draw_batches(corpus.train, steps, 16, context, seed, "cpu"),
        list(held_out_windows(corpus.held_out, context, at_most=128)),
    )


def digits() -> Task:
    images, numbers = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16).float().view(-1, 1, 8, 8), torch.tensor(numbers)
    is_held_out = torch.arange(len(x)) % 5 == 0
    train = x[~is_held_out], y[~is_held_out]

    def batches(steps: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            chosen = torch.randint(len(train[0]), (64,), generator=generator)
            yield train[0][chosen], train[1][chosen]

    return Task(CNN, 1e-3, batches, [(x[is_held_out], y[is_held_out])])


TASKS: dict[str, Callable[[], Task]] = {
    "GPT": lambda: text(lambda vocab: GPT(GPTConfig.of_size("small", vocab)), 64, 1e-3),
    "LSTM": lambda: text(LSTM, 64, 3e-3),
    "digits": digits,
}


@dataclass(frozen=True)
class Trained:
    """What became of one training."""

    loss: float
    lost: float
    skipped: int
    bytes: float


def train(task: Task, precision: Precision, steps: int, seed: int) -> Trained:
    torch.manual_seed(seed)
    model = task.make().to(precision.parameters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=task.rate, foreach=True)
    if precision.store:
        halfstep.master_weights(optimizer, precision.store)
    scaler = halfstep.GradScaler("cpu", enabled=precision.scales)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, task.rate / 100)
    lost = halfstep.lost_updates(optimizer)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        context: AbstractContextManager[object] = nullcontext()
        if precision.autocast:
            context = halfstep.autocast("cpu", precision.autocast)
        with context:
            logits = model(x.to(precision.parameters) if x.is_floating_point() else x)
            return F.cross_entropy(logits.float().flatten(0, -2), y.flatten())

    for step, (x, y) in enumerate(task.batches(steps, seed)):
        optimizer.zero_grad()
        scaler.scale(loss_of(x, y)).backward()
        with lost if step >= steps - LAST else nullcontext():
            scaler.step(optimizer)
        scaler.update()
        schedule.step()
    held = [[param, param.grad, optimizer.state[param]] for param in model.parameters()]
    held_bytes = sum(tensor.nbytes for each in held for tensor in tensors_reached(each))
    memory = held_bytes / sum(param.numel() for param in model.parameters())
    model.eval()
    with torch.no_grad():
        losses = [loss_of(x, y).item() for x, y in task.held_out]
    skipped = scaler.counts().skipped if precision.scales else 0
    return Trained(statistics.fmean(losses), lost.share, skipped, memory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--only", choices=TASKS, help="one of the models")
    args = parser.parse_args()
    print(
        f"{args.seeds} seeds, {args.steps} steps of AdamW; {device_name('cpu')}, "
        f"PyTorch {torch.__version__}"
    )
    for name in [args.only] if args.only else TASKS:
        task = TASKS[name]()
        print(f"\n{name:29}{'held-out loss':^18}{'lost':>8}{'skipped':>9}{'bytes':>7}")
        for precision in PRECISIONS:
            runs = [train(task, precision, args.steps, seed) for seed in range(args.seeds)]
            losses = [run.loss for run in runs]
            spread = statistics.stdev(losses) if len(losses) > 1 else 0.0
            share = statistics.fmean(run.lost for run in runs)
            lost = "-" if math.isnan(share) else f"{share:.2%}"  # rounded by chance
            print(
                f"{precision.name:29}{statistics.fmean(losses):8.4f} +- {spread:.4f}{lost:>9}"
                f"{statistics.fmean(run.skipped for run in runs):8.1f}{runs[0].bytes:8.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
