"""Agreement of several ranks on a step: one max-reduction of a small vector of findings.

The vector is int32. A float32 number is sent as its bits, which have the same order for
non-negative numbers. A number that must be equal on all ranks is sent twice, once negated: if it is
equal, the two maxima are opposites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor, distributed

from halfstep._common.numbers import power, things
from halfstep._gradients.gradients import Gradients
from halfstep._gradients.norms import Norms
from halfstep._gradients.scalars import (
    Scalar,
    any_of,
    float32_from_bits,
    scalar,
)
from halfstep._pytorch.devices import to_device
from halfstep._scaler.groups import Layout, Reduction
from halfstep._scaler.loss_scale import LossScale
from halfstep.errors import CallOrderError, RanksError

CHECK_EVERY = 100
"""Interval, in steps, of comparisons that would cost a sync each time."""

FOUND, BAD_LOSS, HAS_GRADIENTS, HAS_SCALE = range(4)
NUM_FIRST, NUM_SAME = 4, 4
NUM_NUMBERS = NUM_FIRST + 2 * NUM_SAME
"""After the first four come the numbers that must be equal on all ranks, twice."""


# --- what is found -------------------------------------------------------------------------------


class Findings(Protocol):
    """What a rank has found in some gradients."""

    scale: LossScale
    found_here: dict[torch.device, Tensor]


# --- who decides ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Alone:
    """The decision of one rank: it is the only one, or the other ranks have the same gradients."""

    sees_all_losses: bool = True
    """Whether this rank knows all losses; if not, its bad losses must not affect the scale."""

    is_together: ClassVar[Literal[False]] = False

    def agree_on(self, found: Findings, *, has_gradients: bool = True) -> None:
        """Return None: what this rank has found holds. The methods are those of `Together`."""
        if not self.sees_all_losses:
            found.scale.agree_on_loss(None)


ALONE = Alone()


class Together:
    """The joint decision of several ranks.

    ``next_number`` returns the number of earlier agreements of this scaler, equal on all ranks.
    """

    is_together: Literal[True] = True

    def __init__(
        self, layout: Layout, call: str, has_scale: bool, next_number: Callable[[], int]
    ) -> None:
        self.group, self._layout, self.call = layout.group, layout, call
        self.has_scale, self.next_number = has_scale, next_number

    def agree_on(self, found: Findings, *, has_gradients: bool = True) -> Agreement:
        """Return the combined result of all ranks, which arrives asynchronously. Sync: none.

        ``has_gradients``: whether this check or an earlier one has gradients.
        """
        return Agreement(self, found, has_gradients)

    def start_norm(
        self, norms: Norms, gradients: Gradients, device: torch.device
    ) -> Callable[[], Scalar]:
        """Start the sum of squares over all ranks; return a function that returns it.

        Sync: none; on the CPU the returned function waits for the other ranks.
        """
        squares = norms.sum_of_squares(device, self._layout.shares(gradients)).reshape(1)
        values, purpose = to_device(squares, self.group.device), f"{self.call}: the norm"
        reduction = Reduction(self.group, values, distributed.ReduceOp.SUM, purpose)
        return lambda: scalar(to_device(reduction.wait(), device)[0])


class Agreement:
    """The combined result of all ranks, while it is reduced.

    Sync: none, except :meth:`verify`; on the CPU the first access waits for the other ranks.
    """

    def __init__(self, ranks: Together, found: Findings, has_gradients: bool) -> None:
        self._ranks, self._loss_scale = ranks, found.scale
        self._has_gradients = has_gradients
        self._number = ranks.next_number()
        values = _values(ranks, found, has_gradients)
        self._reduction: Reduction | None = Reduction(
            ranks.group, values, distributed.ReduceOp.MAX, f"{ranks.call}: found_inf"
        )
        self._vector: Tensor

    def vector(self) -> Tensor:
        """Return the maximum over the ranks, and pass the loss flag of all ranks to the scale."""
        if self._reduction is not None:
            values = self._reduction.wait()
            self._reduction = None
            self._vector = to_device(values, self._loss_scale.tensor.device)
            self._loss_scale.agree_on_loss(self._vector[BAD_LOSS] > 0)
        return self._vector

    def found_inf(self) -> Tensor:
        return self.vector()[FOUND].clamp(max=1).float()

    def first_rank(self) -> int | None:
        """Return the first rank whose loss was bad, otherwise the first with inf or NaN. Sync: one.

        It cannot be derived from the summed gradients.
        """
        found, bad_loss = self.vector()[[FOUND, BAD_LOSS]].tolist()
        code = found and (bad_loss or found)
        ranks = self._ranks.group.ranks
        return ranks[len(ranks) - code] if code else None

    def verify(self) -> None:
        """Raise if the ranks cannot continue together; checked only now and then.

        For steps that do not wait for the device: every CHECK_EVERY of them, and each step of a
        rank that cannot know whether any rank has work. Sync: one, when it checks.
        """
        is_due = self._number % CHECK_EVERY == 0
        # A rank that has both knows that there is work. Otherwise it checks; if no rank has, all
        # check.
        if is_due or not (self._has_gradients and self._ranks.has_scale):
            values = self.vector().tolist()
            self._require_work(values)
            if is_due:
                self._require_same(values)

    def require(self, values: list[int]) -> None:
        """Raise on all ranks if they cannot continue; ``values`` is :meth:`vector` on the host."""
        self._require_work(values)
        self._require_same(values)

    def _require_work(self, values: list[int]) -> None:
        if not values[HAS_SCALE]:
            raise CallOrderError(
                f"{self._ranks.call} before scale(): no rank has scaled a loss by this GradScaler "
                "yet. Call scaler.scale(loss).backward() first, on the ranks that have the loss"
            )
        if not values[HAS_GRADIENTS]:
            raise CallOrderError(
                f"{self._ranks.call}: no rank has a gradient. Call backward() before it and "
                "zero_grad() after it, or leave it out on all ranks"
            )

    def _require_same(self, values: list[int]) -> None:
        largest = values[NUM_FIRST : NUM_FIRST + NUM_SAME]
        least = [-value for value in values[NUM_FIRST + NUM_SAME :]]
        if largest != least:
            raise RanksError(self._who_has_what())

    def _who_has_what(self) -> str:
        group, call = self._ranks.group, self._ranks.call
        rows = group.gather(self._loss_scale.counters(), f"{call}: who has which scale")
        return "\n".join(
            [
                f"{call}: the ranks disagree on the scale, and no step was taken:",
                group.lines(rows, describe),
                "Cause: a checkpoint or update(new_scale=...) on some ranks only, another "
                "init_scale or schedule, or calls of the scaler that some ranks leave out.",
                "Cure: load the same state on all ranks; update(new_scale=...) with one number on "
                "all of them sets the scale, and load_state_dict() the counters too.",
            ]
        )


def _values(ranks: Together, findings: Findings, has_gradients: bool) -> Tensor:
    """Return this rank's findings for the others, int32 ``[NUM_NUMBERS]``. Sync: none."""
    scale, group = findings.scale, ranks.group
    device = scale.device
    found = torch.zeros((), device=device)
    if findings.found_here:
        found = any_of(findings.found_here.values(), device)
    # Earlier ranks send larger numbers, so the maximum identifies the first rank with a finding.
    flags = torch.stack([found, scale.loss_flag()])
    first, is_bad = (flags * (len(group.ranks) - group.place)).int()
    known = _known(has_gradients, ranks.has_scale, device)
    counters = to_device(torch.tensor(scale.counters(), dtype=torch.int32), device)
    head = torch.cat([torch.stack([first, is_bad]), known])
    return to_device(torch.cat([head, counters, -counters]), group.device)


@cache
def _known(has_gradients: bool, has_scale: bool, device: torch.device) -> Tensor:
    """Return values known on the host, int32 ``[2]``, on the device; cached to copy them once."""
    return torch.tensor([has_gradients, has_scale], dtype=torch.int32).to(device)


def describe(row: Sequence[float]) -> str:
    """Format the result of ``LossScale.counters`` for a message."""
    scale, tracker, taken, skipped = map(int, row)
    return (
        f"scale {power(float32_from_bits(scale))}, growth tracker {tracker}, "
        f"{things(taken, 'step')} taken, {skipped} skipped"
    )
