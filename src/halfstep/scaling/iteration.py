"""What a scaler knows of each optimizer between two calls of ``update``."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import torch

from halfstep.errors import CallOrderError
from halfstep.scaling import gradients
from halfstep.scaling.gradients import FoundInf
from halfstep.scaling.optimizers import name


class Stage(Enum):
    """How far an optimizer has come since the last ``update``."""

    SCALED = "its gradients are still multiplied by the scale"
    UNSCALED = "its gradients have already been unscaled"
    STEPPED = "step() has already been called"


@dataclass
class OptimizerRecord:
    """One optimizer in this iteration.

    It holds the optimizer, so that no other object can take over its ``id`` meanwhile.
    """

    optimizer: torch.optim.Optimizer
    stage: Stage = Stage.SCALED
    found_inf: FoundInf = field(default_factory=dict)


class Iteration:
    """The records of all optimizers since the last ``update``.

    A record is kept only when something has been done for its optimizer, so that a call which fails
    leaves no trace.

    Sync: none, in all methods.
    """

    def __init__(self) -> None:
        self._records: dict[int, OptimizerRecord] = {}

    def record(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """Return the record of an optimizer, a fresh one if nothing has been done for it."""
        return self._records.get(id(optimizer)) or OptimizerRecord(optimizer)

    def keep(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """Return the record of an optimizer, and keep it until the iteration ends."""
        return self._records.setdefault(id(optimizer), self.record(optimizer))

    def names(self) -> list[str]:
        """Return the class names of the optimizers that something has been done for."""
        return [name(record.optimizer) for record in self._records.values()]

    def check(self, optimizer: torch.optim.Optimizer) -> FoundInf:
        """Look for inf and NaN in the optimizer's gradients and change nothing."""
        found_inf = gradients.check(gradients.collect(optimizer))
        if found_inf:
            self.keep(optimizer).found_inf = found_inf
        return found_inf

    def unscale_(
        self, optimizer: torch.optim.Optimizer, scale: torch.Tensor, *, can_amplify: bool
    ) -> None:
        """Divide the optimizer's gradients by the scale; without any gradient do nothing.

        See :func:`halfstep.scaling.gradients.unscale_` for the arguments.
        """
        found = gradients.collect(optimizer)
        if found:
            found_inf = gradients.unscale_(found, scale, can_amplify=can_amplify)
            record = self.keep(optimizer)
            record.found_inf, record.stage = found_inf, Stage.UNSCALED

    def found_inf(self) -> list[torch.Tensor]:
        """Return all findings, of every optimizer and device."""
        return [found for record in self._records.values() for found in record.found_inf.values()]

    def found_inf_of(self, optimizer: torch.optim.Optimizer, device: torch.device) -> torch.Tensor:
        """Return one scalar on ``device``: 1 if a gradient of the optimizer is not finite, else 0.

        Raises:
            CallOrderError: The optimizer has no gradient, so that nothing could be checked.
        """
        found_inf = self.record(optimizer).found_inf
        if found_inf:
            return gradients.combine(found_inf.values(), device)
        raise CallOrderError(
            f"step({name(optimizer)}): none of its {gradients.num_parameters(optimizer)} "
            "parameters has a gradient.\n"
            "Cause: backward() was not called on the scaled loss, or zero_grad() was called after "
            "it, or the loss does not depend on these parameters (is it the optimizer of this "
            "model?).\n"
            "Cure: call scaler.scale(loss).backward() before step() and zero_grad() after it, or "
            "leave out step() for this optimizer in this iteration."
        )
