"""Steps whose numbers are still on the device, read later in batches."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfstep._pytorch.devices import Transfer, to_device, to_host
from halfstep._scaler import Outcome, pack, unpack
from halfstep._tools.record.files import Event

MOST_WAITING = 64  # number of waiting steps that triggers a read
LONGEST_WAIT = 0.25  # seconds since the last read after which the end of a step triggers one


@dataclass(frozen=True)
class PendingStep:
    """A step whose numbers may still be on the device."""

    step: int
    time: float
    optimizer: str
    number: int | None  # among the optimizers of its class
    outcome: Outcome | None  # without a scaler every step is taken
    loss: Tensor | None
    norm: Tensor | None  # as measured by clip_grad_norm_
    updates: Tensor | None  # entries with a gradient, in sampled steps
    lost_updates: Tensor | None  # of these, that the step did not change
    is_by_hand: bool = False  # by optimizer.step(), which takes what a scaler would skip
    num_losses: int = 1  # whose sum the loss is

    @property
    def scalars(self) -> tuple[Tensor | None, ...]:
        """The scalars, None if unknown."""
        return self.loss, self.norm, self.updates, self.lost_updates

    def on_host(self) -> Event:
        """Return the line of the record. Sync: none if all numbers are on the CPU."""
        scalars = [math.nan if each is None else each.item() for each in self.scalars]
        return self.event(scalars, None if self.outcome is None else pack(self.outcome))

    def packed(self, device: torch.device) -> Tensor:
        """Return all numbers as one vector, in float64 if one has that. Sync: none."""
        missing = torch.full((), math.nan, dtype=torch.float32, device=device)
        found = (missing if each is None else _narrow(each, device) for each in self.scalars)
        scalars = torch.stack([to_device(each, device) for each in found])
        if self.outcome is None:
            return scalars
        return torch.cat([scalars, to_device(pack(self.outcome), device)])

    def event(self, scalars: list[float], of_outcome: Tensor | None) -> Event:
        """Return the line of the record, from the parts of :meth:`packed` on the CPU."""
        loss, norm, updates, lost = scalars
        event = {
            "event": "step",
            "step": self.step,
            "time": round(self.time, 4),
            "optimizer": self.optimizer,
            "number": self.number,
            "taken": True,
            "reason": None,
            "scale": None,
            "scale_after": None,
            "norm": None if self.norm is None else norm,
            "loss": None if self.loss is None else loss,
            "share_lost_updates": lost / updates if updates > 0 else None,
            "num_losses": self.num_losses,
            "updates": round(updates) if updates > 0 else None,
        }
        if self.outcome is not None and of_outcome is not None:
            entry, event["scale_after"] = unpack(self.outcome, of_outcome)
            event["taken"], event["reason"], event["scale"] = entry.taken, entry.reason, entry.scale
            if self.outcome.is_measured:
                event["norm"] = entry.norm
            if not entry.taken and self.outcome.rank is not None:
                event["rank"] = self.outcome.rank
            if self.is_by_hand:
                event |= {"taken": True, "reason": None}
        return event


def _narrow(scalar: Tensor, device: torch.device) -> Tensor:
    has_float64 = scalar.dtype is torch.float64 and scalar.device == device
    return (scalar if has_float64 else scalar.float()).reshape(())


class _Sent(NamedTuple):
    """Steps being copied to the host, with their concatenated numbers."""

    steps: list[PendingStep]
    sizes: list[int]
    transfer: Transfer


class PendingSteps:
    """Steps that have not been read yet. Sync: none, except in :meth:`take_all`."""

    def __init__(self) -> None:
        self._steps: list[PendingStep] = []
        self._sent: _Sent | None = None
        self._last_sent = time.monotonic()

    def add(self, step: PendingStep) -> None:
        self._steps.append(step)

    def take(self) -> list[Event]:
        """Return the steps that have arrived, and start copying others if due."""
        arrived = []
        if self._sent is not None and self._sent.transfer.has_arrived():
            arrived = self._taken(self._sent)
        is_late = time.monotonic() > self._last_sent + LONGEST_WAIT
        is_due = is_late or len(self._steps) >= MOST_WAITING
        if self._sent is None and self._steps and is_due:
            arrived += self._send()
        return arrived

    def take_all(self) -> list[Event]:
        """Return all steps. Sync: one or two."""
        arrived = []
        while self._sent is not None or self._steps:
            if self._sent is not None:
                self._sent.transfer.wait()
                arrived += self._taken(self._sent)
            if self._steps:
                arrived += self._send()
        return arrived

    def _send(self) -> list[Event]:
        """Start copying all steps; return them if they are already on the host."""
        self._last_sent = time.monotonic()
        steps, self._steps = self._steps, []
        device = _device_of(steps)
        if device.type == "cpu":
            return [step.on_host() for step in steps]
        packed = [step.packed(device) for step in steps]
        sizes = [len(values) for values in packed]
        self._sent = _Sent(steps, sizes, to_host(torch.cat(packed)))
        return []

    def _taken(self, sent: _Sent) -> list[Event]:
        self._sent = None
        parts = torch.split(sent.transfer.values, sent.sizes)
        pairs = zip(sent.steps, parts, strict=True)
        return [step.event(part[:4].tolist(), part[4:]) for step, part in pairs]


def _device_of(steps: Sequence[PendingStep]) -> torch.device:
    """Return the device of the newest number, an accelerator if there is one."""
    for step in reversed(steps):
        for scalar in step.scalars:
            if scalar is not None and scalar.device.type != "cpu":
                return scalar.device
        if step.outcome is not None:
            return step.outcome.loss_scale.tensor.device
    return torch.device("cpu")


def step_scalars(event: Mapping[str, Any]) -> dict[str, float]:
    """Return what sinks receive of a step, from its line in the record."""
    names = ("loss", "scale", "norm", "share_lost_updates")
    known = {name: event[name] for name in names if event[name] is not None}
    return known | {"skipped": float(not event["taken"])}
