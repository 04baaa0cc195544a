"""The steps and gradient checks between two calls of ``update``, and the journal of all steps."""

from __future__ import annotations

import math
import weakref
from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from itertools import islice
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._scaler import scalars
from halfstep._scaler.agreement import ALONE, NUM_NUMBERS, Agreement, Alone, Together
from halfstep._scaler.gradients import Gradients, parameters
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.norms import Norms
from halfstep._scaler.optimizers import makes_step_of, name
from halfstep._scaler.outcome import HistoryEntry, Outcome, read_all
from halfstep._scaler.scalars import Scalar, float32_from_bits, moved
from halfstep.errors import CallOrderError, NothingCheckedError

HISTORY_LENGTH = 10_000
"""The number of steps that are kept, some hundred bytes each on the device."""

if TYPE_CHECKING:
    from halfstep._scaler.accumulation import Blocks


@dataclass(eq=False, slots=True)
class GradientCheck:
    """A check of gradients that were multiplied by one scale, which moves by what was found.

    Attributes:
        gradients: Held until the iteration ends, so that no other tensor can take over the ``id``
            of one of them meanwhile.
        found_here: For each device a float32 scalar, 1 if some gradient there is inf or NaN, else
            0.
        amax_here: The largest unscaled magnitude, on the device of the scale, if its rule wants it.
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
    """The stage of an optimizer since the last ``update``."""

    SCALED = "its gradients are still multiplied by the scale"
    UNSCALED = "its gradients have already been unscaled"
    STEPPED = "step() has already been called"


@dataclass(eq=False, slots=True)
class Step:
    """The gradients of an optimizer on their way through one call, and what is known of them.

    The last one is kept until the iteration ends; see :attr:`Iteration.steps`.

    Attributes:
        optimizer: Whose gradients; None for those of parameters.
        multiplier: What they are multiplied by, None for nothing.
        checks: Every check that saw one of them: those of earlier calls, and those of another
            optimizer or of a wrapper which shares parameters with it.
        ranks: Who decides what becomes of them.
        asked: Ids of the parameters, those without gradients too, if several ranks decide.
        num_losses: Number of losses that had been scaled when the call ended.
        own_check: The check of what was still scaled, once there was one.
        norms: Their norms before any clipping, if measured.
        norm: Norm of all of them together, unscaled and before clipping, if measured.
        coefficient: What clipping multiplies them by, None without clipping.
        outlier: 1 if the norm is too large to be believed, else 0; None if not asked.
        found_inf: 1 if a check found inf or NaN, else 0, once it is decided.
        skip: 1 if the step is to be skipped, else 0, once it is decided.
    """

    optimizer: torch.optim.Optimizer | None
    loss_scale: LossScale
    gradients: Gradients
    multiplier: Scalar | None = None
    checks: list[GradientCheck] = field(default_factory=list)
    ranks: Alone | Together = ALONE
    asked: frozenset[int] = frozenset()
    stage: Stage = Stage.SCALED
    num_losses: int = 0
    own_check: GradientCheck | None = None
    norms: Norms | None = None
    norm: Scalar | None = None
    coefficient: Scalar | None = None
    outlier: Scalar | None = None
    found_inf: Scalar | None = None
    skip: Scalar | None = None

    @property
    def has_gradients(self) -> bool:
        """Whether there are gradients, if only on other ranks."""
        # torch.compile of 2.11 cannot take bool() of a list.
        return len(self.gradients.grads) > 0 or self.ranks.is_together

    def parameters(self) -> list[Tensor]:
        assert self.optimizer is not None
        return parameters(self.optimizer)

    def agreements(self) -> list[Agreement]:
        """Return what all ranks have found, of every check, if several decide."""
        own = self.own_check
        checks = self.checks if own is None or own in self.checks else [*self.checks, own]
        return [check.agreement for check in checks if check.agreement is not None]

    def decide(self) -> Scalar:
        """Work out whether inf or NaN was found and whether to skip; return the latter. Sync: none.

        Raises:
            NothingCheckedError: There was no gradient to check.
        """
        own = self.own_check
        flags: list[Tensor] = []
        for check in self.checks:
            flags += check.found_inf.values()
        if own is not None:
            flags += (own.found_here if own.agreement is None else own.found_inf).values()
        if not flags:
            raise nothing_checked(self.optimizer)
        if len(flags) == 1 and not self.checks:  # a new one, to which no user has added
            found_inf = scalars.scalar(flags[0])
        else:
            found_inf = scalars.combine(flags, self.loss_scale.device)
        self.found_inf = self.skip = found_inf
        if self.outlier is not None:
            self.skip = scalars.larger(found_inf, self.outlier)
        return self.skip

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


def nothing_checked(optimizer: torch.optim.Optimizer | None) -> NothingCheckedError:
    """Return the error for an optimizer without any gradient."""
    assert optimizer is not None
    num_params = len(parameters(optimizer))
    return NothingCheckedError(
        f"step({name(optimizer)}): none of its {num_params} parameters has a gradient.\n"
        "Cause: backward() was not called on the scaled loss, or zero_grad() was called after "
        "it, or the loss does not depend on these parameters (is it the optimizer of this "
        "model?).\n"
        "Cure: call scaler.scale(loss).backward() before step() and zero_grad() after it, or "
        "leave out step() for this optimizer in this iteration. (torch.amp says: No inf checks "
        "were recorded for this optimizer.)"
    )


class Iteration:
    """The steps of all optimizers, and the checks of all gradients, since the last ``update``.

    A step is kept only when something has been done for its optimizer, so that a call which fails
    leaves no trace. Sync: none.

    Attributes:
        steps: What the last call of each optimizer has left, by the ``id`` of the optimizer, which
            the step holds: no other object can take over the ``id`` meanwhile.
        blocks: The blocks of ``accumulate`` that have not been put together yet, in the same way.
        losses: How many losses of each name have been scaled. A list would be compiled once per
            length.
        hooks: Those that notice what backward adds to checked gradients.
        in_doubt: Gradients that are multiplied by an unknown number.
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
        # Ids of the gradients that backward has added to since they were checked, by parameter.
        self._fresh: dict[int, int] = {}
        self.hooks: list[RemovableHandle] = []
        self._num_watched = 0
        self.in_doubt: list[Gradients] = []

    def count_losses_of(self, part: Iteration) -> None:
        for loss, number in part.losses.items():
            self.losses[loss] = self.losses.get(loss, 0) + number
            self.num_losses += number

    def step_of(self, optimizer: torch.optim.Optimizer) -> Step | None:
        """Return what the last call of an optimizer has left, None if nothing has been done."""
        return self.steps.get(id(optimizer))

    def check_of(self, param: Tensor) -> GradientCheck | None:
        """Return the check that has divided the gradient by its scale, None if there is none."""
        return None if self.is_fresh(param) else self._checks_by_gradient().get(id(param.grad))

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
            seen -= {id(param.grad) for param in gradients.params if self.is_fresh(param)}
        found = {check_of[key] for key in seen}
        # In the order of the checks, which a set does not have.
        return gradients.without(seen), [check for check in self.checks if check in found]

    def add(self, check: GradientCheck) -> None:
        """Remember a check, and that its gradients are no longer to be unscaled."""
        self.checks.append(check)
        if self._fresh:
            for param in check.gradients.params:
                self._fresh.pop(id(param), None)

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

    def is_fresh(self, param: Tensor) -> bool:
        """Return whether backward has added to the gradient since it was checked."""
        return self._fresh.get(id(param)) == id(param.grad)

    def _note_fresh(self, param: Tensor) -> None:
        self._fresh[id(param)] = id(param.grad)

    def is_in_doubt(self, gradients: Gradients) -> bool:
        """Return whether some of these are multiplied by an unknown number."""
        ids = {id(grad) for doubted in self.in_doubt for grad in doubted.grads}
        return not ids.isdisjoint(map(id, gradients.grads))

    def end(self) -> None:
        for hook in self.hooks:
            hook.remove()

    def _checks_by_gradient(self) -> dict[int, GradientCheck]:
        # Filled when it is asked for, which never happens with one optimizer.
        for check in self.checks[self._num_checks_in_it :]:
            self._check_of.update(dict.fromkeys(map(id, check.gradients.grads), check))
        self._num_checks_in_it = len(self.checks)
        return self._check_of


class Memory:
    """The facts about an optimizer that are kept from one iteration to the next."""

    def __init__(self) -> None:
        self.outcome: Outcome | None = None  # of its last step
        self.number = 0  # of that step among those of all optimizers
        self.first_norms: list[float] = []  # still scaled

    def clear(self) -> None:
        """Let go of its parameters: the optimizer is gone."""
        if self.outcome is not None:
            self.outcome.forget_gradients()
            self.outcome = None


class Journal:
    """Outcomes in the order of the steps. Sync: none, but for :meth:`entries`."""

    def __init__(self) -> None:
        self.memories: weakref.WeakKeyDictionary[torch.optim.Optimizer, Memory] = (
            weakref.WeakKeyDictionary()
        )
        self._all: deque[Outcome] = deque(maxlen=HISTORY_LENGTH)
        self.open: list[Outcome] = []  # of the iteration that has not ended
        self._num_steps = 0

    def memory(self, optimizer: torch.optim.Optimizer) -> Memory:
        memory = self.memories.get(optimizer)
        if memory is None:
            memory = self.memories[optimizer] = Memory()
            # Without the journal, which must not live as long as the optimizer.
            weakref.finalize(optimizer, memory.clear).atexit = False
        return memory

    def add(self, memory: Memory, outcome: Outcome) -> None:
        if memory.outcome is not None:
            memory.outcome.forget_gradients()
        memory.outcome = outcome
        self._num_steps += 1
        memory.number = self._num_steps
        self._all.append(outcome)
        self.open.append(outcome)

    def newest(self, count: int) -> list[Outcome]:
        """Return the last outcomes, newest last. Sync: none."""
        return list(islice(reversed(self._all), count))[::-1]

    def of(self, optimizer: torch.optim.Optimizer) -> Outcome:
        """Return the outcome of the last step of an optimizer.

        That may have been the step of one that it wraps, or of a container that holds it.

        Raises:
            CallOrderError: ``step`` has not been called for it.
        """
        outcome = self.last(optimizer)
        if outcome is None:
            raise CallOrderError(
                f"outcome({name(optimizer)}): no step() of this optimizer has been seen by this "
                "GradScaler. Call scaler.step(optimizer) first"
            )
        return outcome

    def last(self, optimizer: torch.optim.Optimizer) -> Outcome | None:
        """Return the same, None if ``step`` has not been called for it."""
        # `in` takes wrappers that no weak reference can be made to.
        if optimizer in self.memories:
            own = self.memories[optimizer]
            if own.number == self._num_steps:  # the last of all, as with one optimizer
                return own.outcome
        newest = None
        for stepped, memory in self.memories.items():
            is_newer = newest is None or memory.number > newest.number
            if memory.outcome is not None and is_newer and makes_step_of(stepped, optimizer):
                newest = memory
        return None if newest is None else newest.outcome

    def entries(self) -> list[HistoryEntry]:
        """Return all outcomes in short, oldest first. Sync: one."""
        return read_all(list(self._all))
