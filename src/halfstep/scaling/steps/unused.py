"""Gradients that no step has used when a scale changes: they change with it.

Whoever divides them later divides by the scale of that time. An optimizer that accumulates over the
updates of another one holds such gradients, and so does one that steps after ``update(new_scale)``.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from halfstep._torch import leaves_of
from halfstep.scaling.gradients import passes
from halfstep.scaling.gradients.collecting import collect_local, parameters
from halfstep.scaling.outcomes.journal import Journal
from halfstep.scaling.scalars import ratio
from halfstep.scaling.scale.loss_scale import LossScale
from halfstep.scaling.scale.losses import tensors_in
from halfstep.scaling.scale.scales import Scales
from halfstep.scaling.steps.iteration import Iteration, OptimizerRecord, Stage

NUM_LOSSES = 16
"""The graphs of this many losses are searched for parameters, a few milliseconds each. Optimizers
that come later are known from their first step on."""

NUM_UPDATES = 100
"""A parameter that no optimizer has stepped with by then is taken to have none."""


@dataclass(frozen=True, eq=False)
class _Made:
    """A gradient and the scale that it is multiplied by, as long as nobody writes to it."""

    grad: weakref.ref[Tensor]
    version: int
    scale: LossScale


class Unused:
    """Finds the gradients that no step has used. Sync: none.

    Args:
        journal: Knows all optimizers that have stepped.
    """

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self.is_searching = True
        self._num_losses = 0
        # Parameters of losses, by id, that no known optimizer has.
        self._loose: dict[int, weakref.ref[Tensor]] = {}
        self._num_updates = 0
        self._made: dict[int, _Made] = {}  # by the id of the parameter

    def search(self, scaled: Any) -> None:
        """Find the parameters that a backward pass from ``scaled`` gives gradients to."""
        self._num_losses += 1
        self.is_searching = self._num_losses < NUM_LOSSES
        for leaf in leaves_of(tensors_in(scaled)):
            if isinstance(leaf, torch.nn.Parameter):
                self._loose[id(leaf)] = weakref.ref(leaf)

    def before_change(
        self, iteration: Iteration, records: list[OptimizerRecord], scales: Scales
    ) -> Change | None:
        """Return what is to follow if a scale changes now; None, as usual, if nothing is.

        Args:
            iteration: Knows which gradients have been unscaled.
            records: Those of the iteration.
            scales: The scales of all losses.
        """
        if not self._loose and len(records) == self._journal.num_optimizers:
            num_losses = iteration.num_losses
            for record in records:
                if record.stage is not Stage.STEPPED or record.num_losses != num_losses:
                    break
            else:
                return None
        change = self._find(iteration, records, scales)
        return change if change.scaled or change.unscaled else None

    def _find(self, iteration: Iteration, records: list[OptimizerRecord], scales: Scales) -> Change:
        taken = _ids(r.optimizer for r in records if r.stage is Stage.STEPPED)
        in_blocks = iteration.scales_of_blocks()
        names = list(iteration.losses) or [None]
        of_iteration = scales.get(names[0]) if len(names) == 1 else None
        scaled: dict[LossScale, list[Tensor]] = defaultdict(list)
        unscaled: dict[LossScale, list[Tensor]] = defaultdict(list)
        for param in self._candidates(records, iteration.num_losses):
            divided_by = in_blocks.get(id(param)) or iteration.scale_of(param)
            if divided_by is None:
                scale = self._made_with(param) or of_iteration
                if scale is not None and scale.on_device is not None:
                    scaled[scale].append(param)
            elif id(param) not in taken:
                unscaled[divided_by].append(param)
        return Change(scaled, unscaled, self._made if len(scales) > 1 else None)

    def _candidates(self, records: list[OptimizerRecord], num_losses: int) -> list[Tensor]:
        """Return parameters with gradients, of which a step may not have used some."""
        done: list[torch.optim.Optimizer] = []
        waiting: list[torch.optim.Optimizer] = []
        for record in records:
            # Nothing new can have come to those that have stepped since the last loss.
            is_done = record.stage is Stage.STEPPED and record.num_losses == num_losses
            (done if is_done else waiting).append(record.optimizer)
        seen = {id(record.optimizer) for record in records}
        for optimizer, outcome in self._journal.last_outcomes():
            if id(optimizer) not in seen and not (outcome and outcome.has_its_gradients()):
                waiting.append(optimizer)
        self._prune()
        params = [param for optimizer in waiting for param in parameters(optimizer)]
        params += [param for ref in self._loose.values() if (param := ref()) is not None]
        left_out = _ids(done)
        found = {id(p): p for p in params if p.grad is not None and id(p) not in left_out}
        return list(found.values())

    def _prune(self) -> None:
        """Forget the parameters of optimizers that have stepped, and those that waited long."""
        self._num_updates += 1
        if self._loose:
            known = _ids(optimizer for optimizer, _ in self._journal.last_outcomes())
            self._loose = {
                key: ref
                for key, ref in self._loose.items()
                if ref() is not None and key not in known and self._num_updates < NUM_UPDATES
            }

    def _made_with(self, param: Tensor) -> LossScale | None:
        """Return the scale of a gradient that nobody has written to since an earlier change."""
        made, grad = self._made.get(id(param)), param.grad
        if made is None or grad is None or made.grad() is not grad:
            return None
        return made.scale if made.version == grad._version else None


def _ids(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(param) for optimizer in optimizers for param in parameters(optimizer)}


class Change:
    """Gradients that follow a change of their scale.

    Args:
        scaled: Parameters whose gradients are multiplied by a scale.
        unscaled: Those whose gradients have been divided by it, and then not used.
        made: Where to write down which scale a gradient is multiplied by, if there are several.
    """

    def __init__(
        self,
        scaled: dict[LossScale, list[Tensor]],
        unscaled: dict[LossScale, list[Tensor]],
        made: dict[int, _Made] | None,
    ) -> None:
        self.scaled, self.unscaled, self._made = scaled, unscaled, made
        self._before = {scale: scale.tensor.clone() for scale in scaled}

    def follow(self, *, iteration_ends: bool = True) -> None:
        """Multiply the gradients by what their scales have changed by. Sync: none.

        On the CPU only if they have changed; elsewhere that is not known here: 2 G.

        Args:
            iteration_ends: Which gradients were unscaled will be forgotten: scale them again.
        """
        for scale, params in self.scaled.items():
            before, now = self._before[scale], scale.tensor
            if before.device.type != "cpu" or not torch.equal(before, now):
                passes.multiply_(collect_local(params), ratio(now, before))
        if iteration_ends:
            for scale, params in self.unscaled.items():
                passes.multiply_(collect_local(params), scale.tensor)
        if self._made is not None:
            self._made.clear()
            for scale, params in [*self.scaled.items(), *self.unscaled.items()]:
                for param in params:
                    if param.grad is not None:
                        made = _Made(weakref.ref(param.grad), param.grad._version, scale)
                        self._made[id(param)] = made
