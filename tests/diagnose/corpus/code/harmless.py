"""Infinities that do no harm, and must not be named."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from tests.diagnose.models import Code
from torch import Tensor


def metric(x: Tensor) -> Tensor:
    with torch.no_grad():
        _ = (x - x).log().mean()
    return x


def thrown_away(x: Tensor) -> Tensor:
    kept = F.relu(x.detach())
    return x + torch.where(kept > 0, kept.log(), 0.0)


def saturated(x: Tensor) -> Tensor:
    return x * torch.sigmoid((x.abs() + 1) * 1e6)


def limited(x: Tensor) -> Tensor:
    return x + (x.detach() * 1e6).clamp(-1, 1)


def norm_of_zero(x: Tensor) -> Tensor:
    return x + (x - x).norm()


DECOYS: tuple[Code, ...] = (metric, thrown_away, saturated, limited, norm_of_zero)
