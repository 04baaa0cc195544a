"""Training of one GPT in one precision: settings, the loop, and the measurements around it."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from halfstep import GradScaler, autocast
from halfstep._common.nested import tensors_in
from halfstep._demo.corpus import Corpus, draw_batches, held_out_windows
from halfstep._demo.gpt import GPT, SIZES, GPTConfig
from halfstep._pytorch import modes, storages
from halfstep._report.summarize import RECENT
from halfstep.errors import DemoError


@dataclass(frozen=True)
class TrainingPrecision:
    """One way to train: the dtype that autocast lowers to, and whether the loss is scaled."""

    name: str  # on the command line and in results.json
    title: str  # in the table and the plot
    dtype: torch.dtype  # float32 disables autocast
    scaling: bool


PRECISIONS: dict[str, TrainingPrecision] = {
    precision.name: precision
    for precision in (
        TrainingPrecision("fp32", "fp32", torch.float32, scaling=False),
        TrainingPrecision("bf16", "bf16 autocast", torch.bfloat16, scaling=False),
        TrainingPrecision(
            "fp16-unscaled", "fp16 autocast, no scaler", torch.float16, scaling=False
        ),
        TrainingPrecision("fp16", "fp16 autocast + GradScaler", torch.float16, scaling=True),
    )
}
"""The four ways to train, in the order of the runs; the others are compared to fp32."""

BATCHES: dict[str, int] = {"tiny": 8, "small": 8, "medium": 32, "43m": 32}
"""Number of sequences in a batch, by model size."""

MEAN_OVER = 2**19
"""Number of tokens over which the loss is averaged: half a million, as for GPT-2 and small GPT-3.

docs/demo.md explains why the demo divides by it, and the effect of other values.
"""


@dataclass(frozen=True)
class DemoSettings:
    """The settings that determine what a run computes.

    Raises:
        DemoError: one of them is out of range, or the device is not available.
    """

    precisions: tuple[str, ...] = tuple(PRECISIONS)
    steps: int = 200
    device: str = "cpu"
    size: str = "small"
    text: Path | None = None  # None: the text that comes with Python
    seed: int = 0
    mean_over: int = MEAN_OVER

    def __post_init__(self) -> None:
        if not self.precisions:
            raise DemoError(f"no precision given; choose some of {', '.join(PRECISIONS)}")
        for name in self.precisions:
            if name not in PRECISIONS:
                raise DemoError(f"no precision is called {name!r}; choose {', '.join(PRECISIONS)}")
        if self.size not in SIZES:
            raise DemoError(f"no size is called {self.size!r}; choose {', '.join(SIZES)}")
        if self.steps < 1:
            raise DemoError(f"steps must be at least 1, got {self.steps}")
        if self.mean_over < 1:
            raise DemoError(f"mean-over must be at least 1 token, got {self.mean_over}")
        if not 0 <= self.seed < 2**63:
            raise DemoError(f"seed must be from 0 to 2**63 - 1, got {self.seed}")
        if self.device not in ("cpu", "cuda"):
            raise DemoError(f"the demo runs on cpu or cuda, not on {self.device!r}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise DemoError(
                "this PyTorch sees no CUDA device; use --device cpu, "
                "or install a CUDA build of torch on a machine with an NVIDIA GPU"
            )

    @property
    def ordered_precisions(self) -> list[TrainingPrecision]:
        """The chosen precisions, each once, fp32 first."""
        return [precision for name, precision in PRECISIONS.items() if name in self.precisions]

    @property
    def batch(self) -> int:
        """Number of sequences in a batch."""
        return BATCHES[self.size]

    @property
    def learning_rate(self) -> float:
        """The learning rate of AdamW: inverse to the model width, 2e-3 at width 128."""
        return 0.256 / SIZES[self.size][3]


Batch = tuple[Tensor, Tensor]


# docs/demo.md shows this function, word for word; a test compares them.
def training_loop(
    model: nn.Module,
    batches: Iterable[Batch],
    learning_rate: float,
    mean_over: int,
    dtype: torch.dtype,
    scaling: bool,
) -> Iterator[tuple[Tensor, GradScaler]]:
    """Train on the batches, in mixed precision unless dtype is float32."""
    device = next(model.parameters()).device.type
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    scaler = GradScaler(device, growth_interval=12, enabled=scaling)
    for inputs, targets in batches:
        optimizer.zero_grad()
        with autocast(device, dtype=dtype, enabled=dtype != torch.float32):
            logits = model(inputs).flatten(0, 1)
            loss = F.cross_entropy(logits, targets.flatten())
        share = torch.tensor(targets.numel() / mean_over, device=device)
        scaler.scale(loss).backward(share)  # as a part of a larger batch
        scaler.step(optimizer)
        scaler.update()
        yield loss.detach(), scaler


@dataclass
class PrecisionRun:
    """The results of one training run; filled step by step, so that it may be interrupted.

    Losses are in nats per token; steps are numbered from 0.
    """

    precision: TrainingPrecision
    steps: int  # the requested number
    losses: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)  # after each step; none without a scaler
    skipped: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    zero_shares: dict[int, float] = field(default_factory=dict)  # of all gradient entries, by step
    held_out_loss: float | None = None  # after the last step
    peak_memory: int | None = None  # in bytes, see peak_memory()

    @property
    def is_finished(self) -> bool:
        """Whether the run was completed."""
        return self.held_out_loss is not None

    @property
    def training_loss(self) -> float | None:
        """Mean over the last steps, as in the report: a single batch is too noisy."""
        return fmean(self.losses[-RECENT:]) if self.losses else None

    @property
    def step_seconds(self) -> float | None:
        """Median duration of a step; the first tenth, at most 10 steps, counts as warm-up."""
        timed = self.seconds[min(10, self.steps // 10) :]
        return median(timed) if timed else None

    @property
    def zero_share(self) -> float | None:
        """Mean over the sampled steps."""
        return fmean(self.zero_shares.values()) if self.zero_shares else None

    @property
    def final_scale(self) -> float | None:
        """The scale after the last step; None without a scaler."""
        return self.scales[-1] if self.scales else None


def train(
    run: PrecisionRun,
    corpus: Corpus,
    settings: DemoSettings,
    on_step: Callable[[PrecisionRun], None],
    around: AbstractContextManager[object],
) -> None:
    """Train one model in the context ``around`` and write the results into ``run``.

    ``on_step`` is called after each step, outside the measured time.
    """
    run.peak_memory = peak_memory(settings.device, lambda: _first_steps(run, corpus, settings))
    model = new_model(corpus, settings)
    loop = _start(model, run.precision, corpus, settings, settings.steps)
    sample_every = max(1, settings.steps // 20)
    with around:
        for step in range(settings.steps):
            loss, scaler, seconds = _timed_step(loop, settings.device)
            run.losses.append(loss.item())
            run.seconds.append(seconds)
            if run.precision.scaling:
                run.scales.append(scaler.get_scale())
                if scaler.counts().skipped_in_a_row:
                    run.skipped.append(step)
            if (step + 1) % sample_every == 0:
                run.zero_shares[step] = zero_share(model)
            on_step(run)
    run.held_out_loss = evaluate(model, corpus, settings.device)


def new_model(corpus: Corpus, settings: DemoSettings) -> GPT:
    """Create the model with the same weights each time, independent of the random state."""
    torch.manual_seed(settings.seed)
    return GPT(GPTConfig.of_size(settings.size, corpus.vocab)).to(settings.device)


@torch.no_grad()
def evaluate(model: GPT, corpus: Corpus, device: str) -> float:
    """Return the mean loss per token on the held-out text.

    It is computed in fp32 for every run, so that it compares only the trained weights.
    """
    total, count = 0.0, 0
    for inputs, targets in held_out_windows(corpus.held_out, model.config.context):
        logits = model(inputs.to(device)).flatten(0, 1)
        total += F.cross_entropy(logits, targets.flatten().to(device), reduction="sum").item()
        count += targets.numel()
    return total / count


def zero_share(model: nn.Module) -> float:
    """Return the fraction of all gradient entries that are exactly zero."""
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    zeros = sum(int((gradient == 0).sum()) for gradient in gradients)
    return zeros / sum(gradient.numel() for gradient in gradients)


def _start(
    model: GPT, precision: TrainingPrecision, corpus: Corpus, settings: DemoSettings, steps: int
) -> Iterator[tuple[Tensor, GradScaler]]:
    """Return the training loop, ready for its first step."""
    batches = draw_batches(
        corpus.train, steps, settings.batch, model.config.context, settings.seed, settings.device
    )
    return training_loop(
        model,
        batches,
        settings.learning_rate,
        settings.mean_over,
        precision.dtype,
        precision.scaling,
    )


def _first_steps(run: PrecisionRun, corpus: Corpus, settings: DemoSettings) -> None:
    """Make two steps with a new model; in the second, the optimizer state is in memory too."""
    for _ in _start(new_model(corpus, settings), run.precision, corpus, settings, steps=2):
        pass


def _timed_step(
    loop: Iterator[tuple[Tensor, GradScaler]], device: str
) -> tuple[Tensor, GradScaler, float]:
    started = time.perf_counter()
    loss, scaler = next(loop)
    if device == "cuda":
        torch.cuda.synchronize()
    return loss, scaler, time.perf_counter() - started


# --- memory ---------------------------------------------------------------------------------------


def peak_memory(device: str, work: Callable[[], object]) -> int:
    """Run ``work`` and return the peak number of bytes of its tensors.

    On CUDA the allocator reports it. The CPU has no such counter, and the peak resident size of a
    process never shrinks between runs; so the live tensors created by ``work`` are counted. Scratch
    space inside CPU kernels is not a tensor and is not counted.
    """
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return int(torch.cuda.max_memory_allocated()) - before
    live = _LiveTensors()
    with live:
        work()
    return live.peak


class _LiveTensors(modes.TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that adds up the sizes of all live storages that ops have returned."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._now = 0
        self._alive: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in([result]):
            self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storages.number_of(storage), storage.nbytes()
        if key in self._alive:
            return

        def freed(_: object) -> None:
            del self._alive[key]
            self._now -= size

        self._alive[key] = weakref.ref(storage, freed)
        self._now += size
        self.peak = max(self.peak, self._now)
