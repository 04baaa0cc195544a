"""Snapshot of a model: restored before each pass, and after the last."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from halfstep._autocast.casts import tensors_in
from halfstep._common.random_states import RandomStates, accelerators
from halfstep._pytorch.autograd import version_of
from halfstep._pytorch.modules import registers_of

SEED = 0
"""The seed of all random number generators in each pass."""


class Snapshot:
    """Keeps a model, other tensors and the random numbers unchanged by a block.

    Of the model it keeps parameters, buffers, gradients, and the attributes of its modules; the
    contents of lists and dictionaries among these are not kept. :meth:`reset` restores all of it
    within the block, without gradients, so that another pass starts from the same state.

    Args:
        model: The model.
        others: Other tensors that the model may write to, those of the batch.
        devices: The device types whose random numbers are kept, besides the CPU's.
    """

    def __init__(self, model: nn.Module, others: Iterable[Tensor], devices: set[str]) -> None:
        modules = list(model.modules())
        self._attributes: list[tuple[dict[str, Any], dict[str, Any]]] = []
        for module in modules:
            held = (vars(module), *registers_of(module))
            self._attributes += [(each, dict(each)) for each in held]
        found = [*tensors_in(each for each, _ in self._attributes), *others]
        distinct = {id(tensor): tensor for tensor in found}.values()
        self._values = [_Value(tensor) for tensor in distinct]
        self._gradients = [(tensor, tensor.grad) for tensor in distinct if tensor.is_leaf]
        self._devices = sorted(devices - {"cpu"})

    def reset(self) -> None:
        """Restore everything, set gradients to None, and seed all random numbers.

        Sync: one for each tensor.
        """
        self._restore()
        for tensor, _ in self._gradients:
            tensor.grad = None
        torch.default_generator.manual_seed(SEED)
        for device in self._devices:
            torch.get_device_module(device).manual_seed_all(SEED)
        random.seed(SEED)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(SEED)

    @torch.no_grad()
    def _restore(self) -> None:
        for held, before in self._attributes:
            if list(held) != list(before) or any(held[key] is not before[key] for key in held):
                held.clear()
                held.update(before)
        for value in self._values:
            value.restore()

    def __enter__(self) -> Self:
        self._random = RandomStates(accelerators())
        self.reset()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._restore()
        for tensor, gradient in self._gradients:
            tensor.grad = gradient
        self._random.restore()


class _Value:
    """Copy of the values of a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._before = tensor, tensor.detach().clone()
        self._version = version_of(tensor)

    def restore(self) -> None:
        # A tensor that was not changed is not written to, so that its version stays.
        same_version = version_of(self._tensor) == self._version
        if not (same_version and torch.equal(self._tensor.detach(), self._before)):
            self._tensor.detach().copy_(self._before)
            self._version = version_of(self._tensor)
