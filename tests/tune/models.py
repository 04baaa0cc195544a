"""Models that are healthy in lower precision, and modules that are not."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from examples.train_text import GPT, GPTConfig
from torch import Tensor, nn

Made = tuple[nn.Module, Any, Callable[[nn.Module, Any], Tensor] | None]


def of_classes(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


def gpt() -> Made:
    tokens = torch.randint(0, 60, (4, 33))
    model = GPT(GPTConfig.of_size("tiny", vocab=60))
    return model, (tokens[:, :-1], tokens[:, 1:]), of_classes


def cnn() -> Made:
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(32, 10),
    )
    return model, (torch.randn(16, 3, 16, 16), torch.randint(0, 10, (16,))), of_classes


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(50, 32)
        self.lstm = nn.LSTM(32, 64, num_layers=2, batch_first=True)
        self.head = nn.Linear(64, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.lstm(self.tokens(tokens))[0])


def lstm() -> Made:
    return Recurrent(), (torch.randint(0, 50, (8, 40)), torch.randint(0, 50, (8, 40))), of_classes


def mlp() -> Made:
    layers = [layer for _ in range(6) for layer in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10)), torch.randn(128, 64), None


HEALTHY = [gpt, cnn, lstm, mlp]


class Overflows(nn.Linear):
    """Goes up to 1e6 and back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e6 / 1e6


class Cancels(nn.Linear):
    """Subtracts nearly equal large numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) + 2000.0) - 2000.0


class Flushes(nn.Linear):
    """Goes down to 1e-9 and back."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 1e-9 * 1e9


class Block(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner, self.out = nn.LayerNorm(16), inner, nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(torch.relu(self.inner(self.norm(x))))


def with_inner(*kinds: type[nn.Linear]) -> nn.Module:
    """A residual network of which each block has one of the layers."""
    return nn.Sequential(
        nn.Linear(8, 16), *(Block(kind(16, 16)) for kind in kinds), nn.Linear(16, 4)
    )


class _Steep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor / ctx.factor, None


class SpoilsGradients(nn.Linear):
    """Its output is right; its gradient goes up to 1e12 and back."""

    factor = 1e12

    def forward(self, x: Tensor) -> Tensor:
        return _Steep.apply(super().forward(x), self.factor)


class Attends(nn.Module):
    """Attention whose logits leave float16: no module in it is to blame."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        logits = (1000 * self.q(x)) @ (1000 * self.k(x)).transpose(-1, -2)
        return torch.softmax(logits / 1e6, dim=-1) @ self.v(x)
