"""Copies of the buffers of models, made only when they were written to."""

from __future__ import annotations

import weakref

from torch import Tensor, nn

from halfstep._pytorch import autograd


class BufferCopies:
    """The latest copies of the buffers of models."""

    def __init__(self) -> None:
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}
        self._owners: weakref.WeakKeyDictionary[nn.Module, list[tuple[nn.Module, str]]] = (
            weakref.WeakKeyDictionary()
        )

    def of(self, model: nn.Module) -> list[tuple[Tensor, Tensor]]:
        """Return the present buffers of a model, each with a copy of its values."""
        return [(buffer, self._copy_of(buffer)) for buffer in self._buffers_of(model)]

    def _buffers_of(self, model: nn.Module) -> list[Tensor]:
        """Return the present buffers of a model; the modules that have some are looked up once."""
        if model not in self._owners:
            # Not `_buffers`: in a module of torch.jit it is not a dictionary.
            self._owners[model] = [
                (module, name)
                for module in model.modules()
                for name, _ in module.named_buffers(recurse=False)
            ]
        found = (getattr(module, name, None) for module, name in self._owners[model])
        return [buffer for buffer in found if isinstance(buffer, Tensor)]

    def _copy_of(self, buffer: Tensor) -> Tensor:
        """Return a copy of a buffer; a new one only if the buffer was written to."""
        known = self._copies.get(id(buffer))
        if known is None or known[0]() is not buffer or known[1] != autograd.version_of(buffer):
            copied = buffer.detach().clone()
            known = (weakref.ref(buffer), autograd.version_of(buffer), copied)
            self._copies[id(buffer)] = known
        return known[2]
