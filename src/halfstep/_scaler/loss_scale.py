"""The scale of one loss: its state on the host until a device is known, then on the device."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from halfstep._scaler.checks import checked_scale
from halfstep._scaler.device_state import DeviceState, StateSnapshot
from halfstep._scaler.host_copy import HostCopy
from halfstep._scaler.rules import LogMax, Rule
from halfstep._scaler.scalars import any_of, describe, is_nonfinite, moved
from halfstep._scaler.scale_state import ScaleState
from halfstep._torch import is_inside_functorch, keep_out_of_graphs
from halfstep.errors import CallOrderError


class LossScale:
    """A scale and how it moves.

    Args:
        state: What it starts from. The rule is always read from ``host``; what changes from step to
            step only until ``on_device`` exists.
    """

    def __init__(self, state: ScaleState) -> None:
        self.host = state
        self.on_device: DeviceState | None = None
        self.can_amplify = state.can_amplify
        self._arrived = HostCopy()
        self._settled_loss: Tensor | None = None
        self._is_shared = False

    @property
    def wants_amax(self) -> bool:
        """Whether the rule wants to know the largest magnitude of the gradients."""
        return isinstance(self.host.rule, LogMax)

    @property
    def tensor(self) -> Tensor:
        """The scale, a float32 scalar on its device; only after :meth:`create`."""
        assert self.on_device is not None
        return self.on_device.scale

    @keep_out_of_graphs
    def create(self, device: torch.device) -> None:
        """Move the state to a device. Sync: none."""
        self.on_device = DeviceState(self.host, device)

    def see_loss(self, loss: Tensor) -> Tensor:
        """Remember whether the loss is finite; return the scale on its device. Sync: none.

        It is not looked at inside ``torch.func.grad`` or ``vmap``.
        """
        if self.on_device is None:
            self.create(loss.device)
            assert self.on_device is not None
        # torch.compile cannot trace the question, and not torch.func.grad around it either.
        is_inside = not torch.compiler.is_compiling() and is_inside_functorch(loss)
        if not is_inside:
            self.on_device.see_loss_(loss)
        return moved(self.on_device.scale, loss.device)

    def take_bad_loss(self) -> Tensor:
        """Return 1 if a loss since the last ``update`` was not finite, else 0, and forget it."""
        assert self.on_device is not None
        is_bad = is_nonfinite(self.on_device.bad_loss)
        self.forget_bad_loss()
        return is_bad

    def forget_bad_loss(self) -> None:
        """Forget whether a loss since the last ``update`` was not finite. Sync: none."""
        self._settled_loss = None
        if self.on_device is not None:
            self.on_device.bad_loss.zero_()

    def settle_loss(self, is_bad: Tensor | None) -> None:
        """Let the losses of all ranks count, and not what this one has seen. Sync: none.

        Args:
            is_bad: bool scalar, whether the loss of some rank was not finite; None if they have
                not told each other: then none counts.
        """
        assert self.on_device is not None
        settled = torch.zeros_like(self.on_device.bad_loss)
        if is_bad is not None:
            settled = torch.where(is_bad, torch.nan, settled)
        if self._settled_loss is not None:  # an earlier one of this iteration counts as well
            settled = settled + self._settled_loss
        self._settled_loss, self._is_shared = settled, True
        self.forget_later_losses()

    def forget_later_losses(self) -> None:
        """Forget losses that this rank alone knows of, having come after the others were told."""
        if self._settled_loss is not None:
            assert self.on_device is not None
            self.on_device.bad_loss.copy_(self._settled_loss)

    def value(self) -> float:
        """Return the scale. Sync: one."""
        return self.host.scale if self.on_device is None else self.on_device.scale.item()

    def read(self) -> ScaleState:
        """Return the whole state. Sync: one."""
        return self.host if self.on_device is None else self.on_device.read(self.host)

    def load(self, state: ScaleState) -> None:
        """Take over a state, in place on the device. Sync: none."""
        self.host = state
        self.can_amplify = state.can_amplify
        if self.on_device is not None:
            self.on_device.write_(state)

    def set_rule(self, rule: Rule) -> None:
        """Move by another rule from now on. Sync: none."""
        self.host = replace(self.host, rule=rule)
        if self.on_device is not None:
            self.on_device.set_rule_(rule)

    def set(self, new_scale: object) -> None:
        """Set the scale to a number or to a 1-element tensor. Sync: none."""
        if isinstance(new_scale, Tensor):
            self._set_from_tensor(new_scale)
        else:
            self.host = self.host.with_scale(checked_scale("new_scale", new_scale))
            self.can_amplify |= self.host.can_amplify
            if self.on_device is not None:
                self.on_device.fill_(self.host.scale)
        self.forget_bad_loss()

    def update(self, found_inf: list[Tensor], outliers: list[Tensor], amaxes: list[Tensor]) -> None:
        """Back off, count or grow after an iteration. Sync: none."""
        assert self.on_device is not None
        device = self.on_device.device
        self.forget_later_losses()
        self._settled_loss = None
        self.on_device.update_(
            any_of(found_inf, device),
            self.host,
            outlier=any_of(outliers, device) if outliers else None,
            amax=torch.stack([moved(amax, device) for amax in amaxes]).amax() if amaxes else None,
        )

        if not torch.compiler.is_compiling():
            self._arrived.send(self.on_device.buffer)

    def snapshot(self) -> StateSnapshot:
        """Return a copy of the state on the device. Sync: none."""
        assert self.on_device is not None
        return self.on_device.snapshot()

    def arrived(self, *, at_once: bool = False) -> StateSnapshot | None:
        """Return the newest state after an update that has come to the host.

        Sync: none; one if several ranks have to see the same ``at_once``.
        """
        values = self._arrived.latest(wait=at_once and self._is_shared)
        return None if values is None else StateSnapshot(values)

    def _set_from_tensor(self, new_scale: Tensor) -> None:
        if new_scale.is_complex() or new_scale.dtype == torch.bool:
            raise TypeError(f"new_scale is {describe(new_scale)}: pass a real tensor")
        if new_scale.numel() != 1 or new_scale.requires_grad:
            raise ValueError(
                f"new_scale is {describe(new_scale)} with "
                f"requires_grad={new_scale.requires_grad}: pass a number or a tensor with one "
                "element that requires no gradient (tensor.detach())"
            )
        if self.on_device is None:
            raise CallOrderError(
                "update(new_scale=tensor) before scale(): the scale is not on any device yet. Pass "
                "a number, or scale a loss first"
            )
        self.can_amplify = True
        self.on_device.copy_(new_scale)
