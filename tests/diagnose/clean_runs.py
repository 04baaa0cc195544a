"""Healthy trainings of thousands of steps, in which a diagnosis would be a false alarm."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import halfstep

STEPS = 2000


class Setting(NamedTuple):
    """Settings of a run. Batches grow and shrink a hundredfold; one in a hundred is an outlier."""

    model: str
    dtype: torch.dtype
    growth_interval: int
    num_losses: int
    clips: bool


def settings() -> Iterator[Setting]:
    dtypes = (*((torch.float16, interval) for interval in (20, 200, 2000)), (torch.bfloat16, 200))
    for number, (name, (dtype, interval)) in enumerate(itertools.product(MODELS, dtypes)):
        yield Setting(name, dtype, interval, num_losses=1 + number % 2, clips=number % 3 == 0)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.cells(x.unflatten(-1, (2, 8)))[0][:, -1])
        return out


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)),
    "cnn": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 4, 4)), nn.Conv2d(1, 4, 3), nn.GELU(), nn.Flatten(), nn.Linear(16, 4)
    ),
    "attention": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 8)),
        nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True),
        nn.Flatten(),
        nn.Linear(16, 4),
    ),
    "recurrent": _Recurrent,
    "norms": lambda: nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)),
}


def alarms_in(setting: Setting, steps: int = STEPS) -> tuple[list[str], int]:
    """Train; return what was said, and the number of steps that dynamic scaling skipped."""
    torch.manual_seed(0)
    model = MODELS[setting.model]()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    scaler = halfstep.GradScaler("cpu", growth_interval=setting.growth_interval)
    said: list[str] = []
    with halfstep.diagnose(
        scaler, model=model, tell=lambda found, step: said.append(f"step {step}: {found}")
    ):
        for _ in range(steps):
            for _ in range(setting.num_losses):
                x = torch.randn(8, 16) * float(torch.randn(()).exp())
                factor = 100.0 if float(torch.rand(())) < 0.01 else 1.0
                with halfstep.autocast("cpu", dtype=setting.dtype):
                    loss = F.cross_entropy(model(x), torch.randint(0, 4, (8,))) * factor
                scaler.scale(loss / setting.num_losses).backward()
            if setting.clips:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return said, scaler.counts().skipped
