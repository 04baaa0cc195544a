"""Whether a step is taken, and taking it, in as few passes over the gradients as it takes.

G is reading or writing all of them once, before the optimizer's own work:

===================  =======================  ===========================================
optimizer            neither clip nor norm    clip, or the norm is wanted
===================  =======================  ===========================================
plain                check and divide, 2 G    measure, 1 G; divide and clip at once, 2 G
handles the scale    measure, 1 G             measure, 1 G
===================  =======================  ===========================================

Where measuring takes longer than a check, in the lower left corner gradients are only checked. The
first steps of an optimizer are measured, to notice gradients that are clipped too early; and so are
those with a scale that may be below 1, since a skipped step could not undo its division.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from halfstep._scaler import passes, stepping
from halfstep._scaler.early_clipping import EarlyClipping
from halfstep._scaler.iteration import nothing_checked
from halfstep._scaler.names import Names
from halfstep._scaler.norm_limits import NormLimits
from halfstep._scaler.optimizers import handles_scale, step_with_scale
from halfstep._scaler.stepping import Preparation

Args = tuple[Any, ...]
Kwargs = dict[str, Any]


class Steps:
    """Takes the steps of optimizers or skips them.

    Args:
        names: The names of parameters, for error messages.

    Attributes:
        norm_limits: Which norms are too large to be believed.
        early_clipping: Notices gradients that were clipped before they were unscaled.
    """

    def __init__(self, names: Names) -> None:
        self.names = names
        self.norm_limits = NormLimits()
        self.early_clipping = EarlyClipping()

    def take(
        self,
        optimizer: torch.optim.Optimizer,
        ready: Preparation,
        args: Args,
        kwargs: Kwargs,
        max_norm: float | None,
    ) -> tuple[Any, Tensor]:
        """Step if all gradients are finite and, unscaled, still are.

        Args:
            optimizer: Its ``step`` is called, if only to skip.
            ready: Its gradients.
            args: Arguments for its ``step``.
            kwargs: Keyword arguments for it.
            max_norm: What the norm is clipped to, None for no clipping.

        Returns:
            What ``optimizer.step`` returned, and a float32 scalar that is 1 if a gradient was inf
            or NaN.

        Raises:
            CallOrderError: There is no gradient.

        Sync: one; none for an optimizer that handles the scale itself.
        """
        take = self._fused if handles_scale(optimizer) else self._plain
        return take(optimizer, ready, args, kwargs, max_norm)

    def _fused(
        self,
        optimizer: torch.optim.Optimizer,
        ready: Preparation,
        args: Args,
        kwargs: Kwargs,
        max_norm: float | None,
    ) -> tuple[Any, Tensor]:
        norm_limit = self.norm_limits.of(optimizer)
        # Elsewhere looking would be a sync.
        is_looking = ready.is_on_cpu and self._is_looking(optimizer, ready)
        if is_looking or max_norm is not None or norm_limit is not None:
            stepping.measure(ready)
            stepping.limit(ready, max_norm, norm_limit)
        else:
            stepping.check(ready)
        found_inf = require_found(ready, optimizer)
        if is_looking:
            self._read(found_inf, optimizer, ready)
        elif ready.is_on_cpu and ready.ranks.is_together:
            ready.read([found_inf])  # there is nothing to wait for
        else:
            for agreement in ready.agreements():
                agreement.verify()
        result = step_with_scale(optimizer, ready.grad_scale(), ready.skip(found_inf), args, kwargs)
        return result, found_inf

    def _plain(
        self,
        optimizer: torch.optim.Optimizer,
        ready: Preparation,
        args: Args,
        kwargs: Kwargs,
        max_norm: float | None,
    ) -> tuple[Any, Tensor]:
        stepping.refuse_float16(ready, optimizer, self.names)
        norm_limit = self.norm_limits.of(optimizer)
        is_looking = self._is_looking(optimizer, ready)
        undo = None
        # Dividing by a scale below 1 may make inf of a gradient that a skipped step has to leave.
        can_amplify = ready.scale is not None and ready.loss_scale.can_amplify
        if is_looking or max_norm is not None or norm_limit is not None:
            stepping.measure(ready)
            stepping.limit(ready, max_norm, norm_limit)
        elif can_amplify:
            stepping.check(ready)
        else:
            undo = ready.scale
            stepping.unscale_(ready)
        found_inf = require_found(ready, optimizer)
        if self._read(ready.skip(found_inf), optimizer if is_looking else None, ready):
            if undo is not None:
                passes.multiply_(ready.gradients, undo)
                ready.scale = undo
            result = None
        else:
            stepping.multiply_(ready)
            # Through the instance: accelerate replaces `step` there to see whether it was called.
            result = optimizer.step(*args, **kwargs)
        return result, found_inf

    def _is_looking(self, optimizer: torch.optim.Optimizer, ready: Preparation) -> bool:
        return ready.scale is not None and self.early_clipping.is_looking(optimizer)

    def _read(
        self, skip: Tensor, first_steps_of: torch.optim.Optimizer | None, ready: Preparation
    ) -> bool:
        """Return whether to skip. Sync: the one of a plain step."""
        if first_steps_of is None or ready.norm is None or ready.scale is None:
            return bool(ready.read([skip])[0])
        values = ready.read([skip, ready.norm.to(skip) * ready.scale, ready.scale])
        if not values[0]:
            self.early_clipping.see(first_steps_of, values[1], values[2])
        return bool(values[0])


def require_found(ready: Preparation, optimizer: torch.optim.Optimizer) -> Tensor:
    """Return whether inf or NaN was found, a float32 scalar.

    Raises:
        CallOrderError: There was no gradient to look at.
    """
    found_inf = ready.found_inf()
    if found_inf is None:
        raise nothing_checked(optimizer)
    return found_inf
