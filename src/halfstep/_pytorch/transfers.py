"""Copies of small tensors on their way from a device to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfstep._pytorch.devices import facts


@dataclass(frozen=True, eq=False)
class Transfer:
    """A copy on the host, to be read once it has arrived.

    Attributes:
        values: The copy.
        arrival: The event after it; None if it is there already.
    """

    values: Tensor
    arrival: torch.Event | None = None

    def has_arrived(self) -> bool:
        """Return whether ``values`` can be read. Sync: none."""
        return self.arrival is None or self.arrival.query()

    def wait(self) -> Tensor:
        """Return the copy once it has arrived. Sync: one."""
        if self.arrival is not None:
            self.arrival.synchronize()
        return self.values


def to_host(tensor: Tensor) -> Transfer:
    """Start copying a tensor of an accelerator into pinned memory.

    Sync: none; one on a device that cannot tell when a copy has arrived.
    """
    device = tensor.device.type
    if not facts(device).has_arrivals:
        return Transfer(tensor.cpu())
    values = torch.empty_like(tensor, device="cpu", pin_memory=True)
    values.copy_(tensor, non_blocking=True)
    arrival = torch.Event(device)
    arrival.record()
    return Transfer(values, arrival)
