"""Transfers of the simulated device, which are there when somebody has waited for them."""

from __future__ import annotations

import collections
from typing import Any, NamedTuple

import torch
from tests.simulated.memory import is_mine
from tests.simulated.state import NAME, Now, below, indexed, lacking, waits
from torch import Tensor


class Transfer(NamedTuple):
    """A copy that is under way."""

    host: Tensor
    values: Tensor
    to_host: bool

    def arrive(self) -> None:
        if self.to_host:
            self.host.copy_(self.values)
        elif not torch.equal(self.host.view(torch.uint8), self.values.view(torch.uint8)):
            raise RuntimeError("race: pinned memory was written to while it was being transferred")


under_way: dict[int, collections.deque[Transfer]] = collections.defaultdict(collections.deque)
_arrived: collections.Counter[int] = collections.Counter()


def arrive(index: int, until: int | None = None) -> None:
    """Finish the transfers of a device, in order, the first ``until`` ones or all."""
    queue = under_way[index]
    with torch.no_grad(), below():
        while queue and (until is None or _arrived[index] < until):
            _arrived[index] += 1
            queue.popleft().arrive()


def wait(device: torch.device | None, what: str) -> None:
    waits[what] += 1
    arrive(indexed(NAME if device is None else device).index)


def check_pinned_memory() -> None:
    if not Now.profile.pinned_memory:
        raise lacking(
            NotImplementedError(
                "You should register `PrivateUse1HooksInterface`by "
                "`RegisterPrivateUse1HooksInterface` and implement `getPinnedMemoryAllocator` at "
                "the same time for PrivateUse1."
            )
        )


def is_pinned(tensor: Tensor, device: torch.device | None = None) -> bool:
    with below():
        return getattr(tensor.untyped_storage(), "_is_pinned", False)


def pin_memory(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    if is_mine(tensor):
        raise RuntimeError(f"cannot pin '{tensor.device}' only dense CPU tensors can be pinned")
    check_pinned_memory()
    with below():
        result = tensor.clone()
        result.untyped_storage()._is_pinned = True
        return result


class Event(torch.Event):
    """An event; one of the device has happened after as many looks as the profile says."""

    # PyTorch's class, which a device in Python makes do nothing, is replaced by this one.

    def __init__(self, device: Any = None, **_: Any) -> None:
        self._index = None
        if device is not None and torch.device(device).type == NAME:
            self._index = indexed(device).index
        self._after: int | None = None
        self._looks = 0

    def record(self, stream: Any = None) -> None:
        if self._index is None:
            return super().record(stream)
        self._check()
        self._after, self._looks = _arrived[self._index] + len(under_way[self._index]), 0
        return None

    def synchronize(self) -> None:
        if self._index is None:
            return super().synchronize()
        self._check()
        waits["event"] += 1
        return None if self._after is None else arrive(self._index, self._after)

    def query(self) -> bool:
        if self._index is None:
            return super().query()
        self._check()
        self._looks += 1
        if self._after is not None and self._looks >= Now.profile.looks:
            arrive(self._index, self._after)
        return self._after is None or _arrived[self._index] >= self._after

    def _check(self) -> None:
        if not Now.profile.events:
            raise lacking(RuntimeError("Backend doesn't support events."))
