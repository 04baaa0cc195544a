"""Read values from a device late instead of waiting for them."""

from __future__ import annotations

import torch
from torch import Tensor


class HostCopy:
    """The newest copy of a small tensor that has arrived on the host.

    On the CPU that is the tensor itself. On an accelerator it is copied into pinned memory while
    the device works on, and is there some steps later. Sync: none.
    """

    def __init__(self) -> None:
        self._values: Tensor | None = None
        self._under_way: Tensor | None = None
        self._event: torch.Event | None = None

    def send(self, tensor: Tensor) -> None:
        """Start to copy; nothing happens while an earlier copy is still under way."""
        if tensor.device.type == "cpu":
            self._values = tensor
            return
        self._receive()
        if self._under_way is None and not _is_capturing(tensor.device):
            self._under_way = torch.empty_like(tensor, device="cpu", pin_memory=True)
            self._under_way.copy_(tensor, non_blocking=True)
            self._event = torch.Event(tensor.device.type)
            self._event.record()

    def latest(self, *, wait: bool = False) -> Tensor | None:
        """Return the newest copy on the CPU, None if none has arrived yet.

        Args:
            wait: For the one that is under way. Sync: one.
        """
        if wait and self._event is not None:
            self._event.synchronize()
        self._receive()
        return self._values

    def _receive(self) -> None:
        if self._event is not None and self._event.query():
            self._values, self._under_way, self._event = self._under_way, None, None


def _is_capturing(device: torch.device) -> bool:
    # A copy into a graph would be made again in every replay, and an event could not be asked.
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
