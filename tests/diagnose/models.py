"""Small models with places where a fault can be put.

A ``Place`` is a module, so that what it does has its path. A ``Spot`` is a function between
modules: what it does belongs to the module whose forward calls it. Both hand on what they get until
they are given code. ``# fault: Class.attribute`` marks the line that calls a layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

Code = Callable[[Tensor], Tensor]


class Spot:
    """Between modules."""

    code: Code | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return x if self.code is None else self.code(x)


class Place(nn.Module):
    """A module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.code: Code | None = None

    def forward(self, x: Tensor) -> Tensor:
        return x if self.code is None else self.code(x)


def spots_of(model: nn.Module) -> Iterator[tuple[str, Spot | Place]]:
    """Yield where code can be put, with the path of the module that it then belongs to."""
    for path, module in model.named_modules():
        if isinstance(module, Place):
            yield path, module
        for value in vars(module).values():
            if isinstance(value, Spot):
                yield path, value


Again = Literal["no", "yes", "reentrant"]
"""Whether the backward pass computes inner values again, and by which of PyTorch's two ways."""


def through(module: nn.Module, x: Tensor, again: Again) -> Tensor:
    """Run a module, with or without activation checkpointing."""
    if again == "no":
        return module(x)
    return checkpoint(module, x, use_reentrant=again == "reentrant" and x.requires_grad)


# --- residual MLP ---------------------------------------------------------------------------------


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.place = Place()
        self.spot = Spot()
        self.drop = nn.Dropout(0.1)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        h = self.up(self.norm(x))  # fault: Block.up
        h = self.place(h)
        h = self.spot(F.gelu(h))
        h = self.down(self.drop(h))  # fault: Block.down
        return x + h  # fault: Block.add


class InPlaceBlock(Block):
    def forward(self, x: Tensor) -> Tensor:
        x = x.clone()
        h = self.up(self.norm(x.clone()))  # fault: InPlaceBlock.up
        h = self.spot(F.gelu(self.place(h)))
        x += self.down(self.drop(h))  # fault: InPlaceBlock.down, InPlaceBlock.add
        return x


class MLP(nn.Module):
    block = Block

    def __init__(self, width: int, depth: int, again: Again = "no") -> None:
        super().__init__()
        self.stem = nn.Linear(12, width)
        self.blocks = nn.ModuleList(self.block(width) for _ in range(depth))
        self.spot = Spot()
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 4)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)  # fault: MLP.stem
        for block in self.blocks:
            x = through(block, x, self.again)
        return self.head(self.norm(self.spot(x)))  # fault: MLP.head


class InPlaceMLP(MLP):
    block = InPlaceBlock


# --- CNN with batch norm --------------------------------------------------------------------------


class Stage(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(num_in, num_out, 3, padding=1)
        self.norm = nn.BatchNorm2d(num_out)
        self.spot = Spot()
        self.place = Place()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)  # fault: Stage.conv
        x = F.relu(self.spot(self.norm(x)))
        return self.place(F.avg_pool2d(x, 2))


class CNN(nn.Module):
    def __init__(self, width: int, depth: int, again: Again = "no") -> None:
        super().__init__()
        del again  # a batch norm that runs twice counts twice
        widths = [3] + [width // 4] * depth
        self.stages = nn.Sequential(*(Stage(a, b) for a, b in pairwise(widths)))
        self.spot = Spot()
        self.head = nn.Linear(widths[-1], 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.spot(self.stages(x))
        return self.head(x.mean((2, 3)))  # fault: CNN.head


# --- recurrent ------------------------------------------------------------------------------------


class Cell(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, 4 * width)
        self.outer = nn.Linear(width, 4 * width)
        self.spot = Spot()

    def forward(self, x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        i, f, g, o = (self.inner(x) + self.outer(h)).chunk(4, -1)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        return self.spot(o.sigmoid() * c.tanh()), c


class Cells(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = Cell(width)
        self.width = width

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        h = c = x.new_zeros(len(x), self.width)
        states = []
        for inputs in x.unbind(1):
            h, c = self.cell(inputs, h, c)
            states.append(h)
        return torch.stack(states, 1), None


class Recurrent(nn.Module):
    def __init__(self, width: int, depth: int, again: Again = "no") -> None:
        super().__init__()
        del depth, again
        self.stem = nn.Linear(5, width)
        self.rnn = self.recurrence(width)
        self.mix = nn.Linear(width, width)
        self.place = Place()
        self.spot = Spot()
        self.head = nn.Linear(width, 4)

    def recurrence(self, width: int) -> nn.Module:
        return Cells(width)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)  # fault: Recurrent.stem
        x, _ = self.rnn(x)
        x = self.place(self.mix(x))  # fault: Recurrent.mix
        return self.head(self.spot(F.gelu(x)))[:, -1]  # fault: Recurrent.head


class LSTM(Recurrent):
    def recurrence(self, width: int) -> nn.Module:
        return nn.LSTM(width, width, batch_first=True)


# --- autoencoder ----------------------------------------------------------------------------------


class Squash(torch.autograd.Function):
    """x / (1 + |x|)."""

    @staticmethod
    def forward(ctx, x):
        size = 1 + x.abs()
        ctx.save_for_backward(size)
        return x / size

    @staticmethod
    def backward(ctx, gradient):
        (size,) = ctx.saved_tensors
        return gradient / (size * size)


class Coder(nn.Module):
    def __init__(self, num_in: int, num_out: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num_in, num_out)
        self.spot = Spot()
        self.place = Place()

    def forward(self, x: Tensor) -> Tensor:
        x = self.spot(self.linear(x))  # fault: Coder.linear
        return self.place(Squash.apply(x))


class Autoencoder(nn.Module):
    def __init__(self, width: int, depth: int, again: Again = "no") -> None:
        super().__init__()
        widths = [12] + [width] * depth
        self.encoder = nn.Sequential(*(Coder(a, b) for a, b in pairwise(widths)))
        self.spot = Spot()
        self.decoder = nn.ModuleList(Coder(width, width) for _ in range(depth - 1))
        self.head = nn.Linear(width, 12)
        self.again = again

    def forward(self, x: Tensor) -> Tensor:
        x = self.spot(through(self.encoder, x, self.again))
        for coder in self.decoder:
            x = through(coder, x, self.again)
        return self.head(x)  # fault: Autoencoder.head
