"""The scale of every loss: its state, and losses multiplied by it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.modes import is_inside_functorch
from halfstep._scaler.checks import LARGEST_SCALE, SMALLEST_SCALE, checked_scale, float32_bits
from halfstep._scaler.device_state import DeviceSnapshot, DeviceState
from halfstep._scaler.host_copy import HostCopy
from halfstep._scaler.rules import LogMax, Rule
from halfstep._scaler.scalars import (
    READABLE,
    Scalar,
    any_of,
    as_tensor,
    describe,
    is_nonfinite,
    moved,
    zero_if_finite,
)
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.transition import changed, next_state
from halfstep.errors import CallOrderError

CPU = torch.device("cpu")


class HostState:
    """The changing part of a scale state on the CPU, where numbers are read without waiting.

    It moves by :func:`halfstep._scaler.transition.next_state` itself; ``DeviceState`` is its
    counterpart on other devices.

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
            self.scale = torch.zeros((), dtype=torch.float32, device=CPU)
            self.bad_loss = torch.zeros((), dtype=torch.float32, device=CPU)
        self.now: ScaleState
        self.write_(state)

    @property
    def loss_is_finite(self) -> bool:
        """Whether the losses of this iteration were finite."""
        return self.bad_loss.item() == 0.0

    @property
    def growth_tracker(self) -> Tensor:
        """The count of steps in a row, an int32 scalar; a copy."""
        return torch.tensor(self.now.growth_tracker, dtype=torch.int32, device=CPU)

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
        else:
            self.scale.fill_(self.now.scale)  # a change all the same, for losses from before
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
        return torch.tensor(counts, dtype=torch.int32, device=CPU)


def _with_valid_tracker(state: ScaleState) -> ScaleState:
    """Let a count that is already past a lowered interval grow the scale at the next step."""
    last = state.growth_interval - 1
    return changed(state, growth_tracker=last) if state.growth_tracker > last else state


Snapshot: TypeAlias = ScaleState | DeviceSnapshot
"""A state as it once was."""


def state_of(snapshot: Snapshot, rule: ScaleState) -> ScaleState:
    """Return the state of a snapshot; ``rule`` gives the rule of one on a device. Sync: one."""
    return snapshot if isinstance(snapshot, ScaleState) else snapshot.read(rule)


class LossScale:
    """The scale of one loss, and how it moves.

    Args:
        state: What it starts from.

    Attributes:
        host: The state as it was set last. Its rule is the rule; what changes from step to step is
            in ``live`` once there is one.
        live: The present state, where the first loss was.
        device: Where that is, and where steps are decided.
        can_amplify: Whether unscaling may multiply by more than 1.
        wants_amax: Whether the rule wants to know the largest magnitude of the gradients.
        is_quiet: Whether it is known that neither this iteration nor the last was skipped.
    """

    def __init__(self, state: ScaleState) -> None:
        self.host = state
        self.live: HostState | DeviceState | None = None
        self.device = CPU
        self.can_amplify = state.can_amplify
        self.wants_amax = isinstance(state.rule, LogMax)
        self.is_quiet = False
        self._arriving: HostCopy | None = None
        self._settled_loss: Tensor | None = None
        self._is_shared = False

    @property
    def tensor(self) -> Tensor:
        """The scale, a float32 scalar on its device; only after :meth:`create`."""
        assert self.live is not None
        return self.live.scale

    @keep_out_of_graphs
    def create(self, device: torch.device) -> None:
        """Move the state to a device. Sync: none."""
        self.device = device
        if device.type in READABLE:
            self.live = HostState(self.host)
        else:
            self.live, self._arriving = DeviceState(self.host, device), HostCopy()

    def multiply(self, loss: Tensor, *, is_traced: bool = False) -> Tensor:
        """Return a loss multiplied by the scale; remember whether it is finite. Sync: none.

        It is not looked at inside ``torch.func.grad`` or ``vmap``. A float16 tensor with dimensions
        becomes float32, since 1.0 * 65536 is inf in float16; otherwise PyTorch's usual type
        promotion with a float32 scalar applies.

        Args:
            loss: A tensor on any device.
            is_traced: Whether torch.compile traces.
        """
        if self.live is None:
            self.create(loss.device)
        live = self.live
        assert live is not None
        # torch.compile cannot trace the question, and not torch.func.grad around it either.
        if is_traced or not is_inside_functorch(loss):
            live.see_loss_(loss)
        scale = live.traced_scale() if is_traced else live.scale
        if scale.device != loss.device:
            scale = moved(scale, loss.device)
        if loss.dtype == torch.float16 and loss.dim() > 0:
            # Type promotion lets the dtype of a tensor with dimensions win over that of a scalar.
            loss = loss.float()
        return loss * scale

    def mark_loss_bad(self) -> None:
        """Remember that a loss was not finite. Sync: none."""
        assert self.live is not None
        self.live.bad_loss.fill_(torch.nan)

    def take_bad_loss(self) -> Tensor:
        """Return 1 if a loss since the last ``update`` was not finite, else 0, and forget it."""
        assert self.live is not None
        is_bad = is_nonfinite(self.live.bad_loss)
        self.forget_bad_loss()
        return is_bad

    def forget_bad_loss(self) -> None:
        """Forget whether a loss since the last ``update`` was not finite. Sync: none."""
        self._settled_loss = None
        if self.live is not None:
            self.live.bad_loss.zero_()

    def settle_loss(self, is_bad: Tensor | None) -> None:
        """Let the losses of all ranks count, and not what this one has seen. Sync: none.

        Args:
            is_bad: bool scalar, whether the loss of some rank was not finite; None if they have
                not told each other: then none counts.
        """
        assert self.live is not None
        settled = torch.zeros_like(self.live.bad_loss)
        if is_bad is not None:
            settled = torch.where(is_bad, torch.nan, settled)
        if self._settled_loss is not None:  # an earlier one of this iteration counts as well
            settled = settled + self._settled_loss
        self._settled_loss, self._is_shared = settled, True
        self.forget_later_losses()

    def forget_later_losses(self) -> None:
        """Forget losses that this rank alone knows of, having come after the others were told."""
        if self._settled_loss is not None:
            assert self.live is not None
            self.live.bad_loss.copy_(self._settled_loss)

    def value(self) -> float:
        """Return the scale. Sync: one."""
        return self.host.scale if self.live is None else self.live.scale.item()

    def number(self) -> Scalar:
        """Return the scale as it is now, to calculate with. Sync: none."""
        live = self.live
        assert live is not None
        if not isinstance(live, HostState):
            return live.scale.clone()  # update() changes the tensor in place
        scale = live.scale.item()
        if scale != live.now.scale:  # existing code writes to scaler._scale in place
            live.now = changed(live.now, scale=scale)
        return scale

    def read(self) -> ScaleState:
        """Return the whole state. Sync: one."""
        if self.live is None:
            return self.host
        if isinstance(self.live, HostState):
            self.number()  # sees what was written in place
            return self.live.now
        return self.live.read(self.host)

    def load(self, state: ScaleState) -> None:
        """Take over a state, in place on the device. Sync: none."""
        self.host = state
        self.can_amplify = state.can_amplify
        self.wants_amax = isinstance(state.rule, LogMax)
        if self.live is not None:
            self.live.write_(state)

    def set_rule(self, rule: Rule) -> None:
        """Move by another rule from now on. Sync: none."""
        self.host = replace(self.host, rule=rule)
        self.wants_amax = isinstance(rule, LogMax)
        if self.live is not None:
            self.live.set_rule_(rule)

    def set(self, new_scale: object) -> None:
        """Set the scale to a number or to a 1-element tensor. Sync: none."""
        if isinstance(new_scale, Tensor):
            self._set_from_tensor(new_scale)
        else:
            self.host = self.host.with_scale(checked_scale("new_scale", new_scale))
            self.can_amplify |= self.host.can_amplify
            if self.live is not None:
                self.live.fill_(self.host.scale)
        self.forget_bad_loss()

    def update(self, found_inf: list[Tensor], outliers: list[Scalar], amaxes: list[Tensor]) -> None:
        """Back off, count or grow after an iteration. Sync: none."""
        live = self.live
        if self._settled_loss is not None:
            self.forget_later_losses()
            self._settled_loss = None
        if isinstance(live, HostState):
            found = False
            for flag in found_inf:
                found |= flag.item() != 0.0
            skipped_before = live.now.skipped_in_a_row
            live.update_(
                found,
                any(outlier != 0.0 for outlier in outliers) if outliers else False,
                torch.stack(amaxes).amax().item() if amaxes else None,
            )
            self.is_quiet = skipped_before == live.now.skipped_in_a_row == 0
            return
        assert live is not None
        device = live.device
        live.update_(
            any_of(found_inf, device),
            self.host,
            outlier=any_of([as_tensor(each, device) for each in outliers], device)
            if outliers
            else None,
            amax=torch.stack([moved(amax, device) for amax in amaxes]).amax() if amaxes else None,
        )
        if not torch.compiler.is_compiling():
            assert self._arriving is not None
            self._arriving.send(live.buffer)

    def snapshot(self) -> Snapshot:
        """Return a copy of the present state. Sync: none."""
        assert self.live is not None
        return self.live.now if isinstance(self.live, HostState) else self.live.snapshot()

    def arrived(self, *, at_once: bool = False) -> Snapshot | None:
        """Return the newest state after an update that has come to the host.

        Sync: none; one if several ranks have to see the same ``at_once``.
        """
        if isinstance(self.live, HostState):
            return self.live.now
        if self._arriving is None:
            return None
        values = self._arriving.latest(wait=at_once and self._is_shared)
        return None if values is None else DeviceSnapshot(values)

    def _set_from_tensor(self, new_scale: Tensor) -> None:
        if new_scale.is_complex() or new_scale.dtype == torch.bool:
            raise TypeError(f"new_scale is {describe(new_scale)}: pass a real tensor")
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise ValueError(
                f"new_scale is {describe(new_scale)} with "
                f"requires_grad={new_scale.requires_grad}: pass a number or a tensor with one "
                "element that requires no gradient (tensor.detach())"
            )
        if self.live is None:
            raise CallOrderError(
                "update(new_scale=tensor) before scale(): the scale is not on any device yet. Pass "
                "a number, or scale a loss first"
            )
        self.can_amplify = True
        self.live.copy_(new_scale)


class Scales(dict[str | None, LossScale]):
    """The scales of all losses by name; that of losses without a name, None, is always there.

    Args:
        first: The state that the scale of every loss starts from.
    """

    def __init__(self, first: ScaleState) -> None:
        super().__init__({None: LossScale(first)})
        self.first = first

    def forget_bad_losses(self) -> None:
        """Forget which losses were not finite. Sync: none."""
        for scale in self.values():
            scale.forget_bad_loss()

    def device_type(self) -> str | None:
        """Return the type of the device that the first loss came from, None before it."""
        for scale in self.values():
            if scale.live is not None:
                return scale.live.device.type
        return None

    def set_first(self, scale: object) -> None:
        """Set the scale that every loss starts from, before there is one. Sync: none."""
        self[None].set(scale)
        self.first = self.first.with_scale(self[None].host.scale)

    def set_rule(self, rule: Rule) -> None:
        """Move all scales by another rule. Sync: none."""
        self.first = replace(self.first, rule=rule)
        for scale in self.values():
            scale.set_rule(rule)

    def read(self) -> dict[str | None, ScaleState]:
        """Return the states of all. Sync: one for each."""
        return {loss: scale.read() for loss, scale in self.items()}

    def load(self, states: Mapping[str | None, ScaleState]) -> None:
        """Take over what :meth:`read` returned. Sync: none."""
        rule = states[None].rule
        self.first = replace(self.first, rule=rule, hysteresis_left=rule.hysteresis)
        for loss in self.keys() - states.keys():
            del self[loss]
        for loss, state in states.items():
            self.setdefault(loss, LossScale(state)).load(state)


def for_each(function: Callable[[Tensor], Tensor], outputs: Any, where: str = "outputs") -> Any:
    """Return ``outputs`` with every tensor in it replaced.

    Args:
        function: What a tensor is replaced by.
        outputs: A tensor, or a (nested) list, tuple, named tuple, mapping or other iterable.
        where: The name of ``outputs`` in an error message.

    Returns:
        Lists, tuples, named tuples and mappings keep their type, other iterables become lists.

    Raises:
        TypeError: Something in it is not a tensor; the message says where it is.
    """
    if isinstance(outputs, Tensor):
        return function(outputs)
    if isinstance(outputs, Mapping):
        items = {key: for_each(function, v, f"{where}[{key!r}]") for key, v in outputs.items()}
        return _like(outputs, items) if isinstance(outputs, MutableMapping) else items
    if isinstance(outputs, str | bytes) or not isinstance(outputs, Iterable):
        raise TypeError(
            f"{where} is {_shortly(outputs)} ({type(outputs).__name__}): scale() takes a "
            "tensor, or a list, tuple, mapping or other iterable of tensors"
        )
    values = [for_each(function, v, f"{where}[{index}]") for index, v in enumerate(outputs)]
    if isinstance(outputs, tuple) and hasattr(outputs, "_fields"):
        return type(outputs)(*values)
    return type(outputs)(values) if isinstance(outputs, list | tuple) else values


def _like(mapping: MutableMapping[Any, Any], items: dict[Any, Any]) -> MutableMapping[Any, Any]:
    # A copy keeps what the class adds: the factory of a defaultdict, the attributes of a
    # transformers ModelOutput.
    result = copy.copy(mapping)
    for key, item in items.items():
        result[key] = item
    return result


def tensors_in(scaled: Any) -> Iterator[Tensor]:
    """Yield all tensors in what :func:`for_each` has returned."""
    if isinstance(scaled, Tensor):
        yield scaled
        return
    for item in scaled.values() if isinstance(scaled, Mapping) else scaled:
        yield from tensors_in(item)


def _shortly(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."
