"""The parameters whose gradients are inf or NaN."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from halfstep._common.numbers import things
from halfstep._gradients.gradients import Gradients


@dataclass(frozen=True)
class Culprit:
    """A parameter whose gradient is inf or NaN.

    Attributes:
        name: Its name in the watched module, else its position in the optimizer.
        num_inf: Number of entries that are inf or -inf.
        num_nan: Number of entries that are NaN.
        num_entries: Number of entries.
        amax: Largest finite magnitude, multiplied by the scale if the gradient still is.

    The numbers are 0 if the gradient was gone before it could be inspected.
    """

    name: str
    num_inf: int = 0
    num_nan: int = 0
    num_entries: int = 0
    amax: float = 0.0

    def __str__(self) -> str:
        if not self.num_entries:
            return self.name
        bad = [f"{n} {kind}" for n, kind in ((self.num_inf, "inf"), (self.num_nan, "NaN")) if n]
        return (
            f"{self.name}: {' and '.join(bad)} of {things(self.num_entries, 'entry', 'entries')}, "
            f"largest finite magnitude {self.amax:.3g}"
        )


@torch.no_grad()
def culprits(gradients: Gradients, names: Iterable[str]) -> list[Culprit]:
    """Count inf and NaN in every gradient. Slow and with syncs: only for messages."""
    found = []
    for name, values in zip(names, gradients.values, strict=True):
        finite = values.isfinite()
        num_bad = values.numel() - int(finite.sum())
        if num_bad:
            num_nan = int(values.isnan().sum())
            magnitudes = values.abs().where(finite, 0)
            amax = magnitudes.max().item()
            found.append(Culprit(name, num_bad - num_nan, num_nan, values.numel(), amax))
    return found
