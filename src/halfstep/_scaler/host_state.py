"""The changing part of a scale state on the CPU, where numbers are read without waiting.

It moves by :func:`halfstep._scaler.transition.next_state` itself;
:class:`halfstep._scaler.device_state.DeviceState` is its counterpart on other devices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfstep._scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, float32_bits
from halfstep._scaler.rules import Rule
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.transition import changed, next_state

CPU = torch.device("cpu")


class HostState:
    """A scale state, and the two tensors that losses are computed with.

    Attributes:
        now: The state.
        scale: Its scale, a float32 scalar. It keeps its memory for good.
        bad_loss: float32 scalar: 0, or NaN once a loss in this iteration was not finite.

    Sync: none, in all methods, except for values from other devices.
    """

    device = CPU

    def __init__(self, state: ScaleState) -> None:
        # The first loss may come in inference mode, the next one from training.
        with torch.inference_mode(False):
            self.scale, self.bad_loss = torch.zeros((), device=CPU), torch.zeros((), device=CPU)
        self.now: ScaleState
        self.write_(state)

    @property
    def loss_is_finite(self) -> bool:
        """Whether the losses of this iteration were finite."""
        return self.bad_loss.item() == 0.0

    @property
    def growth_tracker(self) -> Tensor:
        """The count of steps in a row, an int32 scalar; a copy."""
        return torch.tensor(self.now.growth_tracker, dtype=torch.int32)

    def traced_scale(self) -> Tensor:
        """Return a copy of the scale while torch.compile traces."""
        # Inductor of 2.13 drops a clone(), and the backward pass would then see a later scale. It
        # does not drop abs(), which is a copy too: no scale is negative.
        return self.scale.abs()

    def see_loss_(self, loss: Tensor) -> None:
        """Remember whether all entries of a loss are finite, until :meth:`update_`."""
        zero = zero_if_finite(loss)
        if zero is not None:
            self.bad_loss.add_(zero if zero.device == CPU else zero.to(CPU))

    def update_(self, found_inf: bool, outlier: bool = False, amax: float | None = None) -> None:
        """Go on to the next iteration.

        Args:
            found_inf: Whether a gradient was inf or NaN.
            outlier: Whether a norm was too large to be believed.
            amax: The largest magnitude of the unscaled gradients, for ``LogMax``.
        """
        loss_is_finite = not found_inf or self.loss_is_finite
        self.bad_loss.zero_()
        self.now = next_state(
            self.now,
            found_inf=found_inf,
            loss_is_finite=loss_is_finite,
            outlier=outlier,
            amax=amax,
        )
        # The same value is a change too: a backward pass of a loss from before is an error.
        self.scale.fill_(self.now.scale)

    def set_rule_(self, rule: Rule) -> None:
        """Move by another rule from now on."""
        self.now = _with_valid_tracker(changed(self.now, rule=rule))

    def fill_(self, scale: float) -> None:
        """Set the scale to a number that has been checked, as :meth:`ScaleState.with_scale`."""
        self.write_(self.now.with_scale(scale))

    def copy_(self, new_scale: Tensor) -> None:
        """Set the scale as :meth:`fill_` does; keep everything if the new one is unusable."""
        scale = new_scale.detach().reshape(()).float().item()
        if SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            self.fill_(scale)
        self.bad_loss.zero_()

    def write_(self, state: ScaleState) -> None:
        """Take over a state."""
        self.now = _with_valid_tracker(state)
        self.scale.fill_(state.scale)
        self.bad_loss.zero_()

    def counters(self) -> Tensor:
        """Return scale (its bits), growth tracker, steps taken and skipped, int32 ``[4]``."""
        now = self.now
        counts = [float32_bits(now.scale), now.growth_tracker, now.num_taken, now.num_skipped]
        return torch.tensor(counts, dtype=torch.int32)


def zero_if_finite(loss: Tensor) -> Tensor | None:
    """Return a scalar: 0 if all entries of a loss are finite, else NaN; None for integers.

    Args:
        loss: Tensor of any shape and dtype, on any device. Of a DTensor the local part is looked
            at.
    """
    loss = loss.detach()
    if hasattr(loss, "to_local"):  # a DTensor, without importing torch.distributed for it
        loss = loss.to_local()
    if loss.is_complex():
        loss = torch.view_as_real(loss.resolve_conj())
    if not loss.is_floating_point():
        return None
    # The sum of the loss itself may overflow, and Inductor takes loss * 0 for 0 always.
    zero = loss - loss
    return zero.sum() if zero.dim() else zero


def _with_valid_tracker(state: ScaleState) -> ScaleState:
    """Let a count that is already past a lowered interval grow the scale at the next step."""
    last = state.growth_interval - 1
    return changed(state, growth_tracker=last) if state.growth_tracker > last else state
