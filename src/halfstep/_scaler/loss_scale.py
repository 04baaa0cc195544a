"""The scale of the losses: its state, its number on a device, and its form in a checkpoint.

The side that knows the flags moves the scale. On the CPU, and in a plain step, which reads its flag
before the optimizer steps, that is the host: the state moves there, and the number on the device is
written if it changes. In a fused step it is the device: PyTorch's kernel and a floor move the
number, and the state follows ``LAG`` updates later, when the flags have arrived. The delay is
fixed, so that runs are reproducible and all ranks agree.
"""

from __future__ import annotations

import json
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep._gradients.scalars import (
    CPU,
    LARGEST_SCALE,
    READABLE,
    SMALLEST_SCALE,
    Scalar,
    any_of,
    checked_scale,
    describe,
    float32_bits,
    is_nonfinite,
    is_readable,
    zero_if_finite,
)
from halfstep._pytorch.amp import increment_version
from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.devices import is_capturing, to_device
from halfstep._pytorch.modes import is_inside_functorch
from halfstep._scaler.scale_state import ScaleState, changed, counted, next_state, num_calm
from halfstep._scaler.schedules import Schedule
from halfstep._scaler.updates import LAG, Kernel, Number, PendingUpdate
from halfstep.errors import CallOrderError

Snapshot: TypeAlias = ScaleState | PendingUpdate | tuple[ScaleState, int]
"""The state at one point in time; or the last update before it; or a state and the number of calm
steps since."""


def state_of(snapshot: Snapshot) -> ScaleState:
    """Return the state in a snapshot. Sync: one if it is on its way."""
    if isinstance(snapshot, tuple):
        return counted(*snapshot)
    return snapshot if isinstance(snapshot, ScaleState) else snapshot.states()[1]


class LossScale:
    """The scale of the losses, with its state.

    Attributes:
        first: The initial state, with the current schedule.
        device: The device of the number, that of the first loss.
        is_created: Whether there is a number on a device.
        is_quiet: Whether it is known that neither of the last two updates was skipped.
        bad_loss: NaN if a loss of this iteration was not finite, else 0; if ``has_loss``.
        has_loss: Whether ``bad_loss`` belongs to this iteration.
    """

    bad_loss: Tensor
    _state: ScaleState
    _num_counted: int  # taken steps since that state
    _num_calm: int | None  # steps from now on that only count; None if not known

    def __init__(self, state: ScaleState) -> None:
        self.first = self.state = state
        self._number: Number
        self.device = CPU
        self.is_created = self.is_quiet = self.has_loss = False
        self._tensor: Tensor
        self._growth_tracker: Tensor | None = None  # once a kernel or existing code has asked
        self._versions: list[int] = []  # of the tensors when they were known last
        self._is_captured = False  # whether a CUDA graph moves it, which the host does not see
        self._under_way: deque[PendingUpdate] = deque()
        self._loss_is_finite: bool | None = None  # as far as a step has read it
        self._agreed_loss: Tensor | None = None

    @property
    def state(self) -> ScaleState:
        """The state after the newest update whose flags are known on the host."""
        if self._num_counted:
            self._state = counted(self._state, self._num_counted)
            self._number = Number(self._number.scale, self._state.growth_tracker)
            self._num_counted = 0
        return self._state

    @state.setter
    def state(self, state: ScaleState) -> None:
        self._state, self._num_counted = state, 0
        self._num_calm = None

    @property
    def tensor(self) -> Tensor:
        """The scale, a float32 scalar on its device, which never moves."""
        return self._tensor

    @property
    def growth_tracker(self) -> Tensor:
        """The count of consecutive steps, an int32 scalar on the device."""
        if self._growth_tracker is None:
            self.state  # noqa: B018  # the counted steps
            count = self._number.growth_tracker
            with torch.inference_mode(False):
                self._growth_tracker = torch.full((), count, dtype=torch.int32, device=self.device)
            if self._versions:
                self._versions.append(self._growth_tracker._version)
        return self._growth_tracker

    @property
    def can_amplify(self) -> bool:
        """Whether unscaling may multiply by more than 1."""
        if torch.compiler.is_compiling():  # a graph must hold for every scale
            return self.state.min_scale < 1.0
        if self.state.can_amplify or self.device.type in READABLE or not self.is_created:
            return self.state.can_amplify
        return self._is_written()

    @keep_out_of_graphs
    def create(self, device: torch.device) -> None:
        """Put the number on a device. Sync: none."""
        self.state = _with_valid_tracker(self.state)
        self.device, self.is_created = device, True
        # The first loss may come in inference mode, and the next one from training.
        with torch.inference_mode(False):
            number = torch.tensor(self.state.scale, dtype=torch.float32, device="cpu")
            self._tensor = to_device(number, device) if device.type not in READABLE else number
            self.bad_loss = torch.zeros_like(self._tensor)
        self._number = Number(self.state.scale, self.state.growth_tracker)
        self._versions = self._versions_now()

    # --- losses -----------------------------------------------------------------------------------

    def multiply(self, loss: Tensor, *, is_traced: bool = False) -> Tensor:
        """Return a loss multiplied by the scale, and record whether it is finite. Sync: none.

        Finiteness is not checked inside ``torch.func.grad`` or ``vmap``. A float16 tensor with
        dimensions becomes float32, since 1.0 * 65536 is inf in float16; otherwise PyTorch's usual
        type promotion with a float32 scalar applies. ``is_traced``: whether torch.compile is
        tracing.
        """
        if not self.is_created:
            self.create(loss.device)
        # torch.compile cannot trace is_readable(), nor is_inside_functorch() under torch.func.grad.
        if is_traced:
            self.see_loss(loss)
        elif is_readable(loss):
            number = loss.item()
            if number - number != 0.0:
                self.mark_loss_bad()
        elif not is_inside_functorch(loss):
            self.see_loss(loss)
        # Inductor of 2.13 removes a clone(), and the backward pass would then see a later scale. It
        # keeps abs(), which also copies: the scale is positive.
        scale = self._tensor.abs() if is_traced else self._tensor
        if scale.device != loss.device:
            scale = to_device(scale, loss.device)
        if loss.dtype == torch.float16 and loss.dim() > 0:
            # In type promotion the dtype of a tensor with dimensions wins over that of a scalar.
            loss = loss.float()
        return loss * scale

    @torch.no_grad()
    def see_loss(self, loss: Tensor) -> None:
        """Record whether all entries of a loss are finite, until the next update. Sync: none."""
        zero = zero_if_finite(loss)
        if zero is None:
            return
        zero = to_device(zero.float(), self.device)
        self._loss_is_finite = None
        if torch.compiler.is_compiling():  # a graph cannot leave a tensor of its own behind
            self.bad_loss.copy_(self.bad_loss + zero if self.has_loss else zero)
        else:
            self.bad_loss = self.bad_loss + zero if self.has_loss else zero
        self.has_loss = True

    def mark_loss_bad(self) -> None:
        """Record that a loss was not finite. Sync: none."""
        self.bad_loss = torch.full_like(self._tensor, torch.nan)
        self.has_loss, self._loss_is_finite = True, False

    def loss_is_finite(self) -> bool:
        """Return whether all losses of this iteration were finite. Sync: one unless it is known."""
        if self._loss_is_finite is None:
            self._loss_is_finite = not self.has_loss or self.bad_loss.item() == 0.0
        return self._loss_is_finite

    def note_number(self, scale: float) -> None:
        """Note what a step has read in ``tensor``, which existing code may have written."""
        if not self._under_way and scale != self._number.scale:
            self.state = self.state.with_scale(scale)
            self._number = self._number._replace(scale=scale)

    def note_loss(self, is_finite: bool) -> None:
        """Note what a step has read in ``bad_loss``."""
        self._loss_is_finite = is_finite

    def loss_flag(self) -> Tensor:
        """Return 1 if a loss of this iteration was not finite, else 0, on the device."""
        return is_nonfinite(self.bad_loss) if self.has_loss else torch.zeros_like(self.bad_loss)

    def forget_losses(self) -> None:
        """Forget whether losses since the last update were finite. Sync: none."""
        self._agreed_loss = self._loss_is_finite = None
        self.has_loss = False

    def agree_on_loss(self, is_bad: Tensor | None) -> None:
        """Replace this rank's flag for non-finite losses by that of all ranks. Sync: none.

        ``is_bad``: a bool scalar, whether any loss was not finite; None if the ranks did not
        exchange it, in which case no loss counts.
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
        return self._tensor.item() if self.is_created else self.state.scale

    def number(self) -> Scalar:
        """Return the scale as a number or tensor for calculations. Sync: none."""
        if self.device.type not in READABLE:
            return self._tensor.clone()  # update() changes the tensor in place
        self._follow_writes()
        return self._number.scale

    def read(self) -> ScaleState:
        """Return the whole state. Sync: one on an accelerator."""
        if not self.is_created:
            return self.state
        if not self._under_way:
            self.note_number(self._tensor.item())
            self._follow_writes()
            return self.state
        _, state, number = self._after(self._under_way[-1])
        scale = self._tensor.item()
        return state if scale == number.scale else state.with_scale(scale)

    def snapshot(self) -> Snapshot:
        """Return the current state, to be read later. Sync: none."""
        if self._under_way:
            return self._under_way[-1]
        return (self._state, self._num_counted) if self._num_counted else self._state

    def states_of(self, update: PendingUpdate) -> tuple[ScaleState, ScaleState]:
        """Return the states before and after an update that is under way. Sync: one."""
        return self._after(update)[:2]

    def _after(self, update: PendingUpdate) -> tuple[ScaleState, ScaleState, Number]:
        """Return what :func:`_followed` does for an update that is under way. Sync: one."""
        before = state = self.state
        number = self._number
        for each in self._under_way:
            before, state, number = _followed(state, number, each)
            if each is update:
                break
        return before, state, number

    def counters(self) -> list[int]:
        """Return scale (its bits), growth tracker, steps taken and skipped. Sync: none."""
        state = self.state
        return [
            float32_bits(state.scale),
            state.growth_tracker,
            state.num_taken,
            state.num_skipped,
        ]

    def _is_written(self) -> bool:
        """Return whether existing code, or a CUDA graph, may have written the tensors."""
        is_here = self.device.type in READABLE
        return is_here or self._is_captured or self._versions != self._versions_now()

    def _versions_now(self) -> list[int]:
        if self.device.type in READABLE:  # values are compared there
            return []
        tensors = [self._tensor, self._growth_tracker]
        return [tensor._version for tensor in tensors if tensor is not None]

    def _follow_writes(self) -> None:
        """Take over what was written into the tensors in place. Sync: two if there may be any."""
        if self._growth_tracker is None and self.device.type in READABLE:
            self.note_number(self._tensor.item())
        elif self._is_written():
            self.note_number(self._tensor.item())
            self._follow_tracker()
            self._versions = self._versions_now()

    def _follow_tracker(self) -> None:
        if self._growth_tracker is not None and self._is_written():
            count = int(self._growth_tracker.item())
            if count != self._number.growth_tracker:
                self.state = changed(self.state, growth_tracker=count)
                self._number = self._number._replace(growth_tracker=count)

    # --- moving -----------------------------------------------------------------------------------

    def update(self, found_inf: bool | list[Tensor], went_bad: bool | list[Tensor] = False) -> None:
        """Back off, count or grow the scale after an iteration. Sync: none.

        Args:
            found_inf: Whether a gradient was inf or NaN, if the host knows; else the flags.
            went_bad: The same of gradients that were finite when they were unscaled.
        """
        self.forget_later_losses()
        if isinstance(found_inf, bool):
            self._move(found_inf, went_bad is True)
        else:
            self._launch(found_inf, went_bad or [])  # type: ignore[arg-type]
        self.forget_losses()

    def calm_number(self) -> float | None:
        """Return the scale, if a taken step from now on does nothing but count; else None.

        Nor may unscaling amplify then. Sync: none.
        """
        if self._num_calm is None:
            is_here = self.is_created and self.device.type in READABLE
            is_calm = is_here and not self.state.can_amplify
            self._num_calm = num_calm(self.state) if is_calm else 0
        if self._num_calm <= 0 or self._growth_tracker is not None:
            return None
        scale = self._number.scale
        return scale if self._tensor.item() == scale else None

    def count(self) -> bool:
        """Count a taken step, if it does nothing else; return whether it was. Sync: none.

        The state is made when it is read.
        """
        if self.calm_number() is None:
            return False
        self._num_counted += 1
        self._num_calm -= 1  # type: ignore[operator]
        self.is_quiet = True
        increment_version((self._tensor,))  # backward of a loss from before must raise
        self.forget_losses()
        return True

    def _move(self, found_inf: bool, went_bad: bool) -> None:
        """Move on the host, which knows the flags."""
        if not (found_inf or went_bad) and self.count():
            return
        if self._under_way:
            self.follow_device()
        self._follow_writes()
        before = self.state
        loss_is_finite = not found_inf or self.loss_is_finite()
        self.state = next_state(
            before, found_inf=found_inf, loss_is_finite=loss_is_finite, went_bad=went_bad
        )
        self.is_quiet = before.skipped_in_a_row == self.state.skipped_in_a_row == 0
        self._show()

    def _launch(self, flags: list[Tensor], later: list[Tensor]) -> None:
        """Let the device move the scale, and the state follow."""
        values = {"scale": self._tensor, "found_inf": any_of(flags, self.device)}
        if self.has_loss:
            values["bad_loss"] = self.bad_loss
        if later:
            values["went_bad"] = any_of(later, self.device)
        self._is_captured |= is_capturing(self.device)
        kernel = Kernel.of(self.state, self.device, is_captured=self._is_captured)
        if not self._is_captured:
            self._under_way.append(PendingUpdate(self.states_of, values, kernel))
        if kernel is None:
            increment_version((self._tensor,))
        else:
            kernel.move_(self._tensor, self.growth_tracker, values["found_inf"])
        self._versions = self._versions_now()
        for update in self._under_way:
            update.look()
        self.follow_device(most_left=LAG)

    def follow_device(self, most_left: int = 0) -> None:
        """Let the state follow the updates that are under way, but for the newest ones."""
        skipped_before = self.state.skipped_in_a_row
        if len(self._under_way) <= most_left:
            return
        while len(self._under_way) > most_left:
            update = self._under_way.popleft()
            before, self.state, self._number = _followed(self.state, self._number, update)
            update.keep(before, self.state)
        self.is_quiet = skipped_before == self.state.skipped_in_a_row == 0
        if self._number.scale != self.state.scale:
            self._show()
        elif self._under_way:  # the device counts on
            self.state = changed(self.state, growth_tracker=self._number.growth_tracker)

    def _show(self) -> None:
        """Write the state to the device, as far as it differs. Sync: none."""
        state, number = self.state, self._number
        if number.scale != state.scale:
            self._tensor.fill_(state.scale)
            for update in self._under_way:
                update.is_stale = True
        else:  # backward of a loss from before must raise
            increment_version((self._tensor,))
        if self._growth_tracker is not None and number.growth_tracker != state.growth_tracker:
            self._growth_tracker.fill_(state.growth_tracker)
        self._number = Number(state.scale, state.growth_tracker)
        self._versions = self._versions_now()

    # --- setting ----------------------------------------------------------------------------------

    def load(self, state: ScaleState) -> None:
        """Load a state, in place on the device. Sync: one if updates are under way."""
        schedule, count = state.schedule, state.growth_tracker
        self.first = replace(
            self.first, schedule=schedule, hysteresis_left=schedule.hysteresis, growth_tracker=count
        )
        if self.is_created:
            self.follow_device()
        self._take(state)
        self.forget_losses()

    def set_schedule(self, schedule: Schedule) -> None:
        """Use another schedule from now on. Sync: one if updates are under way."""
        self.first = replace(self.first, schedule=schedule)
        if self.is_created:
            self.follow_device()
            self._follow_writes()
        self._take(replace(self.state, schedule=schedule))

    def set(self, new_scale: object) -> None:
        """Set the scale to a number or to a 1-element tensor.

        Sync: none for a number, or a tensor on the CPU.
        """
        if isinstance(new_scale, Tensor):
            scale = self._checked_tensor(new_scale)
            if not SMALLEST_SCALE <= scale <= LARGEST_SCALE:
                increment_version((self._tensor,))  # for losses from before
                self.forget_losses()
                return
        else:
            scale = checked_scale("new_scale", new_scale)
        if self.is_created and not self._under_way:
            self._follow_tracker()
        self._take(self.state.with_scale(scale))
        self.forget_losses()

    def _take(self, state: ScaleState) -> None:
        """Take a state, and write it over whatever is on the device."""
        self.state = state
        if self.is_created:
            self.state = _with_valid_tracker(state)
            if self._under_way or self._is_written():
                self._number = Number(math.nan, -1)  # not known
            self._show()

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


def _followed(
    state: ScaleState, number: Number, update: PendingUpdate
) -> tuple[ScaleState, ScaleState, Number]:
    """Return the states before and after an update on the device, and the number that it left."""
    found = update.found()
    if update.is_stale:
        is_skipped = found.found_inf or found.went_bad
        after = changed(
            state,
            num_taken=state.num_taken + (not is_skipped),
            num_skipped=state.num_skipped + is_skipped,
            skipped_in_a_row=state.skipped_in_a_row + 1 if is_skipped else 0,
        )
        return state, after, number
    if found.scale != number.scale:  # existing code has written it in place
        state, number = state.with_scale(found.scale), number._replace(scale=found.scale)
    after = next_state(
        state,
        found_inf=found.found_inf,
        loss_is_finite=found.loss_is_finite,
        went_bad=found.went_bad,
    )
    if update.kernel is None:
        return state, after, number._replace(growth_tracker=after.growth_tracker)
    return state, after, update.kernel.moved(number, found.found_inf)


def _with_valid_tracker(state: ScaleState) -> ScaleState:
    """Clamp a count that exceeds a lowered interval, so that the next step grows the scale."""
    last = state.schedule.growth_interval - 1
    return changed(state, growth_tracker=last) if state.growth_tracker > last else state


# --- a checkpoint ---------------------------------------------------------------------------------

OURS = "halfstep"
"""Key of the state that torch.amp does not have, stored as JSON text.

It is text because torch.distributed.checkpoint flattens a dict and loads only the keys that the
loading scaler already has: the numbers of another schedule would be lost silently.
"""


def state_dict_of(state: ScaleState) -> dict[str, Any]:
    """Return a dict that json and ``torch.load(weights_only=True)`` can handle."""
    result = state.to_dict()
    return result | {OURS: json.dumps(result[OURS], sort_keys=True)}


def state_from(saved: Mapping[str, Any], first: ScaleState) -> ScaleState:
    """Load the result of :func:`state_dict_of` or of torch.amp; ``first`` supplies missing values.

    Raises:
        ValueError: A key is missing or a value is invalid.
    """
    try:
        ours = dict(json.loads(saved.get(OURS) or "{}"))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"the saved scaler state cannot be used: {OURS!r} is not the JSON text that "
            f"state_dict() has written ({error}). Delete the key to load the five values that "
            "torch.amp knows"
        ) from error
    return ScaleState.from_dict(dict(saved) | ({OURS: ours} if ours else {}), first)
