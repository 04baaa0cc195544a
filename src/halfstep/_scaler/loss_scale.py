"""The scale of the losses, its transitions, and its form in a checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from halfstep._pytorch.compiler import keep_out_of_graphs
from halfstep._pytorch.modes import is_inside_functorch
from halfstep._scaler.earlier_norms import NormLimits
from halfstep._scaler.rules import Rule
from halfstep._scaler.scalars import (
    READABLE,
    Scalar,
    any_of,
    as_tensor,
    checked_scale,
    describe,
    is_nonfinite,
    is_readable,
    moved,
)
from halfstep._scaler.scale_state import ScaleState
from halfstep._scaler.transition import (
    CPU,
    DeviceSnapshot,
    DeviceState,
    HostCopy,
    HostState,
)
from halfstep.errors import CallOrderError

Snapshot: TypeAlias = ScaleState | DeviceSnapshot
"""A copy of the state at one point in time."""


def state_of(snapshot: Snapshot, rule: ScaleState) -> ScaleState:
    """Return the state in a snapshot; ``rule`` supplies the rule of a device's. Sync: one."""
    return snapshot if isinstance(snapshot, ScaleState) else snapshot.read(rule)


class LossScale:
    """The scale of the losses, with its state.

    Attributes:
        first: The initial state, with the current rule.
        host: The state as last set. It holds the current rule; once ``live`` exists, the values
            that change from step to step are there.
        live: The current state, on ``device``, the device of the first loss.
        can_amplify: Whether unscaling may multiply by more than 1.
        is_quiet: Whether it is known that neither this iteration nor the previous one was skipped.
    """

    def __init__(self, state: ScaleState) -> None:
        self.first = self.host = state
        self.live: HostState | DeviceState | None = None
        self.device = CPU
        self.can_amplify = state.can_amplify
        self.is_quiet = False
        self._arriving: HostCopy | None = None
        self._settled_loss: Tensor | None = None
        self._is_shared = False

    @property
    def tensor(self) -> Tensor:
        """The scale, a float32 scalar on its device; requires :meth:`create`."""
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
        """Return a loss multiplied by the scale, and record whether it is finite. Sync: none.

        Finiteness is not checked inside ``torch.func.grad`` or ``vmap``. A float16 tensor with
        dimensions becomes float32, since 1.0 * 65536 is inf in float16; otherwise PyTorch's usual
        type promotion with a float32 scalar applies. ``is_traced``: whether torch.compile is
        tracing.
        """
        if self.live is None:
            self.create(loss.device)
        live = self.live
        assert live is not None
        # torch.compile cannot trace is_readable(), nor is_inside_functorch() under torch.func.grad.
        if is_traced:
            live.see_loss_(loss)
        elif is_readable(loss):
            number = loss.item()
            if number - number != 0.0:
                self.mark_loss_bad()
        elif not is_inside_functorch(loss):
            live.see_loss_(loss)
        scale = live.traced_scale() if is_traced else live.scale
        if scale.device != loss.device:
            scale = moved(scale, loss.device)
        if loss.dtype == torch.float16 and loss.dim() > 0:
            # In type promotion the dtype of a tensor with dimensions wins over that of a scalar.
            loss = loss.float()
        return loss * scale

    def mark_loss_bad(self) -> None:
        """Record that a loss was not finite. Sync: none."""
        assert self.live is not None
        self.live.bad_loss.fill_(torch.nan)

    def take_bad_loss(self) -> Tensor:
        """Return 1 if a loss since the last ``update`` was not finite, else 0; clear the flag."""
        assert self.live is not None
        is_bad = is_nonfinite(self.live.bad_loss)
        self.forget_bad_loss()
        return is_bad

    def forget_bad_loss(self) -> None:
        """Clear the flag for non-finite losses since the last ``update``. Sync: none."""
        self._settled_loss = None
        if self.live is not None:
            self.live.bad_loss.zero_()

    def settle_loss(self, is_bad: Tensor | None) -> None:
        """Replace this rank's flag for non-finite losses by that of all ranks. Sync: none.

        ``is_bad``: a bool scalar, whether any loss was not finite; None if the ranks did not
        exchange it, in which case no loss counts.
        """
        assert self.live is not None
        settled = torch.zeros_like(self.live.bad_loss)
        if is_bad is not None:
            settled = torch.where(is_bad, torch.nan, settled)
        if self._settled_loss is not None:  # An earlier flag of this iteration counts too.
            settled = settled + self._settled_loss
        self._settled_loss, self._is_shared = settled, True
        self.forget_later_losses()

    def forget_later_losses(self) -> None:
        """Drop the flag of losses that came after the ranks agreed: only this rank knows them."""
        if self._settled_loss is not None:
            assert self.live is not None
            self.live.bad_loss.copy_(self._settled_loss)

    def value(self) -> float:
        """Return the scale. Sync: one."""
        return self.host.scale if self.live is None else self.live.scale.item()

    def number(self) -> Scalar:
        """Return the scale as a number or tensor for calculations. Sync: none."""
        live = self.live
        assert live is not None
        if not isinstance(live, HostState):
            return live.scale.clone()  # update() changes the tensor in place
        scale = live.scale.item()
        if scale != live.now.scale or live.has_count:  # existing code may write in place
            live.follow_writes_()
            self.can_amplify |= live.now.can_amplify
        return scale

    def read(self) -> ScaleState:
        """Return the whole state. Sync: one."""
        if self.live is None:
            return self.host
        if isinstance(self.live, HostState):
            self.number()  # picks up in-place writes
            return self.live.now
        return self.live.read(self.host)

    def load(self, state: ScaleState) -> None:
        """Load a state, in place on the device. Sync: none."""
        rule = state.rule
        self.first = replace(self.first, rule=rule, hysteresis_left=rule.hysteresis)
        self.host = state
        self.can_amplify = state.can_amplify
        if self.live is not None:
            self.live.write_(state)

    def set_rule(self, rule: Rule) -> None:
        """Use another rule from now on. Sync: none."""
        self.first = replace(self.first, rule=rule)
        self.host = replace(self.host, rule=rule)
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

    def update(self, found_inf: list[Tensor], outliers: list[Scalar]) -> None:
        """Back off, count or grow the scale after an iteration. Sync: none."""
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
        )
        if not torch.compiler.is_compiling():
            assert self._arriving is not None
            self._arriving.send(live.buffer)

    def snapshot(self) -> Snapshot:
        """Return a copy of the current state. Sync: none."""
        assert self.live is not None
        return self.live.now if isinstance(self.live, HostState) else self.live.snapshot()

    def arrived(self, *, at_once: bool = False) -> Snapshot | None:
        """Return the newest state on the host; ``at_once`` syncs if several ranks share it."""
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


# --- a checkpoint ---------------------------------------------------------------------------------

OURS = "halfstep"
"""Key of the state that torch.amp does not have, stored as JSON text.

It is text because torch.distributed.checkpoint flattens a dict and loads only the keys that the
loading scaler already has: the limits of norms would be lost silently.
"""


@dataclass(frozen=True)
class Saved:
    """The content of a checkpoint: the state of the scale, and the norm limits."""

    scale: ScaleState
    norm_limits: NormLimits

    def to_dict(self) -> dict[str, Any]:
        """Return a dict that json and ``torch.load(weights_only=True)`` can handle."""
        result = self.scale.to_dict()
        ours = result[OURS] | {"norm_limits": self.norm_limits.to_dict()}
        return result | {OURS: json.dumps(ours, sort_keys=True)}

    @classmethod
    def from_dict(cls, saved: Mapping[str, Any], first: ScaleState) -> Saved:
        """Load the result of :meth:`to_dict` or of torch.amp; ``first`` supplies missing values.

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
        norm_limits = ours.pop("norm_limits", None)
        scale = ScaleState.from_dict(dict(saved) | ({OURS: ours} if ours else {}), first)
        try:
            return cls(scale, NormLimits.from_dict(norm_limits))
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(
                f"the saved scaler state cannot be used: 'norm_limits' under {OURS!r} is damaged "
                f"({error!r}). Delete this key to go on without it"
            ) from error
