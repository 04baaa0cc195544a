"""What rounding does to the values of a model, by module and phase."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep._numerics.formats import Format
from halfstep._pytorch import modes
from halfstep._trace.rows import Phase


@dataclass(frozen=True)
class Count:
    """What became of the values that were rounded in a module.

    Attributes:
        module: Its path; empty for the model itself and for what runs outside of it.
        phase: ``"forward"``, ``"recompute"`` or ``"backward"``.
        values: How many values were rounded.
        saturated: Finite ones that the format cannot hold: they became inf or the largest value.
        flushed: Ones above zero that became zero.
        amax: The largest finite magnitude, as the format would have to hold it.
    """

    module: str
    phase: Phase
    values: int
    saturated: int
    flushed: int
    amax: float

    @property
    def share(self) -> float:
        """What was saturated or flushed as a share of all values, 0 to 1."""
        return (self.saturated + self.flushed) / self.values if self.values else 0.0

    def plain(self) -> dict[str, Any]:
        """Return plain values by name."""
        return {
            "module": self.module,
            "phase": self.phase,
            "values": self.values,
            "saturated": self.saturated,
            "flushed": self.flushed,
            "amax": self.amax,
            "share": self.share,
        }


@dataclass
class _Sum:
    """Sums on a device, which nothing waits for until they are read."""

    values: int
    saturated: Tensor
    flushed: Tensor
    amax: Tensor

    def add(self, other: _Sum) -> None:
        # Not in place: a tensor of inference mode may be changed nowhere else.
        self.values += other.values
        self.saturated = self.saturated + other.saturated
        self.flushed = self.flushed + other.flushed
        self.amax = torch.maximum(self.amax, other.amax)


class Counts:
    """Counts as they come in, from several threads.

    Args:
        format: The format that is rounded to.
    """

    def __init__(self, format: Format) -> None:
        self._format = format
        self._sums: dict[tuple[str, Phase, torch.device], _Sum] = {}
        self._lock = threading.Lock()

    def add(self, module: str, phase: Phase, values: Tensor) -> None:
        """Count values before they are rounded. Sync: none."""
        if not values.numel():
            return
        with modes.unseen_by_modes():
            counted = _counted(values, self._format)
            with self._lock:
                key = (module, phase, values.device)
                if key in self._sums:
                    self._sums[key].add(counted)
                else:
                    self._sums[key] = counted

    def rows(self) -> list[Count]:
        """Return the counts by module and phase. Sync: waits for the devices."""
        with self._lock:
            sums = dict(self._sums)
        rows: dict[tuple[str, Phase], Count] = {}
        for (module, phase, _), found in sums.items():
            before = rows.get((module, phase), Count(module, phase, 0, 0, 0, 0.0))
            rows[module, phase] = Count(
                module,
                phase,
                before.values + found.values,
                before.saturated + int(found.saturated),
                before.flushed + int(found.flushed),
                max(before.amax, float(found.amax)),
            )
        return list(rows.values())


def _counted(values: Tensor, format: Format) -> _Sum:
    sizes = values.detach().abs()
    finite = torch.where(sizes < math.inf, sizes, 0.0)  # without NaN, too
    return _Sum(
        values.numel(),
        (finite > format.last_held).sum(),
        ((sizes > 0) & (sizes <= format.flushed_below)).sum(),
        finite.amax().float(),
    )
