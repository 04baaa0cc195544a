"""What a scaler knows between two calls of ``update``: of each optimizer and of each gradient."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler import passes, scalars
from halfstep._scaler.checks import float32_from_bits
from halfstep._scaler.gradients import NONE, Gradients, parameters
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.ranks.agreement import ALONE, NUM_NUMBERS, Agreement, Alone, Together
from halfstep._scaler.scalars import Scalar, moved

if TYPE_CHECKING:
    from halfstep._scaler.accumulation import Blocks


@dataclass(eq=False, slots=True)
class GradientCheck:
    """A check of gradients that were multiplied by one scale.

    Attributes:
        scale: The scale, which moves by what was found.
        gradients: What was checked. Held until the iteration ends, so that no other tensor can
            take over the ``id`` of one of them meanwhile.
        found_here: For each device a float32 scalar, 1 if some gradient there is inf or NaN, else
            0.
        amax_here: The largest unscaled magnitude, a scalar on the device of the scale, if the
            scale's rule wants to know.
        left_scaled: Whether the step that checked was skipped, and what its gradients are still
            multiplied by in that case.
        agreement: What all ranks have found, if several decide.
        asked: In that case the ids of all parameters that were asked for gradients, which some
            ranks may not have: they are to know of the check all the same.
    """

    scale: LossScale
    gradients: Gradients
    found_here: dict[torch.device, Tensor]
    amax_here: Tensor | None = None
    left_scaled: tuple[Scalar, Scalar] | None = None
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


class Stage(Enum):
    """How far an optimizer has come since the last ``update``."""

    SCALED = "its gradients are still multiplied by the scale"
    UNSCALED = "its gradients have already been unscaled"
    STEPPED = "step() has already been called"


@dataclass(eq=False, slots=True)
class Step:
    """The gradients of an optimizer on their way through one call, and what is known of them.

    The last one is kept until the iteration ends; see :attr:`Iteration.steps`.

    Attributes:
        optimizer: Whose gradients; None for those of parameters.
        loss_scale: The scale of the loss that they come from.
        gradients: The gradients.
        multiplier: What they are multiplied by, None for nothing.
        checks: Every check that saw one of them: those of earlier calls, and those of another
            optimizer or of a wrapper which shares parameters with it.
        ranks: Who decides what becomes of them.
        asked: Ids of the parameters, those without gradients too, if several ranks decide.
        stage: How far the optimizer has come.
        num_losses: Number of losses that had been scaled when the call ended.
        own_check: The check of what was still scaled, once there was one.
        norms: Their norms before any clipping, if measured.
        norm: Norm of all of them together, unscaled and before clipping, if measured.
        coefficient: What clipping multiplies them by, None without clipping.
        outlier: 1 if the norm is too large to be believed, else 0; None if not asked.
    """

    optimizer: torch.optim.Optimizer | None
    loss_scale: LossScale
    gradients: Gradients = NONE
    multiplier: Scalar | None = None
    checks: list[GradientCheck] = field(default_factory=list)
    ranks: Alone | Together = ALONE
    asked: frozenset[int] = frozenset()
    stage: Stage = Stage.SCALED
    num_losses: int = 0
    own_check: GradientCheck | None = None
    norms: passes.Norms | None = None
    norm: Scalar | None = None
    coefficient: Scalar | None = None
    outlier: Scalar | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients, if only on other ranks."""
        # torch.compile of 2.11 cannot take bool() of a list.
        return len(self.gradients.grads) > 0 or self.ranks.is_together

    def parameters(self) -> Iterator[Tensor]:
        """Return the parameters of the optimizer."""
        assert self.optimizer is not None
        return parameters(self.optimizer)

    def agreements(self) -> list[Agreement]:
        """Return what all ranks have found, of every check, if several decide."""
        own = self.own_check
        checks = self.checks if own is None or own in self.checks else [*self.checks, own]
        return [check.agreement for check in checks if check.agreement is not None]

    def found_inf(self) -> Scalar | None:
        """Return 1 if any check saw inf or NaN, else 0; None if there was no check."""
        own = self.own_check
        if own is not None and not self.checks:
            flags = list((own.found_here if own.agreement is None else own.found_inf).values())
            if len(flags) == 1:
                # On an accelerator a kernel less than to combine one.
                flag = flags[0]
                return flag.item() if flag.device.type in scalars.READABLE else flag
            return self._combined(flags)
        flags = [flag for check in self.checks for flag in check.found_inf.values()]
        if own is not None:
            flags += own.found_inf.values()
        return self._combined(flags)

    def _combined(self, flags: list[Tensor]) -> Scalar | None:
        return scalars.combine(flags, self.loss_scale.device) if flags else None

    def found_inf_by_device(self) -> dict[torch.device, Tensor]:
        """Return for each device 1 if some gradient there is inf or NaN, else 0."""
        if len(self.checks) == 1:
            return self.checks[0].found_inf  # itself: who shares it between ranks writes to it
        found: dict[torch.device, list[Tensor]] = {}
        for check in self.checks:
            for device, flag in check.found_inf.items():
                found.setdefault(device, []).append(flag)
        return {
            device: scalars.as_tensor(scalars.combine(flags, device), device)
            for device, flags in found.items()
        }

    def skip(self, found_inf: Scalar) -> Scalar:
        """Return 1 if the step is to be skipped, else 0."""
        return found_inf if self.outlier is None else scalars.larger(found_inf, self.outlier)

    def factor(self) -> Scalar | None:
        """Return what the gradients are to be multiplied by, None for nothing."""
        if self.multiplier is None:
            return None if self.coefficient is None else scalars.to_single(self.coefficient)
        factor = scalars.reciprocal(self.multiplier)
        return factor if self.coefficient is None else scalars.to_single(factor * self.coefficient)

    def divisor(self) -> Scalar | None:
        """Return what an optimizer that handles the scale is to divide by, None for nothing."""
        if self.coefficient is None:
            return self.multiplier
        multiplier = 1.0 if self.multiplier is None else self.multiplier
        if not isinstance(self.coefficient, Tensor) and self.coefficient == 0.0:
            return math.inf  # clipped to 0
        return scalars.to_single(multiplier / self.coefficient)

    def read(self, values: list[Scalar]) -> list[float]:
        """Return numbers of the scale's device; raise if the ranks disagree. Sync: one."""
        agreements = self.agreements()
        if self.loss_scale.device.type in scalars.READABLE:
            for agreement in agreements:
                agreement.require(agreement.vector().tolist())
            return [float(value) for value in values]
        tensors = [scalars.as_tensor(value, self.loss_scale.device) for value in values]
        if not agreements:
            return torch.stack(tensors).tolist() if len(tensors) > 1 else [tensors[0].item()]
        vectors = [agreement.vector() for agreement in agreements]
        bits = torch.cat([*vectors, torch.stack(tensors).view(torch.int32)]).tolist()
        for agreement in agreements:
            agreement.require(bits[:NUM_NUMBERS])
            del bits[:NUM_NUMBERS]
        return [float32_from_bits(number) for number in bits]


class Iteration:
    """The steps of all optimizers, and the checks of all gradients, since the last ``update``.

    A step is kept only when something has been done for its optimizer, so that a call which fails
    leaves no trace. Sync: none.

    Attributes:
        steps: What the last call of each optimizer has left, by the ``id`` of the optimizer, which
            the step holds: no other object can take over the ``id`` meanwhile.
        blocks: The blocks of ``accumulate`` that have not been put together yet, in the same way.
        checks: The checks, in order.
        losses: How many losses of each name have been scaled. A list would be compiled once per
            length.
        num_losses: How many losses have been scaled.
        hooks: Those that notice what backward adds to checked gradients.
        in_doubt: Gradients of which nobody knows what they are multiplied by.
    """

    def __init__(self) -> None:
        self.steps: dict[int, Step] = {}
        self.blocks: dict[int, Blocks] = {}
        self.checks: list[GradientCheck] = []
        self.losses: dict[str | None, int] = {}
        self.num_losses = 0
        # Made only when another optimizer asks: for thousands of gradients it takes its time.
        self._check_of: dict[int, GradientCheck] = {}
        self._num_checks_in_it = 0
        # Parameters whose gradients backward has added to since they were checked, by id.
        self._fresh: set[int] = set()
        self.hooks: list[RemovableHandle] = []
        self._num_watched = 0
        self.in_doubt: list[Gradients] = []

    def count_losses_of(self, part: Iteration) -> None:
        """Count the losses of a part of this iteration."""
        for loss, number in part.losses.items():
            self.losses[loss] = self.losses.get(loss, 0) + number
            self.num_losses += number

    def step_of(self, optimizer: torch.optim.Optimizer) -> Step | None:
        """Return what the last call of an optimizer has left, None if nothing has been done."""
        return self.steps.get(id(optimizer))

    def scale_of(self, param: Tensor) -> LossScale | None:
        """Return the scale that the gradient has been divided by, None if it has not."""
        check = None if id(param) in self._fresh else self._checks_by_gradient().get(id(param.grad))
        return None if check is None else check.scale

    def scales_of_blocks(self) -> dict[int, LossScale | None]:
        """Return the scale of the last block for each parameter, by id, that was in blocks."""
        return {
            id(param): blocks.scale
            for blocks in self.blocks.values()
            for param in parameters(blocks.optimizer)
        }

    def blocks_with(self, params: list[Tensor]) -> list[Blocks]:
        """Return the blocks of the optimizers that have one of the parameters."""
        wanted = set(map(id, params))
        return [
            blocks
            for blocks in self.blocks.values()
            if not wanted.isdisjoint(map(id, parameters(blocks.optimizer)))
        ]

    def split(self, gradients: Gradients) -> tuple[Gradients, list[GradientCheck]]:
        """Return the gradients that are still scaled, and the checks that unscaled the others.

        A parameter in two optimizers, or in an optimizer and in a wrapper of it, is unscaled once:
        by whichever comes first.
        """
        check_of = self._checks_by_gradient()
        if not check_of:
            return gradients, []
        seen = check_of.keys() & set(map(id, gradients.grads))
        if self._fresh:
            pairs = zip(gradients.params, gradients.grads, strict=True)
            seen -= {id(grad) for param, grad in pairs if id(param) in self._fresh}
        found = {check_of[key] for key in seen}
        # In the order of the checks, which a set does not have.
        return gradients.without(seen), [check for check in self.checks if check in found]

    def add(self, check: GradientCheck) -> None:
        """Remember a check, and that its gradients are no longer to be unscaled."""
        self.checks.append(check)
        if self._fresh:
            self._fresh.difference_update(map(id, check.gradients.params))

    @keep_out_of_graphs
    def watch(self) -> None:
        """Notice what backward adds to gradients that have been checked: it is still scaled.

        ``zero_grad(set_to_none=False)``, buckets and flat buffers keep a gradient where it was.
        """
        for check in self.checks[self._num_watched :]:
            for param in check.gradients.params:
                if param.is_leaf and param.requires_grad:
                    hook = param.register_post_accumulate_grad_hook(self._note_fresh)  # type: ignore[no-untyped-call]
                    self.hooks.append(hook)
        self._num_watched = len(self.checks)

    def _note_fresh(self, param: Tensor) -> None:
        self._fresh.add(id(param))

    def doubt(self, gradients: Gradients) -> None:
        """Remember that nobody knows what these gradients are multiplied by."""
        self.in_doubt.append(gradients)

    def is_in_doubt(self, gradients: Gradients) -> bool:
        """Return whether nobody knows what some of these are multiplied by."""
        ids = {id(grad) for doubted in self.in_doubt for grad in doubted.grads}
        return not ids.isdisjoint(map(id, gradients.grads))

    def end(self) -> None:
        """Stop watching."""
        for hook in self.hooks:
            hook.remove()

    def _checks_by_gradient(self) -> dict[int, GradientCheck]:
        # Filled when it is asked for, which never happens with one optimizer.
        for check in self.checks[self._num_checks_in_it :]:
            self._check_of.update(dict.fromkeys(map(id, check.gradients.grads), check))
        self._num_checks_in_it = len(self.checks)
        return self._check_of
