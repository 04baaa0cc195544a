"""The scale of losses on the CPU, and what it has in common with that of losses elsewhere.

The first loss decides: on an accelerator, a :class:`~halfstep._scaler.device_scale.DeviceScale`
takes the place of a :class:`LossScale`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from halfstep._gradients.scalars import (
    CPU,
    LARGEST_SCALE,
    SMALLEST_SCALE,
    Scalar,
    as_tensor,
    checked_scale,
    describe,
    float32_bits,
    is_nonfinite,
    reciprocal,
    zero_if_finite,
)
from halfstep._pytorch.amp import increment_version, set_grad_enabled
from halfstep._pytorch.devices import to_device
from halfstep._pytorch.modes import is_inside_functorch, is_jit_tracing, num_dispatch_modes
from halfstep._scaler.scale_state import (
    ScaleState,
    Schedule,
    changed,
    counted,
    next_state,
    num_calm,
)
from halfstep.errors import CallOrderError


class Pending(Protocol):
    """An update whose flags are on their way to the host. Sync: one, unless they have arrived."""

    def after(self) -> ScaleState:
        """Return the state after it."""

    def during(self) -> tuple[ScaleState, bool]:
        """Return the state in its iteration, and whether the losses were finite."""


# The state at one time: a state and the number of calm steps since, or the last update before it.
Snapshot: TypeAlias = tuple[ScaleState, int] | Pending


def state_of(snapshot: Snapshot) -> ScaleState:
    """Return the state in a snapshot. Sync: one if it is on its way."""
    return counted(*snapshot) if isinstance(snapshot, tuple) else snapshot.after()


class LossScale:
    """The scale of the losses, with its state. The host reads and writes both at once.

    What existing code writes into the tensors is found by comparing values. Steps that do nothing
    but count are only counted: the state is made when it is read.
    """

    is_here: ClassVar[bool] = True  # whether the host can read the scale without a sync
    is_created = False  # whether a loss has chosen the device; before that, there are no tensors
    device = CPU
    tensor: Tensor  # the scale, a float32 scalar on the device, which never moves
    one: Tensor  # a 1.0 there
    is_quiet = False  # whether it is known that neither of the last two updates was skipped
    has_loss = False  # whether `bad_loss` belongs to this iteration
    bad_loss: Tensor  # NaN if a loss was not finite, else 0
    _loss_is_finite: bool | None = None  # as far as a step has read it
    _agreed_loss: Tensor | None = None
    _growth_tracker: Tensor | None = None  # once a kernel or existing code has asked
    _inverse: Tensor | None = None
    _state: ScaleState
    _num_counted: int  # taken steps since that state
    _num_calm: int | None  # steps from now on that only count; None if not known

    def __init__(self, first: ScaleState) -> None:
        self.first = self.state = first  # the initial state, with the current schedule

    @property
    def state(self) -> ScaleState:
        """The state after the newest update whose flags are known on the host."""
        if self._num_counted:
            self._state, self._num_counted = counted(self._state, self._num_counted), 0
        return self._state

    @state.setter
    def state(self, state: ScaleState) -> None:
        self._state, self._num_counted, self._num_calm = state, 0, None
        self._inverse = None

    @property
    def growth_tracker(self) -> Tensor:
        """The count of consecutive steps, an int32 scalar on the device."""
        if self._growth_tracker is None:
            count = self.state.growth_tracker
            with torch.inference_mode(False):
                self._growth_tracker = torch.full((), count, dtype=torch.int32, device=self.device)
        return self._growth_tracker

    @property
    def inverse(self) -> Tensor:
        """1 / scale of the state, on the device, for gradients: made once for a state."""
        if self._inverse is None:
            with torch.inference_mode(False):
                self._inverse = as_tensor(reciprocal(self._state.scale), self.device)
        return self._inverse

    @property
    def can_amplify(self) -> bool:
        """Whether unscaling may multiply by more than 1."""
        return self.state.can_amplify

    def create(self, device: torch.device) -> None:
        """Put the scale on a device. Sync: none."""
        self.device, self.state, self.is_created = device, _with_valid_tracker(self.state), True
        # The first loss may come in inference mode, and the next one from training.
        with torch.inference_mode(False):
            number = torch.tensor(self.state.scale, dtype=torch.float32, device="cpu")
            self.tensor = number if self.is_here else to_device(number, device)
            self.bad_loss, self.one = torch.zeros_like(self.tensor), torch.ones_like(self.tensor)

    # --- losses -----------------------------------------------------------------------------------

    def multiply(self, loss: Tensor, *, is_traced: bool = False) -> Tensor:
        """Return a loss multiplied by the scale, and record whether it is finite. Sync: none.

        Finiteness is not checked inside ``torch.func.grad`` or ``vmap``. A float16 tensor with
        dimensions becomes float32, since 1.0 * 65536 is inf in float16; otherwise PyTorch's usual
        type promotion with a float32 scalar applies. ``is_traced``: whether torch.compile is
        tracing.
        """
        # torch.compile cannot trace is_jit_tracing(), nor is_inside_functorch() under
        # torch.func.grad.
        if is_traced:
            with torch.no_grad():
                self.see_loss(loss)
        elif (  # can it be read without a sync, and without being recorded?
            self.is_here
            and type(loss) is Tensor
            and loss.is_cpu
            and not loss.dim()
            and not (num_dispatch_modes() or is_jit_tracing() or is_inside_functorch(loss))
        ):
            number = loss.item()
            if number - number != 0.0:
                self.bad_loss = torch.full_like(self.tensor, torch.nan)
                self.has_loss, self._loss_is_finite = True, False
            # Nothing to move, and no dtype that wins over that of the scale.
            return loss * self.tensor
        elif not is_inside_functorch(loss):
            self.see_loss(loss)
        # Inductor of 2.13 removes a clone(), and the backward pass would then see a later scale. It
        # keeps abs(), which also copies: the scale is positive.
        scale = self.tensor.abs() if is_traced else self.tensor
        if scale.device != loss.device:
            scale = to_device(scale, loss.device)
        if loss.dtype == torch.float16 and loss.dim() > 0:
            # In type promotion the dtype of a tensor with dimensions wins over that of a scalar.
            loss = loss.float()
        return loss * scale

    def see_loss(self, loss: Tensor) -> None:
        """Record whether all entries of a loss are finite, until the next update. Sync: none."""
        was_grad_enabled = torch.is_grad_enabled()
        if was_grad_enabled:
            set_grad_enabled(False)
        try:
            zero = zero_if_finite(loss)
            if zero is None:
                return
            zero = to_device(zero.float(), self.device)
            self._loss_is_finite = None
            bad_loss = self.bad_loss + zero if self.has_loss else zero
            if torch.compiler.is_compiling():  # a graph cannot leave a tensor of its own behind
                self.bad_loss.copy_(bad_loss)
            else:
                self.bad_loss = bad_loss
            self.has_loss = True
        finally:
            if was_grad_enabled:
                set_grad_enabled(True)

    def loss_is_finite(self) -> bool:
        """Return whether all losses of this iteration were finite. Sync: one unless it is known."""
        if self._loss_is_finite is None:
            self._loss_is_finite = not self.has_loss or self.bad_loss.item() == 0.0
        return self._loss_is_finite

    def loss_flag(self) -> Tensor:
        """Return 1 if a loss of this iteration was not finite, else 0, on the device."""
        return is_nonfinite(self.bad_loss) if self.has_loss else torch.zeros_like(self.bad_loss)

    def forget_losses(self) -> None:
        """Forget whether losses since the last update were finite. Sync: none."""
        self._agreed_loss = self._loss_is_finite = None
        self.has_loss = False

    def agree_on_loss(self, is_bad: Tensor | None) -> None:
        """Replace this rank's flag for non-finite losses by that of all ranks. Sync: none.

        No loss counts if they did not exchange it (None).
        """
        agreed = torch.zeros_like(self.bad_loss)
        if is_bad is not None:
            agreed = torch.where(is_bad, torch.nan, agreed)
        if self._agreed_loss is not None:  # An earlier flag of this iteration counts too.
            agreed = agreed + self._agreed_loss
        self._agreed_loss = agreed
        self.forget_later_losses()

    def forget_later_losses(self) -> None:
        """Drop the flag of losses that came after the ranks agreed: only this rank knows them."""
        if self._agreed_loss is not None:
            self.bad_loss = self._agreed_loss
            self.has_loss, self._loss_is_finite = True, None

    # --- reading ----------------------------------------------------------------------------------

    def value(self) -> float:
        """Return the scale. Sync: one."""
        return self.tensor.item() if self.is_created else self.state.scale

    def number(self) -> Scalar:
        """Return the scale as a number or tensor for calculations. Sync: none."""
        self._follow()
        return self.state.scale

    known = number  # a number if the host knows it, else a tensor

    def read(self) -> ScaleState:
        """Return the whole state. Sync: one on an accelerator."""
        self._follow()
        return self.state

    def snapshot(self) -> Snapshot:
        """Return the current state, to be read later. Sync: none."""
        return self._state, self._num_counted

    def read_with(
        self, values: dict[str, Tensor], vectors: list[Tensor]
    ) -> tuple[dict[str, float], list[list[int]]]:
        """Return scalars and int32 vectors of a step as Python numbers, by name. Sync: one."""
        numbers = {key: value.item() for key, value in values.items()}
        return numbers, [vector.tolist() for vector in vectors]

    def counters(self) -> list[int]:
        """Return scale (its bits), growth tracker, steps taken and skipped. Sync: none."""
        now = self.state
        return [float32_bits(now.scale), now.growth_tracker, now.num_taken, now.num_skipped]

    # --- moving -----------------------------------------------------------------------------------

    def calm(self, *, is_fused: bool = False) -> Snapshot | None:
        """Return a snapshot, if a taken step from now on does nothing but count; else None.

        Nor may unscaling amplify then. ``is_fused``: whether the optimizer handles the scale, whose
        step an accelerator counts. Sync: none.
        """
        state = self._state
        if self._num_calm is None:
            self._num_calm = 0 if state.can_amplify else num_calm(state)
        if self._num_calm <= 0 or self._growth_tracker is not None:
            return None
        is_known = not self.is_here or self.tensor.item() == state.scale
        return (state, self._num_counted) if is_known else None

    def count(self) -> Snapshot | None:
        """Count a taken step, if it does nothing else, and return a snapshot. Sync: none."""
        if self.calm() is None:
            return None
        self._num_counted += 1
        self._num_calm -= 1  # type: ignore[operator]
        self.is_quiet = True
        increment_version((self.tensor,))  # backward of a loss from before must raise
        if self.has_loss:  # else nothing is known of them
            self.forget_losses()
        return self._state, self._num_counted

    def update(self, found_inf: bool | list[Tensor], went_bad: bool | list[Tensor] = False) -> None:
        """Back off, count or grow the scale after an iteration. Sync: none.

        The arguments are flags where the host does not know; see :func:`next_state`.
        """
        if not (found_inf or went_bad) and self.count() is not None:
            return
        self.forget_later_losses()
        self._follow()
        before, found_inf = self.state, found_inf is True
        loss_is_finite = not found_inf or self.loss_is_finite()
        self.state = next_state(
            before, found_inf=found_inf, loss_is_finite=loss_is_finite, went_bad=went_bad is True
        )
        self.is_quiet = before.skipped_in_a_row == self.state.skipped_in_a_row == 0
        self._show()
        self.forget_losses()

    def _follow(self) -> None:
        """Let the state follow what was written in place, and the device."""
        if self.is_created and (scale := self.tensor.item()) != self._state.scale:
            self.state = self.state.with_scale(scale)
        self._follow_tracker()

    def _follow_tracker(self) -> None:
        """Let the state follow what was written into the growth tracker."""
        if self._growth_tracker is not None:
            count = int(self._growth_tracker.item())
            if count != self._state.growth_tracker:
                self.state = changed(self.state, growth_tracker=count)

    def _show(self) -> None:
        """Write the state to the device, as far as it differs. Sync: none."""
        self.tensor.fill_(self.state.scale)  # backward of a loss from before must raise
        if self._growth_tracker is not None:
            self._growth_tracker.fill_(self.state.growth_tracker)

    # --- setting ----------------------------------------------------------------------------------

    def load(self, state: ScaleState) -> None:
        """Load a state, in place on the device. Sync: one if updates are under way."""
        schedule, count = state.schedule, state.growth_tracker
        self.first = replace(self.first, schedule=schedule, growth_tracker=count)
        self._take(state)
        self.forget_losses()

    def set_schedule(self, schedule: Schedule) -> None:
        """Use another schedule from now on. Sync: one if updates are under way."""
        self.first = replace(self.first, schedule=schedule)
        self._follow()
        self._take(replace(self.state, schedule=schedule))

    def set(self, new_scale: object) -> None:
        """Set the scale to a number or to a 1-element tensor. Sync: one for a tensor elsewhere."""
        if isinstance(new_scale, Tensor):
            scale = self._checked_tensor(new_scale)
        else:
            scale = checked_scale("new_scale", new_scale)
        if SMALLEST_SCALE <= scale <= LARGEST_SCALE:
            self._follow_tracker()
            self._take(self.state.with_scale(scale))
        else:
            increment_version((self.tensor,))  # for losses from before
        self.forget_losses()

    def _checked_tensor(self, new_scale: Tensor) -> float:
        if new_scale.is_complex() or new_scale.dtype == torch.bool:
            raise TypeError(f"new_scale is {describe(new_scale)}: pass a real tensor")
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise ValueError(
                f"new_scale is {describe(new_scale)} with "
                f"requires_grad={new_scale.requires_grad}: pass a number or a tensor with one "
                "element that requires no gradient (tensor.detach())"
            )
        if not self.is_created:
            raise CallOrderError(
                "update(new_scale=tensor) before scale(): the scale is not on any device yet. Pass "
                "a number, or scale a loss first"
            )
        return new_scale.reshape(()).float().item()

    def _take(self, state: ScaleState) -> None:
        """Take a state, and write it over whatever is on the device."""
        self.state = state
        if self.is_created:
            self.state = _with_valid_tracker(state)
            self._show()


def _with_valid_tracker(state: ScaleState) -> ScaleState:
    """Clamp a count that exceeds a lowered interval, so that the next step grows the scale."""
    last = state.schedule.growth_interval - 1
    return changed(state, growth_tracker=last) if state.growth_tracker > last else state
