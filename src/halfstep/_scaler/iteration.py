"""The steps and gradient checks between two calls of ``update``."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import torch
from torch import Tensor

from halfstep._common.numbers import things
from halfstep._gradients import scalars
from halfstep._gradients.gradients import NONE, Gradients, parameters
from halfstep._gradients.norms import Norms
from halfstep._gradients.optimizers import name
from halfstep._gradients.scalars import Scalar
from halfstep._scaler.agreement import ALONE, Agreement, Alone, Together
from halfstep._scaler.ledger import Check, Ledger
from halfstep._scaler.loss_scale import LossScale
from halfstep.errors import NothingCheckedError


class Stage(Enum):
    """The stage of an optimizer in the current iteration."""

    SCALED = "its gradients are still multiplied by the scale"
    UNSCALED = "its gradients have already been unscaled"
    STEPPED = "step() has already been called"


class Step(NamedTuple):
    """What a call knows of the gradients of an optimizer, from gathering them to the end.

    Each change gives a new one. The iteration keeps the last one of an optimizer, but no gradients.

    Attributes:
        optimizer: None for a list of parameters, or if only its id is known.
        scaled_by: The number by which the gradients were multiplied when they were gathered, None
            if they had been unscaled.
        multiplier: The same number now.
        earlier: Every earlier check of any of these gradients, also for another optimizer or a
            wrapper that shares parameters.
        own: The check of this call; None if there was nothing to check.
        look: The second check, of gradients that were already unscaled. It decides about the step,
            and not about the scale, which the first one has shown to be usable.
        norms: What this call has measured; None if it measured nothing.
        before: What an earlier call has measured, before it clipped.
        ranks: Who decides about the step.
        all_param_ids: Ids of the parameters, with or without gradients, if several ranks decide.
        is_first: Whether norm and largest magnitude are measured, as in the first steps.
        num_losses: Number of losses that had been scaled when the call ended.
        skip: 1 if a check found inf or NaN, so that the step must be skipped, else 0; None before
            the decision.
        found_inf: The same without the second look, nonzero in place of 1; None if there was none.
    """

    optimizer: torch.optim.Optimizer | None
    loss_scale: LossScale
    gradients: Gradients = NONE
    scaled_by: Scalar | None = None
    multiplier: Scalar | None = None
    earlier: tuple[Check, ...] = ()
    own: Check | None = None
    look: Check | None = None
    norms: Norms | None = None
    before: Norms | None = None
    ranks: Alone | Together = ALONE
    all_param_ids: frozenset[int] = frozenset()
    is_first: bool = False
    stage: Stage = Stage.SCALED
    num_losses: int = 0
    skip: Scalar | None = None
    found_inf: Scalar | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether this rank, or possibly another one, has gradients."""
        # torch.compile of 2.11 cannot trace bool() of a list.
        return len(self.gradients.grads) > 0 or self.ranks.is_together

    @property
    def unclipped(self) -> Norms | None:
        """What was measured before any clipping."""
        return self.before or self.norms

    @property
    def checks(self) -> tuple[Check, ...]:
        """The checks that move the scale: the earlier ones and the own one."""
        return self.earlier if self.own is None else (*self.earlier, self.own)

    def agreements(self) -> list[Agreement]:
        """Return the agreements of all checks; empty if this rank decides alone."""
        checks = self.checks if self.look is None else (*self.checks, self.look)
        return [check.agreement for check in checks if check.agreement is not None]

    def decide(self) -> Step:
        """Decide whether the step must be skipped, unless that is known. Sync: none.

        Raises:
            NothingCheckedError: There was no gradient to check.
        """
        if self.skip is not None:
            return self
        flags = [flag for check in self.earlier for flag in check.found_inf.values()]
        if self.own is not None:
            flags += self.own.found_inf.values()
        if not flags:
            raise nothing_checked(self.optimizer)
        if len(flags) == 1 and not self.earlier:  # a new one, which no user can have modified
            return self._replace(skip=scalars.scalar(flags[0]))
        device = self.loss_scale.device
        if self.look is None:
            return self._replace(skip=scalars.combine(flags, device))
        found_inf = (scalars.combine if self.loss_scale.is_here else scalars.any_of)(flags, device)
        later = self.look.found_inf.values()
        return self._replace(skip=scalars.combine([*flags, *later], device), found_inf=found_inf)


def found_inf_by_device(checks: Sequence[Check]) -> dict[torch.device, Tensor]:
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
        self.steps: dict[int, Step] = {}
        self.num_losses = 0
        self.ledger = Ledger()
        self.looks: list[Check] = []

    @property
    def checks(self) -> list[Check]:
        """All checks that move the scale, in order."""
        return [entry.check for entry in self.ledger.entries]

    def step_of(self, optimizer: torch.optim.Optimizer) -> Step | None:
        """Return the step of the last call for an optimizer, None if nothing has been done."""
        return self.steps.get(id(optimizer))

    def keep(self, step: Step, stage: Stage) -> None:
        """Record the checks and the stage of a call; without a check there is nothing to record."""
        skip, multiplier = step.skip, step.multiplier
        if step.own is not None:
            left = None if skip is None or multiplier is None else (skip, multiplier)
            self.ledger.mark(step.gradients, step.own, left_scaled_by=left)
        if step.checks and step.optimizer is not None:
            self.steps[id(step.optimizer)] = Step(
                step.optimizer,
                step.loss_scale,
                earlier=step.checks,
                before=step.unclipped,
                ranks=step.ranks,
                stage=stage,
                num_losses=self.num_losses,
                skip=step.skip if stage is Stage.STEPPED else None,
            )

    def forget(self, key: int) -> None:
        """Forget the step of an optimizer, by its ``id``, and what was found for it."""
        step = self.steps.pop(key, None)
        if step is not None:
            self.ledger.forget(step.checks)
