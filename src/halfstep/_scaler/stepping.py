"""What a step does to the gradients of one optimizer: gather, look, measure, limit, divide.

Sync: none, in all of these functions but :func:`is_untouched`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep._scaler import gradients as collecting
from halfstep._scaler import passes, scalars
from halfstep._scaler.checks import float32_from_bits
from halfstep._scaler.gradients import Gradients, collect
from halfstep._scaler.iteration import Iteration, Look, OptimizerRecord, Stage, ids_asked
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.names import Names
from halfstep._scaler.norm_limits import NormLimit
from halfstep._scaler.optimizers import name
from halfstep._scaler.ranks.agreement import NUM_NUMBERS, Agreement
from halfstep._scaler.ranks.deciding import Alone, Together
from halfstep.errors import CallOrderError


@dataclass(eq=False)
class Preparation:
    """Gradients on their way to a step, and what is known of them.

    Attributes:
        gradients: The gradients.
        loss_scale: The scale of the loss that they come from.
        scale: What they are multiplied by, None for nothing.
        looks: Earlier looks at some of them, in this iteration.
        ranks: Who decides what becomes of them.
        asked: Ids of the parameters, those without gradients too, if several ranks decide.
        look: The look at what is still scaled, once there was one.
        norms: Their norms before any clipping, if measured.
        norm: Norm of all of them together, unscaled, a scalar on the device of the scale.
        norms_now: The norms as they are now.
        norm_now: The norm as it is now.
        coefficient: What clipping multiplies them by, None without clipping.
        outlier: float32 scalar, 1 if the norm is too large to be believed; None if not asked.
    """

    gradients: Gradients
    loss_scale: LossScale
    scale: Tensor | None
    looks: list[Look]
    ranks: Alone | Together
    asked: frozenset[int] = frozenset()
    look: Look | None = None
    norms: passes.Norms | None = None
    norm: Tensor | None = None
    norms_now: passes.Norms | None = None
    norm_now: Tensor | None = None
    coefficient: Tensor | None = None
    outlier: Tensor | None = None

    @property
    def is_looked_at(self) -> bool:
        """Whether there are gradients, if only on other ranks."""
        # torch.compile of 2.11 cannot take bool() of a list.
        return len(self.gradients.grads) > 0 or self.ranks.is_together

    def agreements(self) -> list[Agreement]:
        """Return what all ranks have found, of every look, if several decide."""
        looks = self.looks if self.look is None else [*self.looks, self.look]
        return [look.agreement for look in looks if look.agreement is not None]

    def read(self, scalars: list[Tensor]) -> list[float]:
        """Return float32 scalars of the scale's device; raise if the ranks disagree. Sync: one."""
        agreements = self.agreements()
        if not agreements and len(scalars) == 1:
            return [scalars[0].item()]
        floats = torch.stack(scalars)
        if not agreements:
            return floats.tolist()
        vectors = [agreement.vector() for agreement in agreements]
        bits = torch.cat([*vectors, floats.view(torch.int32)]).tolist()
        for agreement in agreements:
            agreement.require(bits[:NUM_NUMBERS])
            del bits[:NUM_NUMBERS]
        return [float32_from_bits(number) for number in bits]

    @property
    def is_on_cpu(self) -> bool:
        """Whether the scale, and what the step decides, is on the CPU."""
        return self.loss_scale.tensor.device.type == "cpu"

    def factor(self) -> Tensor | None:
        """Return what the gradients are to be multiplied by, None for nothing."""
        if self.scale is None:
            return None if self.coefficient is None else self.coefficient.float()
        factor = scalars.reciprocal(self.scale)
        return factor if self.coefficient is None else (factor * self.coefficient).float()

    def grad_scale(self) -> Tensor | None:
        """Return what an optimizer that handles the scale is to divide by, None for nothing."""
        if self.coefficient is None:
            return self.scale
        return ((1.0 if self.scale is None else self.scale) / self.coefficient).float()

    def found_inf(self) -> Tensor | None:
        """Return 1 if any look saw inf or NaN, else 0; None if nobody has looked."""
        device = self.loss_scale.tensor.device
        own = [] if self.look is None else list(self.look.found_inf.values())
        earlier = [scalar for look in self.looks for scalar in look.found_inf.values()]
        if earlier:  # others may have written to them since
            return scalars.combine([*earlier, *own], device)
        return scalars.any_of(own, device) if own else None

    def skip(self, found_inf: Tensor) -> Tensor:
        """Return 1 if the step is to be skipped, else 0."""
        return found_inf if self.outlier is None else torch.maximum(found_inf, self.outlier)


def gather(
    method: str,
    params: list[Tensor],
    iteration: Iteration,
    record: OptimizerRecord | None,
    scale: LossScale,
    ranks: Alone | Together,
    refuse: Callable[[Preparation], None],
) -> Preparation:
    """Find gradients, and what they are multiplied by.

    If some of them have been unscaled with another optimizer, the others are unscaled now.

    Args:
        method: What an error message calls the call.
        params: Their parameters.
        iteration: Knows which gradients have been unscaled.
        record: The optimizer of these parameters; None if they are no optimizer's.
        scale: The scale of the loss.
        ranks: Who decides.
        refuse: Raises if the gradients that are still scaled cannot be unscaled in place.

    Raises:
        CallOrderError: Gradients have come since those of the optimizer were unscaled.
    """
    gradients = collect(params)
    if iteration.is_in_doubt(gradients):
        raise CallOrderError(
            f"{method}(): an earlier step() of these gradients raised, and may have divided some "
            "of them by the scale already: zero_grad() and call backward() again"
        )
    if record is not None and record.stage is not Stage.SCALED:
        if iteration.num_losses > record.num_losses:
            _require_the_same(method, gradients, iteration, record)
        ready = Preparation(gradients, scale, None, record.looks, ranks)
        ready.norms, ready.norm = record.norms, record.norm
        return ready
    scaled, looks = iteration.split(gradients)
    asked = ids_asked(params, ranks)
    if ranks.is_together:
        looks = [look for look in iteration.looks if look.asked & asked]
    # A copy: update() changes the scale in place, and norms are divided by it later.
    ready = Preparation(scaled, scale, scale.tensor.clone(), looks, ranks, asked)
    if not looks:
        return ready
    refuse(ready)
    for look in looks:
        _unscale_what_was_left(look)
    unscale_(ready)
    if ready.look is not None:
        iteration.add(ready.look)
        looks = [*looks, ready.look]
    return Preparation(gradients, scale, None, looks, ranks)


def _require_the_same(
    method: str, gradients: Gradients, iteration: Iteration, record: OptimizerRecord
) -> None:
    new, _ = iteration.split(gradients)
    if new.grads:
        raise CallOrderError(
            f"{method}({name(record.optimizer)}): backward() of a scaled loss came after its "
            f"gradients were unscaled, and {len(new.grads)} of {len(gradients.grads)} are new and "
            "still scaled. Call unscale_() or clip_grad_norm_() after the last backward(); "
            "give this iteration up with zero_grad() and update(new_scale=scaler.get_scale())"
        )


def _unscale_what_was_left(look: Look) -> None:
    """Divide the gradients that a skipped step of another optimizer has left as they were."""
    if look.left_scaled is not None:
        is_left, scale = look.left_scaled
        passes.multiply_(look.gradients, torch.where(is_left > 0, scalars.reciprocal(scale), 1.0))
        look.left_scaled = None


def refuse_float16(
    ready: Preparation, optimizer: torch.optim.Optimizer | None, names: Names
) -> None:
    """Raise if float16 gradients would have to be unscaled in place.

    Args:
        ready: The gradients.
        optimizer: Whose they are; None if they are no optimizer's.
        names: The names of their parameters.
    """
    if ready.scale is not None:
        owner = "the list of parameters" if optimizer is None else name(optimizer)
        collecting.refuse_float16(
            ready.gradients, owner, lambda: names.of(ready.gradients.params, optimizer)
        )


def unscale_(ready: Preparation) -> None:
    """Divide the gradients by the scale in place and look for inf and NaN. 2 G."""
    if ready.scale is None or not ready.is_looked_at:
        return
    amax = _largest(ready, ready.scale)
    can_amplify = ready.loss_scale.can_amplify
    found_inf = passes.unscale_(ready.gradients, ready.scale, can_amplify=can_amplify)
    _remember(ready, found_inf, amax)
    ready.scale = None


def check(ready: Preparation) -> None:
    """Check scaled gradients; measure them too if it takes no longer. 1 G, or 2 G of small ones."""
    if ready.scale is None or not ready.is_looked_at:
        return
    if not passes.is_measured_fast(ready.gradients):
        found_inf = passes.multiply_(ready.gradients, torch.ones_like(ready.scale))
        _remember_scaled(ready, ready.scale, list(found_inf.values()))
    elif ready.ranks.is_together:
        # The norm of all would be one more collective.
        ready.norms = passes.measure(ready.gradients, ready.scale)
        norm = ready.norms.total(ready.loss_scale.tensor.device)
        _remember_scaled(ready, ready.scale, [scalars.is_nonfinite(norm)])
    else:
        measure(ready)


def measure(ready: Preparation) -> None:
    """Measure the norms, which checks scaled gradients too; change nothing. 1 G."""
    if not ready.is_looked_at:
        return
    norms = passes.measure(ready.gradients, ready.scale)
    device = ready.loss_scale.tensor.device
    finish = ready.ranks.start_norm(norms, ready.gradients, device)
    if ready.scale is not None:
        # What the other ranks have found is on its way together with their norms.
        local = norms.total(device)
        _remember_scaled(ready, ready.scale, [scalars.is_nonfinite(local)], norms)
    norm = finish()
    ready.norms_now, ready.norm_now = norms, norm if ready.scale is None else norm / ready.scale
    if ready.norm is None:
        ready.norms, ready.norm = norms, ready.norm_now
    if ready.scale is None:
        # Somebody may have changed them since they were unscaled, and the answer is at hand.
        found_inf = {device: scalars.is_nonfinite(norm)}
        ready.look = Look(ready.loss_scale, Gradients([], [], []), found_inf)


def is_untouched(ready: Preparation) -> bool:
    """Say whether the gradients surely are as they were when they were measured. Sync: some."""
    if ready.norms is None:
        return False
    now = passes.measure(ready.gradients, ready.scale)
    return repr(now.unscaled()) == repr(ready.norms.unscaled())  # NaN is not equal to NaN


def _remember_scaled(
    ready: Preparation, by: Tensor, found: list[Tensor], norms: passes.Norms | None = None
) -> None:
    """Make the look at gradients that stay multiplied ``by`` the scale."""
    device = ready.loss_scale.tensor.device
    if ready.loss_scale.can_amplify:
        found += passes.overflows_when_divided(ready.gradients, by)
    found_inf = {device: scalars.any_of(found, device)} if found else {}
    _remember(ready, found_inf, _largest(ready, by), norms)


def _remember(
    ready: Preparation,
    found_inf: dict[torch.device, Tensor],
    amax: Tensor | None,
    norms: passes.Norms | None = None,
) -> None:
    """Make the look, and tell the other ranks of it if several decide."""
    ready.look = Look(ready.loss_scale, ready.gradients, found_inf, amax, asked=ready.asked)
    has_gradients = len(ready.gradients.grads) + len(ready.looks) > 0
    ready.ranks.agree_on(ready.look, norms, has_gradients=has_gradients)


def _largest(ready: Preparation, by: Tensor) -> Tensor | None:
    """Return the largest unscaled magnitude, if the rule wants to know. 1 G."""
    if not (ready.loss_scale.wants_amax and ready.gradients.grads):
        return None
    return passes.largest(ready.gradients, by)


def limit(ready: Preparation, max_norm: float | None, norm_limit: NormLimit | None) -> None:
    """Work out the clip coefficient, and whether the norm is an outlier."""
    if ready.norm_now is None:
        return
    if max_norm is not None:
        ready.coefficient = passes.clip_coefficient(ready.norm_now, max_norm)
    if norm_limit is not None:
        assert ready.norm is not None
        ready.outlier = norm_limit.is_exceeded(ready.norm)


def multiply_(ready: Preparation) -> None:
    """Divide by the scale and clip, at once and in place; 2 G if there is something to do."""
    factor = ready.factor()
    if factor is not None:
        passes.multiply_(ready.gradients, factor)
        ready.scale = None
