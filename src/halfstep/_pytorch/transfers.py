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
        if self.arrival is not None and not self.arrival.query():
            self.arrival.synchronize()
        return self.values


def to_host(tensor: Tensor) -> Transfer:
    """Start copying a tensor of an accelerator into pinned memory; return one on the CPU itself.

    Sync: none; one on a device that cannot tell when a copy has arrived.
    """
    device = tensor.device.type
    if device == "cpu":
        return Transfer(tensor)
    if not facts(device).has_arrivals:
        return Transfer(tensor.cpu())
    values = torch.empty_like(tensor, device="cpu", pin_memory=True)
    values.copy_(tensor, non_blocking=True)
    arrival = torch.Event(device)
    arrival.record()
    return Transfer(values, arrival)


class HostCopy:
    """The newest copy of a small tensor that has arrived on the host.

    A CPU tensor is used directly. An accelerator's is copied asynchronously and arrives some steps
    later. Sync: none, except as in :func:`~halfstep._pytorch.transfers.to_host`.
    """

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._under_way: Transfer | None = None

    def send(self, tensor: Tensor) -> None:
        """Start a copy; do nothing while an earlier one is still in flight."""
        if tensor.device.type == "cpu":
            self._values = tensor
            return
        self._receive()
        if self._under_way is None and not is_capturing(tensor.device):
            self._under_way = to_host(tensor)

    def latest(self, *, wait: bool = False) -> Tensor | None:
        """Return the newest copy on the CPU, None if none has arrived; ``wait``: one sync."""
        if wait and self._under_way is not None:
            self._under_way.wait()
        self._receive()
        return self._values

    def _receive(self) -> None:
        if self._under_way is not None and self._under_way.has_arrived():
            self._values, self._under_way = self._under_way.values, None


def is_capturing(device: torch.device) -> bool:
    """Return whether ops on a device are recorded for a CUDA graph."""
    # In a graph, the copy would be repeated at every replay, and the event could not be queried.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
