"""Models with float16 or bfloat16 parameters, replayed with float32 ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep._common.nested import map_plain

_HALVES = (torch.float16, torch.bfloat16)
_CASTS = ("half", "bfloat16")


def half_of(modules: Iterable[nn.Module]) -> tuple[str, torch.dtype] | None:
    """Return the device and the dtype of the first parameter in lower precision, or None."""
    params = chain.from_iterable(module.parameters() for module in modules)
    return next(((p.device.type, p.dtype) for p in params if p.dtype in _HALVES), None)


@contextmanager
def float32_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Give modules float32 parameters and buffers; the undo log of the replay puts them back."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype in _HALVES:
                tensor.grad = None
                tensor.data = tensor.data.float()
    yield


@contextmanager
def all_in_float32(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compute in float32, with float32 parameters, whatever is asked for."""
    with float32_parameters(modules), _InFloat32():
        yield


class _InFloat32(TorchFunctionMode):
    """Casts what functions are given to float32, and lets them make no lower precision."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a function in float32."""
        args, kwargs = map_plain(_widened, (args, kwargs or {}))
        if getattr(func, "__name__", "") in _CASTS:
            return args[0].float()
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in _HALVES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in _HALVES else value
