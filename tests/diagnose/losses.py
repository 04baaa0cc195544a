"""Losses, good and bad. ``# fault: name`` marks the line of the first bad op."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from tests.diagnose.injections import Verdict
from torch import Tensor

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class BadLoss:
    """``outside``: computed after autocast has ended, in the dtype of the output."""

    name: str
    loss: Loss
    verdict: Verdict
    ops: frozenset[str]
    outside: bool
    classes: bool


LOSSES: dict[str, BadLoss] = {}


def bad(
    verdict: Verdict, *ops: str, outside: bool = False, classes: bool = False
) -> Callable[[Loss], Loss]:
    def note(loss: Loss) -> Loss:
        name = loss.__name__
        LOSSES[name] = BadLoss(name, loss, verdict, frozenset(ops), outside, classes)
        return loss

    return note


def distance(out: Tensor, y: Tensor) -> Tensor:
    return F.mse_loss(out, y)


def classes(out: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(out.flatten(0, -2), y.flatten())


@bad("range", "pow", outside=True)
def squares_in_half(out: Tensor, y: Tensor) -> Tensor:
    big = out.tanh() * 1e3 + 2e3
    return big.pow(2).mean()  # fault: squares_in_half


@bad("range", "sum", outside=True)
def sum_in_half(out: Tensor, y: Tensor) -> Tensor:
    sizes = out.abs() + 6e3
    return sizes.sum()  # fault: sum_in_half


@bad("range", "mse_loss", outside=True)
def distance_in_half(out: Tensor, y: Tensor) -> Tensor:
    big = out.tanh() * 1e3 + 2e3
    return F.mse_loss(big, torch.zeros_like(big))  # fault: distance_in_half


@bad("range", "sub", classes=True)
def far_logits(out: Tensor, y: Tensor) -> Tensor:
    logits = (out.flatten(0, -2) * 1e3).tanh() * 6e4
    shifted = logits - logits.amax(-1, keepdim=True)  # fault: far_logits
    return F.cross_entropy(shifted, y.flatten())


@bad("range", "log")
def small_probability(out: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(out.tanh() - 30)
    return -p.log().mean()  # fault: small_probability


@bad("maths", "div")
def nothing_counted(out: Tensor, y: Tensor) -> Tensor:
    counted = out.abs() > 6e4
    return (out * counted).sum() / counted.sum()  # fault: nothing_counted


@bad("maths", "nll_loss_forward", classes=True)
def all_ignored(out: Tensor, y: Tensor) -> Tensor:
    y = torch.full_like(y, -100)
    return F.cross_entropy(out.flatten(0, -2), y.flatten())  # fault: all_ignored


@bad("maths", "log")
def log_of_certain(out: Tensor, y: Tensor) -> Tensor:
    p = torch.sigmoid(out.float().abs() + 40)
    return -torch.log(1 - p).mean()  # fault: log_of_certain
