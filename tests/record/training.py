"""Little trainings that the tests record."""

from __future__ import annotations

from collections.abc import Callable

import torch
from tests.device import DEVICE
from torch import nn

import halfstep


class Net(nn.Module):
    """A residual block between two layers, with dropout and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 16)
        self.block = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1))
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.head(self.norm(x + self.block(x)))


def train(
    model: nn.Module,
    num_steps: int = 6,
    *,
    dtype: torch.dtype = torch.float16,
    scaler: halfstep.GradScaler | None = None,
    micro_batches: int = 1,
    max_norm: float | None = None,
    before_step: Callable[[int], None] = lambda step: None,
) -> list[float]:
    """Train and return the losses."""
    torch.manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        total = 0.0
        for _ in range(micro_batches):
            x = torch.randn(8, 6)
            with halfstep.autocast(DEVICE, dtype):
                loss = model(x).float().square().mean() / micro_batches
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.item()
        before_step(step)
        if max_norm is not None:
            if scaler is not None:
                scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        losses.append(total)
    return losses
