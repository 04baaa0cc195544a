"""Clipping: the arguments of a call, and the search for gradients clipped before they are unscaled.

Those make updates that are too small by a factor of the scale: training looks stuck, without an
error. Scaled gradients exceed every limit, so in every step their norm, or largest magnitude, is
the limit itself: a number of few digits. So are those of an L1 loss, but either neither of them
changes, or all entries are multiples of one number.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from halfstep._common.numbers import power
from halfstep._common.text import warn
from halfstep._gradients.optimizers import name
from halfstep._gradients.scalars import checked_number
from halfstep._pytorch.devices import Transfer, is_capturing, to_host


def checked_max_norm(max_norm: object) -> float:
    """Return ``max_norm`` as a float; inf means no clipping."""
    if isinstance(max_norm, Tensor) and max_norm.numel() == 1 and max_norm.device.type == "cpu":
        max_norm = max_norm.tolist()
    if isinstance(max_norm, float) and max_norm == math.inf:
        return math.inf
    number = checked_number("max_norm", max_norm)
    if number < 0:
        raise ValueError(f"max_norm is {number}: it must be >= 0")
    return number


# --- clipped too early ----------------------------------------------------------------------------

NUM_STEPS = 3  # finite first ones of each optimizer that are compared: clipping starts with them
MAX_STEPS = 5  # that are measured for this, at most

SMALLEST_LIMIT = 1e-3
"""Unscaled gradients are never clipped to less, and correctly clipping scaled ones to ``max_norm *
scale`` leaves more than this times the scale."""

TOLERANCE = 1e-5
"""Relative distance of a clipped norm from its limit. Within it lies one in 1,000 other numbers of
any size from a number of two digits, and three in a row one in a billion."""

CHANGE_OF_NORM = 0.01  # relative, between steps: a few entries of an L1 loss may become 0


class EarlyClipping:
    """The search for gradients clipped before they are unscaled, in the first steps. Sync: none."""

    def __init__(self) -> None:
        # Whether the next step is measured. Several ranks measure the same steps, so this depends
        # on values only where they are on the host at once.
        self.is_measuring = True
        self.is_over = False
        self._num_steps = 0
        # Of each step: the norm and the largest magnitude, both still scaled, and the scale.
        self._rows: list[Tensor] = []
        self._sent: Transfer | None = None

    def see(self, optimizer: object, measured: tuple[Tensor, Tensor, Tensor] | None) -> None:
        """Add a step by its unscaled norm, largest magnitude and scale; None ends the search."""
        if self.is_measuring:
            self._num_steps += 1
            self.is_measuring = measured is not None and self._num_steps < MAX_STEPS
            if measured is not None:
                norm, amax, scale = measured
                self._rows.append(torch.stack([norm * scale, amax * scale, scale]))
        if not self._rows:
            self.is_over = True
            return
        device = self._rows[0].device
        is_due = device.type == "cpu" or not (self.is_measuring or self._sent)
        if is_due and not is_capturing(device):
            self._sent = to_host(torch.stack(self._rows))
        if self._sent is None or not self._sent.has_arrived():
            return
        rows = [row for row in self._sent.values.tolist() if math.isfinite(row[0])]
        if self.is_measuring and len(rows) < NUM_STEPS:
            return
        self.is_measuring, self.is_over, self._rows, self._sent = False, True, [], None
        limit = limit_of(rows)
        if limit is not None:
            (what, value), factor = limit, power(rows[-1][2])
            warn(
                f"step({name(optimizer)}): the {what} of the gradients, still multiplied by "
                f"the scale {factor}, was {value:.4g} in all {NUM_STEPS} steps that were compared. "
                "They seem to be clipped before they are unscaled, which makes every gradient "
                f"{factor} times too small. Call scaler.unscale_(optimizer) before you clip, or "
                "leave the clipping to scaler.step(optimizer, max_norm=...)"
            )


def limit_of(rows: list[list[float]]) -> tuple[str, float] | None:
    """Return what the gradients of all steps are clipped to, None if they do not seem to be."""
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
