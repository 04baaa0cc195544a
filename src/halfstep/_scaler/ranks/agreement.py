"""What the ranks tell each other when one looks at gradients: one small vector, its maximum.

The vector is int32. What is float32 travels as its bits, which are in the same order as long as it
is not negative; so that is exact too. What has to be the same on all ranks travels twice, once
negative: the two maxima are then each other's opposite.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from halfstep._scaler.checks import float32_from_bits
from halfstep._scaler.ranks.comparing import CHECK_EVERY, describe, gathered, lines
from halfstep._scaler.ranks.group import Group, Reduction
from halfstep._scaler.scalars import Scalar, any_of, as_float32, is_nonfinite, moved
from halfstep.errors import CallOrderError, RanksError

if TYPE_CHECKING:
    from halfstep._scaler.loss_scale import LossScale

FOUND, BAD_LOSS, AMAX, HAS_GRADIENTS, HAS_SCALE, NAME, MINUS_NAME = range(7)
OWN_NORM, *STATE = range(5)
"""Behind the first seven: what has to be the same. ``OWN_NORM`` is not to be: see ``require``."""

NO_NAME = -(1 << 31)
"""Of a rank without a loss: no maximum is changed by it."""

NUM_FIRST, NUM_SAME = 7, 5
NUM_NUMBERS = NUM_FIRST + 2 * NUM_SAME

LARGEST_BITS = 0x7F7FFFFF
"""The bits of the largest float32 number: those of smaller ones are smaller, of inf and NaN not."""


class Claim:
    """What one rank says of one check of gradients.

    Args:
        loss_scale: The scale of the loss that the gradients come from; it is on a device.
        losses: The names of the losses of this iteration; a rank without any goes by the others.
        found: float32 scalars on any device, 1 if a gradient is inf or NaN, else 0; may be empty.
        amax: The largest magnitude of the unscaled gradients, if wanted.
        own_norm: Norm of gradients that are this rank's alone, if measured.
        has_gradients: Whether there are gradients.
        has_scale: Whether a loss has ever been scaled here.
        call: What made the look: ``step(SGD)``.
    """

    def __init__(
        self,
        loss_scale: LossScale,
        losses: Sequence[str | None],
        found: list[Tensor],
        *,
        amax: Tensor | None,
        own_norm: Scalar | None,
        has_gradients: bool,
        has_scale: bool,
        call: str,
    ) -> None:
        self.loss_scale, self.losses, self.call = loss_scale, tuple(losses), call
        self.has_gradients, self.has_scale = has_gradients, has_scale
        self._found, self._amax, self._own_norm = found, amax, own_norm

    def vector(self, group: Group) -> Tensor:
        """Return the numbers for the other ranks, int32 ``[NUM_NUMBERS]``. Sync: none."""
        assert self.loss_scale.live is not None
        device = self.loss_scale.tensor.device
        zero = torch.zeros((), device=device)
        found = any_of(self._found, device) if self._found else zero
        floats = [
            zero if value is None else moved(as_float32(value, device).detach().abs(), device)
            for value in (self._amax, self._own_norm)
        ]
        # The largest of these numbers is that of the first rank that found something.
        flags = torch.stack([found, is_nonfinite(self.loss_scale.live.bad_loss)])
        first, is_bad = (flags * (len(group.ranks) - group.place)).int()
        amax, own_norm = torch.stack(floats).view(torch.int32)
        known = _known(self.has_gradients, self.has_scale, self.losses, device)
        same = torch.cat([own_norm[None], self.loss_scale.live.counters()])
        head = torch.cat([torch.stack([first, is_bad, amax]), known])
        return moved(torch.cat([head, same, -same]), group.device)


_constants: dict[Any, Tensor] = {}


def _known(
    has_gradients: bool, has_scale: bool, losses: tuple[str | None, ...], device: torch.device
) -> Tensor:
    """Return what the host knows, int32 ``[4]``, on the device: copied there once."""
    key = has_gradients, has_scale, losses, device
    if key not in _constants:
        name = zlib.crc32(repr(sorted(map(repr, losses))).encode()) >> 2
        names = [name, -name] if losses else [NO_NAME, NO_NAME]
        values = [int(has_gradients), int(has_scale), *names]
        _constants[key] = torch.tensor(values, dtype=torch.int32).to(device)
    return _constants[key]


class Agreement:
    """What all ranks have found, on its way.

    Args:
        group: The ranks.
        claim: What this one says.
        number: How many agreements of this scaler there were before, the same on all ranks.

    Sync: none, but for :meth:`verify`; on the CPU the first look waits for the other ranks.
    """

    def __init__(self, group: Group, claim: Claim, number: int) -> None:
        self._group, self._claim, self._number = group, claim, number
        self._reduction: Reduction | None = group.reduce(
            claim.vector(group), distributed.ReduceOp.MAX, f"{claim.call}: found_inf"
        )
        self._vector: Tensor

    def vector(self) -> Tensor:
        """Return the maximum over the ranks; the scale takes note of the losses of all of them."""
        if self._reduction is not None:
            values = self._reduction.wait()
            self._reduction = None
            loss_scale = self._claim.loss_scale
            self._vector = moved(values, loss_scale.tensor.device)
            loss_scale.settle_loss(self._vector[BAD_LOSS] > 0)
        return self._vector

    def found_inf(self) -> Tensor:
        """Return a float32 scalar, 1 if a rank found inf or NaN, else 0."""
        return self.vector()[FOUND].clamp(max=1).float()

    def amax(self) -> Tensor:
        """Return the largest magnitude of all ranks, a float32 scalar."""
        return self.vector()[AMAX].view(torch.float32)

    def first_rank(self) -> int | None:
        """Return the first rank whose loss was bad, else that found inf or NaN. Sync: one.

        The sum of the gradients of all ranks does not tell which of them had it.
        """
        found, bad_loss = self.vector()[[FOUND, BAD_LOSS]].tolist()
        code = found and (bad_loss or found)
        return self._group.ranks[len(self._group.ranks) - code] if code else None

    def verify(self) -> None:
        """Look now and then whether the ranks can go on together. Sync: one, when it looks.

        For steps that do not wait for the device: every CHECK_EVERY of them, and those of a rank
        that cannot be sure that there is work at all.
        """
        is_due = self._number % CHECK_EVERY == 0
        # Who has both knows that somebody does. Who has not asks, and if nobody has, all ask.
        if is_due or not (self._claim.has_gradients and self._claim.has_scale):
            values = self.vector().tolist()
            self._require_work(values)
            if is_due:
                self._require_same(values)

    def require(self, values: list[int]) -> None:
        """Raise on all ranks if they cannot go on together.

        Args:
            values: :meth:`vector` on the host.

        Raises:
            CallOrderError: No rank has a gradient, or none has ever scaled a loss.
            RanksError: The ranks differ in something that is to be the same.
        """
        self._require_work(values)
        self._require_same(values)

    def _require_work(self, values: list[int]) -> None:
        if not values[HAS_SCALE]:
            raise CallOrderError(
                f"{self._claim.call} before scale(): no rank has scaled a loss by this GradScaler "
                "yet. Call scaler.scale(loss).backward() first, on the ranks that have the loss"
            )
        if not values[HAS_GRADIENTS]:
            raise CallOrderError(
                f"{self._claim.call}: no rank has a gradient. Call scaler.scale(loss).backward() "
                "before it and zero_grad() after it, or leave it out on all ranks"
            )

    def _require_same(self, values: list[int]) -> None:
        largest = values[NUM_FIRST : NUM_FIRST + NUM_SAME]
        least = [-value for value in values[NUM_FIRST + NUM_SAME :]]
        if NO_NAME != values[NAME] != -values[MINUS_NAME]:
            raise RanksError(
                f"{self._claim.call}: the ranks have scaled losses of different names, this one "
                f"{list(self._claim.losses)}. Give all the same: scaler.scale(loss, name=...)"
            )
        if any(largest[slot] != least[slot] for slot in STATE):
            raise RanksError(self._who_has_what())
        if 0 < largest[OWN_NORM] == least[OWN_NORM] < LARGEST_BITS:
            raise RanksError(
                f"{self._claim.call}: the norm of the gradients is the same on all "
                f"{len(self._group.ranks)} ranks, {float32_from_bits(largest[OWN_NORM]):g}. They "
                "seem to be copies, averaged by hand, and would be counted once for each rank. Say "
                "so: scaler.replicated(model.parameters(), process_group), or use "
                "DistributedDataParallel"
            )

    def _who_has_what(self) -> str:
        live = self._claim.loss_scale.live
        assert live is not None
        purpose = f"{self._claim.call}: who has which scale"
        rows = gathered(self._group, purpose, live.counters().tolist())
        return "\n".join(
            [
                f"{self._claim.call}: the ranks disagree on the scale, and no step was taken:",
                lines(self._group, rows, describe),
                "Cause: a checkpoint or update(new_scale=...) on some ranks only, another "
                "init_scale or rule, or calls of the scaler that some ranks leave out.",
                "Cure: load the same state on all ranks; update(new_scale=...) with one number on "
                "all of them sets the scale, and load_state_dict() the counters too.",
            ]
        )
