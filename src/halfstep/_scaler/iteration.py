"""The steps and gradient checks between two calls of ``update``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._common.numbers import things
from halfstep._gradients import scalars
from halfstep._gradients.gradients import NONE, Gradients, parameters
from halfstep._gradients.norms import Norms
from halfstep._gradients.optimizers import name
from halfstep._gradients.scalars import Scalar, float32_from_bits
from halfstep._scaler.agreement import ALONE, NUM_NUMBERS, Agreement, Alone, Together
from halfstep._scaler.ledger import GradientCheck, Ledger
from halfstep._scaler.loss_scale import LossScale
from halfstep.errors import NothingCheckedError


class Stage(Enum):
    """The stage of an optimizer in the current iteration."""

    SCALED = "its gradients are still multiplied by the scale"
    UNSCALED = "its gradients have already been unscaled"
    STEPPED = "step() has already been called"


class Measured(NamedTuple):
    """What one read of gradients says.

    Attributes:
        norms: The norm of each gradient.
        squares: The sum of all squares, over all ranks.
        found_inf: 1 if it is inf or NaN, else 0, on the device of the scale.
    """

    norms: Norms
    squares: Scalar
    found_inf: Tensor

    @property
    def norm(self) -> Scalar:
        """The total norm, unscaled."""
        norm, scale = scalars.root(self.squares), self.norms.scale
        return norm if scale is None else norm / scale


@dataclass(frozen=True, eq=False, slots=True)
class Gathered:
    """The gradients of an optimizer at the beginning of a call.

    Attributes:
        optimizer: The optimizer; None for a list of parameters.
        multiplier: The number by which the gradients are multiplied, None if they are unscaled.
        checks: Every earlier check of any of these gradients, also for another optimizer or a
            wrapper that shares parameters.
        ranks: Who decides about the step.
        all_param_ids: Ids of the parameters, with or without gradients, if several ranks decide.
        is_first: Whether norm and largest magnitude are measured, as in the first steps.
        measured: The gradients before an earlier call clipped them, if it has measured them.
    """

    optimizer: torch.optim.Optimizer | None
    loss_scale: LossScale
    gradients: Gradients
    multiplier: Scalar | None = None
    checks: tuple[GradientCheck, ...] = ()
    ranks: Alone | Together = ALONE
    all_param_ids: frozenset[int] = frozenset()
    is_first: bool = False
    measured: Measured | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether this rank, or possibly another one, has gradients."""
        # torch.compile of 2.11 cannot trace bool() of a list.
        return len(self.gradients.grads) > 0 or self.ranks.is_together


@dataclass(frozen=True, eq=False, slots=True)
class Checked:
    """Gradients after a call has checked, measured, unscaled or clipped them.

    Attributes:
        multiplier: The number by which they are multiplied now, None if they are unscaled.
        own: The check of this call; None if there was nothing to check.
        look: The second check, of gradients that were already unscaled. It decides about the step,
            and not about the scale, which the first one has shown to be usable.
        measured: What this call has measured; None if it measured nothing.
    """

    gathered: Gathered
    multiplier: Scalar | None
    own: GradientCheck | None = None
    measured: Measured | None = None
    look: GradientCheck | None = None

    @property
    def unclipped(self) -> Measured | None:
        """What was measured before any clipping."""
        return self.gathered.measured or self.measured

    def checks(self) -> tuple[GradientCheck, ...]:
        """Return the checks that move the scale: the earlier ones and the own one."""
        earlier = self.gathered.checks
        return earlier if self.own is None else (*earlier, self.own)

    def agreements(self) -> list[Agreement]:
        """Return the agreements of all checks; empty if this rank decides alone."""
        checks = self.checks() if self.look is None else (*self.checks(), self.look)
        return [check.agreement for check in checks if check.agreement is not None]

    def decide(self) -> Decided:
        """Decide whether the step must be skipped. Sync: none.

        Raises:
            NothingCheckedError: There was no gradient to check.
        """
        gathered = self.gathered
        flags: list[Tensor] = []
        for check in gathered.checks:
            flags += check.found_inf.values()
        if self.own is not None:
            flags += self.own.flags().values()
        if not flags:
            raise nothing_checked(gathered.optimizer)
        if len(flags) == 1 and not gathered.checks:  # a new one, which no user can have modified
            return Decided(self, scalars.scalar(flags[0]))
        device = gathered.loss_scale.device
        if self.look is None:
            return Decided(self, scalars.combine(flags, device))
        later = list(self.look.flags().values())
        if device.type in scalars.READABLE:
            found_inf = scalars.combine(flags, device)
        else:
            found_inf = scalars.any_of(flags, device)
        return Decided(self, scalars.combine([*flags, *later], device), found_inf)

    def read(self, values: list[Scalar]) -> list[float]:
        """Return scalars as Python floats; raise if the ranks disagree. Sync: one."""
        agreements = self.agreements()
        device = self.gathered.loss_scale.device
        if device.type in scalars.READABLE:
            for agreement in agreements:
                agreement.require(agreement.vector().tolist())
            return [float(value) for value in values]
        if not agreements:
            tensors = [v if isinstance(v, Tensor) else scalars.as_tensor(v, device) for v in values]
            return torch.stack(tensors).tolist() if len(tensors) > 1 else [tensors[0].item()]
        tensors = [scalars.as_tensor(value, device) for value in values]
        vectors = [agreement.vector() for agreement in agreements]
        bits = torch.cat([*vectors, torch.stack(tensors).view(torch.int32)]).tolist()
        for agreement in agreements:
            agreement.require(bits[:NUM_NUMBERS])
            del bits[:NUM_NUMBERS]
        return [float32_from_bits(number) for number in bits]


@dataclass(frozen=True, eq=False, slots=True)
class Decided:
    """Checked gradients with the decision about their step.

    Attributes:
        skip: 1 if a check found inf or NaN, so that the step must be skipped, else 0.
        found_inf: The same without the second look, nonzero in place of 1; None if there was none.
    """

    checked: Checked
    skip: Scalar
    found_inf: Scalar | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Remembered:
    """What an iteration knows of an optimizer after a call.

    It has no reference to gradients.

    Attributes:
        optimizer: None if a subclass with its own ``unscale_`` has only told its id.
        checks: All checks of its gradients.
        measured: The gradients before they were clipped, if the call has measured them.
        num_losses: Number of losses that had been scaled when it ended.
        skip: 1 if its step was skipped, else 0; None if the scaler has made no step.
    """

    optimizer: torch.optim.Optimizer | None
    checks: tuple[GradientCheck, ...] = ()
    stage: Stage = Stage.SCALED
    num_losses: int = 0
    measured: Measured | None = None
    skip: Scalar | None = None
    ranks: Alone | Together = ALONE

    def parameters(self) -> list[Tensor]:
        return [] if self.optimizer is None else parameters(self.optimizer)

    def decide(self) -> Decided:
        """Decide by the checks whether the step must be skipped. Sync: none.

        Raises:
            NothingCheckedError: There are none.
        """
        if not self.checks:
            raise nothing_checked(self.optimizer)
        gathered = Gathered(
            self.optimizer,
            self.checks[0].scale,
            NONE,
            checks=self.checks,
            ranks=self.ranks,
            measured=self.measured,
        )
        return Checked(gathered, None).decide()


def found_inf_by_device(checks: Sequence[GradientCheck]) -> dict[torch.device, Tensor]:
    """Return, by device, 1 if a gradient there is inf or NaN, else 0."""
    if len(checks) == 1:
        return checks[0].found_inf  # no copy: users may all-reduce the flags
    found: dict[torch.device, list[Tensor]] = {}
    for check in checks:
        for device, flag in check.found_inf.items():
            found.setdefault(device, []).append(flag)
    return {
        device: scalars.as_tensor(scalars.combine(flags, device), device)
        for device, flags in found.items()
    }


def nothing_checked(optimizer: torch.optim.Optimizer | None) -> NothingCheckedError:
    """Return the error for an optimizer without any gradients."""
    num_params = 0 if optimizer is None else len(parameters(optimizer))
    return NothingCheckedError(
        f"step({name(optimizer)}): none of its {things(num_params, 'parameter')} has a gradient.\n"
        "Cause: backward() was not called on the scaled loss, or zero_grad() was called after "
        "it, or the loss does not depend on these parameters (is it the optimizer of this "
        "model?).\n"
        "Cure: call scaler.scale(loss).backward() before step() and zero_grad() after it, or "
        "leave out step() for this optimizer in this iteration. (torch.amp says: No inf checks "
        "were recorded for this optimizer.)"
    )


class Iteration:
    """The steps of all optimizers and the checks of all gradients since the last ``update``.

    A step is kept only once work has been done for its optimizer, so that a failed call leaves no
    trace. Sync: none.

    Attributes:
        steps: The step of the last call for each optimizer, by ``id`` of the optimizer. The step
            references the optimizer, so its ``id`` is not reused.
        num_losses: Number of scaled losses.
        ledger: What the gradients are multiplied by.
        looks: The second checks, of gradients that were written to after they were unscaled.
    """

    def __init__(self) -> None:
        self.steps: dict[int, Remembered] = {}
        self.num_losses = 0
        self.ledger = Ledger()
        self.looks: list[GradientCheck] = []

    @property
    def checks(self) -> list[GradientCheck]:
        """All checks that move the scale, in order."""
        return [entry.check for entry in self.ledger.entries]

    def step_of(self, optimizer: torch.optim.Optimizer) -> Remembered | None:
        """Return the step of the last call for an optimizer, None if nothing has been done."""
        return self.steps.get(id(optimizer))

    def forget(self, key: int) -> None:
        """Forget the step of an optimizer, by its ``id``, and what was found for it."""
        step = self.steps.pop(key, None)
        if step is not None:
            self.ledger.forget(step.checks)
