"""Norms of earlier steps, to detect outliers and gradients that are clipped too early.

Megatron-LM and others skip a step for a huge norm as for inf. Here, huge is relative to the running
median, which a few such steps do not move.

Gradients that are clipped before they are unscaled make updates that are too small by a factor of
the scale: training looks stuck, without an error. Scaled gradients exceed every limit, so in every
step their norm, or largest magnitude, is the limit itself: a number of few digits. So are those of
an L1 loss, but either neither of them changes, or all entries are multiples of one number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from halfstep._common.numbers import power
from halfstep._common.warn import warn
from halfstep._gradients.optimizers import name
from halfstep._gradients.scalars import checked_count, checked_number, to_float32
from halfstep._pytorch.transfers import HostCopy

NUM_STEPS = 3
"""Number of finite first steps of each optimizer that are compared: clipping happens from the
start."""

MAX_STEPS = 5
"""Maximum number of steps that are measured for this."""

SMALLEST_LIMIT = 1e-3
"""Unscaled gradients are never clipped to less, and correctly clipping scaled ones to ``max_norm *
scale`` leaves more than this times the scale."""

TOLERANCE = 1e-5
"""Relative distance of a clipped norm from its limit. Within it lies one in 1,000 other numbers of
any size from a number of two digits, and three in a row one in a billion."""

CHANGE_OF_NORM = 0.01
"""Relative change of the norm between steps: a few entries of an L1 loss may become 0."""


class NormLimit:
    """The norms of the last ``window`` taken steps of one optimizer, on its device.

    A norm above ``times_median`` times their median is an outlier. Sync: none, except
    :meth:`to_list`.
    """

    def __init__(self, times_median: float, window: int) -> None:
        self.times_median = checked_number("times_median", times_median)
        if self.times_median <= 1.0:
            raise ValueError(f"times_median is {self.times_median}: it must be > 1, such as 10.0")
        self.window = checked_count("window", window, at_least=2)
        self._norms: Tensor | None = None
        self._saved: Sequence[float] = [math.nan] * self.window

    def is_exceeded(self, norm: Tensor) -> Tensor:
        """Return 1.0 if the norm is an outlier, else 0.0; record a norm that is not.

        No norm is an outlier before half of the window was seen. Neither are inf and NaN, which
        ``found_inf`` covers.
        """
        norm = to_float32(norm.detach())
        if self._norms is None:
            self._norms = torch.tensor(self._saved, dtype=torch.float32, device=norm.device)
        num_seen = self._norms.isfinite().sum()
        limit = self._norms.nanmedian() * self.times_median
        exceeded = (norm > limit) & (2 * num_seen >= self.window) & norm.isfinite()
        # Older norms move up; an outlier is not recorded.
        kept = torch.cat([self._norms[1:], norm.reshape(1)])
        self._norms.copy_(torch.where(exceeded | ~norm.isfinite(), self._norms, kept))
        return exceeded.float()

    def to_list(self) -> list[float | None]:
        """Return the norms, oldest first, None for empty slots. Sync: one."""
        norms = self._saved if self._norms is None else self._norms.tolist()
        return [None if math.isnan(norm) else norm for norm in norms]

    def load(self, norms: Sequence[Any]) -> None:
        """Load the result of :meth:`to_list`."""
        values = [math.nan if norm is None else checked_number("norm", norm) for norm in norms]
        if len(values) != self.window:
            raise ValueError(f"{len(values)} norms were saved for a window of {self.window}")
        self._saved, self._norms = values, None


class NormLimits:
    """The norm limits of all optimizers, in order of appearance; none until a limit is set."""

    def __init__(self) -> None:
        self.settings: tuple[float, int] | None = None  # times the median, and the window
        self._limits: list[NormLimit] = []
        self._limit_of: MutableMapping[torch.optim.Optimizer, NormLimit] = WeakIdKeyDictionary()
        self._num_seen = 0  # optimizers so far, including those that no longer exist

    def set(self, times_median: float | None, window: int) -> None:
        """Set the limit of all optimizers and forget earlier norms; None for no limit."""
        if times_median is not None:
            NormLimit(times_median, window)
        self.settings = None if times_median is None else (times_median, window)
        self._limits = []
        self._limit_of.clear()
        self._num_seen = 0

    def of(self, optimizer: torch.optim.Optimizer) -> NormLimit | None:
        if self.settings is None:
            return None
        if optimizer not in self._limit_of:
            if self._num_seen == len(self._limits):
                self._limits.append(NormLimit(*self.settings))
            self._limit_of[optimizer] = self._limits[self._num_seen]
            self._num_seen += 1
        return self._limit_of[optimizer]

    def to_dict(self) -> dict[str, Any] | None:
        """Return settings and norms. Sync: one for each optimizer."""
        if self.settings is None:
            return None
        times_median, window = self.settings
        norms = [limit.to_list() for limit in self._limits]
        return {"times_median": times_median, "window": window, "norms": norms}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any] | None) -> NormLimits:
        """Load the result of :meth:`to_dict`. The first optimizer to step gets the first norms."""
        limits = cls()
        if saved is not None:
            limits.set(saved["times_median"], saved["window"])
            for norms in saved["norms"]:
                limit = NormLimit(saved["times_median"], saved["window"])
                limit.load(norms)
                limits._limits.append(limit)
        return limits


class EarlyClipping:
    """The search for gradients clipped before they are unscaled, in the first steps. Sync: none."""

    def __init__(self) -> None:
        # Whether the next step is measured. Several ranks measure the same steps, so this depends
        # on values only where they are on the host at once.
        self.is_measuring = True
        self.is_over = False
        self._num_steps = 0
        self._rows: list[Tensor] = []  # of each step: norm, largest magnitude, scale
        self._arriving = HostCopy()
        self._is_sent = False

    def see(
        self, optimizer: torch.optim.Optimizer, measured: tuple[Tensor, Tensor, Tensor] | None
    ) -> None:
        """Add a step by its unscaled norm, largest magnitude and scale; warn in the last one.

        Steps with inf or NaN are not compared. None ends the search: nothing was measured.
        """
        if self.is_measuring:
            self._num_steps += 1
            self.is_measuring = measured is not None and self._num_steps < MAX_STEPS
            if measured is not None:
                norm, amax, scale = measured
                self._rows.append(torch.stack([norm * scale, amax * scale, scale]))
        if not self._rows:
            self.is_over = True
            return
        is_here = self._rows[0].device.type == "cpu"
        if is_here or not (self.is_measuring or self._is_sent):
            self._arriving.send(torch.stack(self._rows))
            self._is_sent = True
        arrived = self._arriving.latest()
        if arrived is None:
            return
        rows = [row for row in arrived.tolist() if math.isfinite(row[0])]
        if self.is_measuring and len(rows) < NUM_STEPS:
            return
        self.is_measuring, self.is_over, self._rows = False, True, []
        limit = limit_of(rows)
        if limit is not None:
            (what, value), factor = limit, power(rows[-1][2])
            warn(
                f"step({name(optimizer)}): the {what} of the gradients, still multiplied by "
                f"the scale {factor}, was {value:.4g} in {NUM_STEPS} steps. They seem to be "
                f"clipped before they are unscaled, which makes every update {factor} times "
                "too small. Call scaler.unscale_(optimizer) before you clip, or leave the "
                "clipping to scaler.step(optimizer, max_norm=...)",
            )


def limit_of(rows: list[list[float]]) -> tuple[str, float] | None:
    """Return what the gradients of all steps are clipped to, None if they do not seem to be.

    Each row holds the norm, the largest magnitude, both still scaled, and the scale.
    """
    if len(rows) < NUM_STEPS or any(row[2] <= 1.0 for row in rows):
        return None
    norms, largest, scales = zip(*rows, strict=True)
    if is_limit(norms, min(scales)) and spread(largest) > TOLERANCE:
        return "norm", norms[-1]
    if is_limit(largest, min(scales)) and spread(norms) > CHANGE_OF_NORM:
        if are_multiples(norms, largest[0]):
            return None
        return "largest entry", largest[-1]
    return None


def is_limit(values: Sequence[float], scale: float) -> bool:
    """Return whether norms or entries of scaled gradients are one limit that people clip to."""
    limit = float(f"{values[0]:.1e}")
    are_equal = all(abs(value - limit) <= TOLERANCE * value for value in values)
    return are_equal and 0.0 < limit < SMALLEST_LIMIT * scale


def are_multiples(norms: Sequence[float], largest: float) -> bool:
    """Return whether all entries seem to be multiples of the largest or a simple part of it.

    Those of a masked L1 or hinge loss are. Then the sum of their squares is a whole number of such
    squares, up to about 1,000,000 of which float32 norms can tell.
    """
    for parts in range(1, 5):
        sums = [(parts * norm / largest) ** 2 for norm in norms]
        if all(abs(each - round(each)) <= min(5e-7 * each, 0.1) for each in sums):
            return True
    return False


def spread(values: Sequence[float]) -> float:
    """Return the relative distance between the smallest and the largest value."""
    return 1.0 - min(values) / max(values)
