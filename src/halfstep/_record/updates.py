"""Lost updates in sampled steps."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from halfstep._master_weights.lost_updates import Counted, OpenSteps
from halfstep._numerics.measure import counted_part
from halfstep._pytorch import modes
from halfstep._pytorch.distributed import local_part
from halfstep._record.run import Measured
from halfstep._scaler.gradients import parameters
from halfstep._scaler.scalars import moved

LOOKED_AT = 1 << 16
"""About so many entries of a weight are looked at, and copied for that before a step."""


class UpdateCounter:
    """Counts the updates of all optimizers, and those that are lost.

    It has a hook only between :meth:`begin` and :meth:`end`; otherwise it costs nothing.

    Args:
        say: Receives notes for the reader of the record.
        is_listening: Returns whether the running code is part of the training.
    """

    def __init__(self, say: Callable[[str], None], is_listening: Callable[[], bool]) -> None:
        self._say, self._is_listening = say, is_listening
        self._hook: RemovableHandle | None = None
        self._steps = OpenSteps(_part)
        self._counted: dict[int, Counted] = {}

    def begin(self) -> None:
        """Begin a sampled step."""
        self._hook = register_optimizer_step_pre_hook(self._before_step)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not self._is_listening():
            return
        with modes.unseen_by_modes(), self._noting_failures():
            self._steps.begin(optimizer, args, kwargs)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Count the updates of a step that has begun in a sampled step. Sync: none."""
        if self._hook is not None:
            with self._noting_failures():
                counted = self._steps.end(optimizer)
                self._counted.update((id(each.param), each) for each in counted)

    @contextmanager
    def _noting_failures(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # a recorder never ends a run, whatever the optimizer is
            self._say(f"lost updates cannot be counted: {error}")

    def share_lost(self, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
        """Return the share of its updates that an optimizer has lost; None if it is not known.

        A large tensor counts by its size, not by that of the part. Sync: none.
        """
        if optimizer is None or not self._counted:
            return None
        found = [self._counted[id(p)] for p in parameters(optimizer) if id(p) in self._counted]
        if not found:
            return None
        device = found[-1].counts.device
        in_full = [each.counts.float() * _size_to_part(each.param) for each in found]
        total = torch.stack([moved(each, device) for each in in_full]).sum(0)
        return total[1] / total[0]

    def end(self, measured: list[Measured], params: Iterable[tuple[str, Tensor]]) -> list[Measured]:
        """End the sampled step and return its tensors, the parameters with their counts.

        Sync: one for each parameter.
        """
        if self._hook is not None:
            self._hook.remove()
            self._hook = None
        self._steps.clear()
        counted, self._counted = self._counted, {}
        counts = {
            name: counted[id(param)].counts.tolist()
            for name, param in params
            if id(param) in counted
        }
        return [
            replace(each, updates=counts[each.name][0], lost_updates=counts[each.name][1])
            if each.kind == "parameter" and each.name in counts
            else each
            for each in measured
        ]


def _part(values: Tensor) -> Tensor:
    """Return the entries of a weight, or of its gradient, that are looked at."""
    return counted_part(values, LOOKED_AT)


def _size_to_part(param: Tensor) -> float:
    """Return the size of a tensor to that of the part that is looked at."""
    values = local_part(param)
    return values.numel() / max(_part(values).numel(), 1)
