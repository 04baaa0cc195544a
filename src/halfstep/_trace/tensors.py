"""Tensors as plain data, told apart by their memory."""

from __future__ import annotations

from itertools import count

import torch
from torch import Tensor, nn

from halfstep._autocast.module_names import without_wrappers
from halfstep._pytorch import autograd, storages
from halfstep._trace.rows import Value, dtype_name


class Memories:
    """Numbers and names for the memory of tensors. Keeps no tensor alive."""

    def __init__(self, model: nn.Module) -> None:
        self._numbers: dict[int, int] = {}
        self._references: list[object] = []
        self._count = count()
        self._names: dict[int, str] = {}
        self._models: dict[int, int] = {}
        self._weights = {self.number(parameter) for parameter in model.parameters()}
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            self.name(self.number(tensor), without_wrappers(name))

    def number(self, tensor: Tensor) -> int:
        """Return the number of the memory of a tensor; a new one if it has no memory of its own."""
        reference = storages.memory_of(tensor)
        if reference is None:
            return next(self._count)
        found = self._numbers.get(reference.cdata)
        if found is None:
            found = self._numbers[reference.cdata] = next(self._count)
            self._references.append(reference)
        return found

    def name(self, number: int, name: str) -> None:
        """Give a memory a name, if it has none."""
        self._names.setdefault(number, name)

    def note_cast(self, source: Value, result: int) -> None:
        """Let the result of a cast have the name of its source, and be a weight as that is."""
        self.name(result, source.name)
        if source.is_weight:
            self._weights.add(result)

    def note_model(self, model: Value, result: Value) -> None:
        """Note that a tensor was made to be like another one."""
        if model.dtype == result.dtype:
            self._models[result.storage] = model.storage

    def value(self, tensor: Tensor) -> Value:
        """Return a tensor as plain data."""
        number = self.number(tensor)
        return Value(
            storage=number,
            version=autograd.version_of(tensor),
            offset=int(tensor.storage_offset()) if tensor.layout is torch.strided else 0,
            shape=tuple(tensor.shape),
            dtype=dtype_name(tensor.dtype),
            name=self._names.get(number, ""),
            requires_grad=tensor.requires_grad and torch.is_grad_enabled(),
            is_weight=number in self._weights,
            like=self._models.get(number),
        )


def is_dense(tensor: Tensor) -> bool:
    """Say whether the kernels for the device of a tensor are those that run on it."""
    return tensor.layout is torch.strided and not tensor.is_nested
