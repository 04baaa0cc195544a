"""The settings of the demo: plain values, checked when they are made."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from halfstep._demo.gpt import SIZES
from halfstep.errors import DemoError


@dataclass(frozen=True)
class TrainingPrecision:
    """One way to train: the dtype that autocast lowers to, and whether the loss is scaled."""

    name: str  # on the command line and in results.json
    title: str  # in the table and the plot
    dtype: torch.dtype  # float32 switches autocast off
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
"""Sequences in a batch, by size of the model."""

MEAN_OVER = 2**19
"""Tokens over which the loss is averaged: half a million, the batch of GPT-2 and of small GPT-3.

docs/demo.md says why the demo divides by it, and what other values do.
"""


@dataclass(frozen=True)
class DemoSettings:
    """The settings that determine what a run computes.

    Raises:
        DemoError: one of them is out of range, or the device is not there.
    """

    precisions: tuple[str, ...] = tuple(PRECISIONS)
    steps: int = 200
    device: str = "cpu"
    size: str = "small"
    text: Path | None = None  # None is the text that comes with Python
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
        """Sequences in a batch."""
        return BATCHES[self.size]

    @property
    def learning_rate(self) -> float:
        """For AdamW: falls with the width of the model, 2e-3 at width 128."""
        return 0.256 / SIZES[self.size][3]
