"""What a scaler knows between two calls of ``update``: of each optimizer and of each gradient."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep._scaler.gradients import Gradients, parameters
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.optimizers import name
from halfstep._scaler.passes import Norms
from halfstep._scaler.ranks.agreement import Agreement
from halfstep._scaler.scalars import combine, moved
from halfstep._torch import keep_out_of_graphs
from halfstep.errors import CallOrderError, NothingCheckedError

if TYPE_CHECKING:
    from halfstep._scaler.ranks.deciding import Alone, Together


class Stage(Enum):
    """How far an optimizer has come since the last ``update``."""

    SCALED = "its gradients are still multiplied by the scale"
    UNSCALED = "its gradients have already been unscaled"
    STEPPED = "step() has already been called"


@dataclass(eq=False)
class Look:
    """One look at gradients that were multiplied by one scale.

    Attributes:
        scale: The scale, which moves by what was found.
        gradients: What was looked at. Held until the iteration ends, so that no other tensor can
            take over the ``id`` of one of them meanwhile.
        found_here: For each device a float32 scalar, 1 if some gradient there is inf or NaN, else
            0.
        amax_here: The largest unscaled magnitude, a scalar on the device of the scale, if the
            scale's rule wants to know.
        left_scaled: A scalar that is 1 if the step that looked was skipped, and what its gradients
            are still multiplied by in that case.
        agreement: What all ranks have found, if several decide.
        asked: In that case the ids of all parameters that were asked for gradients, which some
            ranks may not have: they are to know of the look all the same.
    """

    scale: LossScale
    gradients: Gradients
    found_here: dict[torch.device, Tensor]
    amax_here: Tensor | None = None
    left_scaled: tuple[Tensor, Tensor] | None = None
    agreement: Agreement | None = None
    asked: frozenset[int] = frozenset()

    @property
    def found_inf(self) -> dict[torch.device, Tensor]:
        """For each device a float32 scalar, 1 if some gradient, of any rank, is inf or NaN."""
        if self.agreement is None:
            return self.found_here
        found = self.agreement.found_inf()
        return {device: moved(found, device) for device in self.found_here or [found.device]}

    @property
    def amax(self) -> Tensor | None:
        """The largest unscaled magnitude of all ranks, if the scale's rule wants to know."""
        return self.amax_here if self.agreement is None else self.agreement.amax()


@dataclass(eq=False)
class Blocks:
    """How many blocks of ``accumulate`` there were, and how many were dropped.

    Attributes:
        count: All blocks.
        bad: Those whose gradients were dropped.
        overflowed: Those of them whose loss was finite.
        scale: The scale of the last one that overflowed, else of the last one.
        has_several_losses: Whether they had different scales: then there is no average over them.
        num_losses: Number of losses scaled in the iteration when the last one ended.
        versions: How often each gradient had been written to then.
    """

    count: int = 0
    bad: int = 0
    overflowed: int = 0
    scale: LossScale | None = None
    has_several_losses: bool = False
    num_losses: int = 0
    versions: list[int] = field(default_factory=list)


@dataclass(eq=False)
class OptimizerRecord:
    """One optimizer in this iteration.

    It holds the optimizer, so that no other object can take over its ``id`` meanwhile.

    Attributes:
        looks: Every look that saw one of its gradients: its own, and that of another optimizer or
            of a wrapper which shares parameters with it.
        outlier: float32 scalar, 1 if its norm is too large to be believed; None if not asked.
        blocks: The blocks of ``accumulate`` that have not been put together yet.
        num_losses: Number of losses that had been scaled when its gradients were unscaled.
        norms: Their norms when they were unscaled, if measured then.
        norm: The norm of all of them, unscaled and before clipping, if measured then.
    """

    optimizer: torch.optim.Optimizer
    stage: Stage = Stage.SCALED
    looks: list[Look] = field(default_factory=list)
    outlier: Tensor | None = None
    blocks: Blocks | None = None
    num_losses: int = 0
    norms: Norms | None = None
    norm: Tensor | None = None

    def found_inf(self) -> dict[torch.device, Tensor]:
        """Return for each device 1 if some gradient there is inf or NaN, else 0."""
        if len(self.looks) == 1:
            return self.looks[0].found_inf  # itself: who shares it between ranks writes to it
        found: dict[torch.device, list[Tensor]] = {}
        for look in self.looks:
            for device, scalar in look.found_inf.items():
                found.setdefault(device, []).append(scalar)
        return {device: combine(flags, device) for device, flags in found.items()}


class Iteration:
    """The records of all optimizers, and the looks at all gradients, since the last ``update``.

    A record is kept only when something has been done for its optimizer, so that a call which fails
    leaves no trace. Sync: none.
    """

    def __init__(self) -> None:
        self._records: dict[int, OptimizerRecord] = {}
        self.looks: list[Look] = []
        # Made only when another optimizer asks: for thousands of gradients it takes its time.
        self._look_at: dict[int, Look] = {}
        self._num_looks_in_it = 0
        # Parameters whose gradients backward has added to since they were looked at, by id.
        self._fresh: set[int] = set()
        self._hooks: list[RemovableHandle] = []
        self._num_watched = 0
        self._in_doubt: list[Gradients] = []
        # How many losses of each name have been scaled. A list would be compiled once per length.
        self.losses: dict[str | None, int] = {}

    @property
    def num_losses(self) -> int:
        """How many losses have been scaled."""
        return sum(self.losses.values())

    def count_loss(self, loss: str | None, number: int = 1) -> None:
        """Take note that losses of a name have been scaled."""
        self.losses[loss] = self.losses.get(loss, 0) + number

    def count_losses_of(self, part: Iteration) -> None:
        """Take note of the losses of a part of this iteration."""
        for loss, number in part.losses.items():
            self.count_loss(loss, number)

    def record(self, optimizer: torch.optim.Optimizer) -> OptimizerRecord:
        """Return the record of an optimizer, a fresh one if nothing has been done for it."""
        return self._records.get(id(optimizer)) or OptimizerRecord(optimizer)

    def keep(self, record: OptimizerRecord) -> None:
        """Keep a record until the iteration ends."""
        self._records[id(record.optimizer)] = record

    def drop(self, record: OptimizerRecord) -> None:
        """Forget a record that was kept for a call which did nothing."""
        self._records.pop(id(record.optimizer), None)

    def find(self, key: int) -> OptimizerRecord | None:
        """Return the record of the optimizer with an ``id``, None if none was kept."""
        return self._records.get(key)

    def records(self) -> list[OptimizerRecord]:
        """Return the records of all optimizers that something has been done for."""
        return list(self._records.values())

    def scale_of(self, param: Tensor) -> LossScale | None:
        """Return the scale that the gradient has been divided by, None if it has not."""
        look = None if id(param) in self._fresh else self._looks_by_gradient().get(id(param.grad))
        return None if look is None else look.scale

    def scales_of_blocks(self) -> dict[int, LossScale | None]:
        """Return the scale of the last block for each parameter, by id, that was in blocks."""
        return {
            id(param): record.blocks.scale
            for record in self.records()
            if record.blocks is not None
            for param in parameters(record.optimizer)
        }

    def split(self, gradients: Gradients) -> tuple[Gradients, list[Look]]:
        """Return the gradients that are still scaled, and the looks that unscaled the others.

        A parameter in two optimizers, or in an optimizer and in a wrapper of it, is unscaled once:
        by whoever comes first.
        """
        look_at = self._looks_by_gradient()
        if not look_at:
            return gradients, []
        seen = look_at.keys() & set(map(id, gradients.grads))
        if self._fresh:
            pairs = zip(gradients.params, gradients.grads, strict=True)
            seen -= {id(grad) for param, grad in pairs if id(param) in self._fresh}
        found = {look_at[key] for key in seen}
        # In the order of the looks, which a set does not have.
        return gradients.without(seen), [look for look in self.looks if look in found]

    def add(self, look: Look) -> None:
        """Remember a look, and that its gradients are no longer to be unscaled."""
        self.looks.append(look)
        self._fresh.difference_update(map(id, look.gradients.params if self._fresh else ()))

    @keep_out_of_graphs
    def watch(self) -> None:
        """Notice what backward adds to gradients that have been looked at: it is still scaled.

        ``zero_grad(set_to_none=False)``, buckets and flat buffers keep a gradient where it was.
        """
        for look in self.looks[self._num_watched :]:
            for param in look.gradients.params:
                if param.is_leaf and param.requires_grad:
                    hook = param.register_post_accumulate_grad_hook(self._note_fresh)  # type: ignore[no-untyped-call]
                    self._hooks.append(hook)
        self._num_watched = len(self.looks)

    def _note_fresh(self, param: Tensor) -> None:
        self._fresh.add(id(param))

    def doubt(self, gradients: Gradients) -> None:
        """Remember that nobody knows what these gradients are multiplied by."""
        self._in_doubt.append(gradients)

    def is_in_doubt(self, gradients: Gradients) -> bool:
        """Say whether nobody knows what some of these are multiplied by."""
        if not self._in_doubt:
            return False
        ids = {id(grad) for doubted in self._in_doubt for grad in doubted.grads}
        return not ids.isdisjoint(map(id, gradients.grads))

    def end(self) -> None:
        """Stop watching."""
        for hook in self._hooks:
            hook.remove()

    def _looks_by_gradient(self) -> dict[int, Look]:
        # Filled when somebody asks, which with one optimizer nobody does.
        for look in self.looks[self._num_looks_in_it :]:
            self._look_at.update(dict.fromkeys(map(id, look.gradients.grads), look))
        self._num_looks_in_it = len(self.looks)
        return self._look_at


def ids_asked(params: Iterable[Tensor], ranks: Alone | Together) -> frozenset[int]:
    """Return what a look at the gradients of parameters remembers of them: see ``Look.asked``."""
    return frozenset(map(id, params)) if ranks.is_together else frozenset()


def nothing_checked(optimizer: torch.optim.Optimizer) -> CallOrderError:
    """Return the error for an optimizer without any gradient."""
    num_params = sum(1 for _ in parameters(optimizer))
    return NothingCheckedError(
        f"step({name(optimizer)}): none of its {num_params} parameters has a gradient.\n"
        "Cause: backward() was not called on the scaled loss, or zero_grad() was called after "
        "it, or the loss does not depend on these parameters (is it the optimizer of this "
        "model?).\n"
        "Cure: call scaler.scale(loss).backward() before step() and zero_grad() after it, or "
        "leave out step() for this optimizer in this iteration. (torch.amp says: No inf checks "
        "were recorded for this optimizer.)"
    )
