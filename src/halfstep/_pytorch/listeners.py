"""Listeners for calls of PyTorch functions, which are replaced while there are any."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn.utils import clip_grad

from halfstep._pytorch.autograd import backward_number


class _Heard:
    """A function of a module with listeners, which may be removed in any order.

    PyTorch must look the function up by name at each call. ``call`` receives the original, the
    listeners and the arguments.
    """

    def __init__(self, module: Any, name: str, call: Callable[..., Any]) -> None:
        self._module, self._name, self._call = module, name, call
        self._listeners: list[Callable[..., None]] = []
        self._lock = threading.Lock()

    @contextmanager
    def by(self, listener: Callable[..., None]) -> Iterator[None]:
        with self._lock:
            if not self._listeners:
                self._replace()
            self._listeners.append(listener)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(listener)
                if not self._listeners:
                    setattr(self._module, self._name, self._original)

    def _replace(self) -> None:
        original = self._original = getattr(self._module, self._name)

        def heard(*args: Any, **kwargs: Any) -> Any:
            return self._call(original, tuple(self._listeners), *args, **kwargs)

        setattr(self._module, self._name, heard)


_Listeners = tuple[Callable[..., None], ...]
_here = threading.local()


def _backward(
    original: Any,
    listeners: _Listeners,
    /,
    tensors: Any,
    grad_tensors: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    was = getattr(_here, "is_passing", False)
    # Since 2.13 a call under a function mode, as of set_default_device, goes through here again.
    for listener in () if was and backward_number() < 0 else listeners:
        listener(tensors, grad_tensors)
    _here.is_passing = True
    try:
        return original(tensors, grad_tensors, *args, **kwargs)
    finally:
        _here.is_passing = was


def _clip(
    original: Any, listeners: _Listeners, /, parameters: Any, max_norm: Any, *args: Any, **kw: Any
) -> Any:
    for listener in listeners:
        listener(float(max_norm))
    return original(parameters, max_norm, *args, **kw)


def _norm(
    original: Callable[..., torch.Tensor],
    listeners: _Listeners,
    /,
    tensors: Any,
    norm_type: float = 2.0,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    tensors = [tensors] if isinstance(tensors, torch.Tensor) else list(tensors)
    norm = original(tensors, norm_type, *args, **kwargs)
    if float(norm_type) == 2.0:
        for listener in listeners:
            listener(tensors, norm)
    return norm


def _scaler_step(
    original: Any, listeners: _Listeners, scaler: Any, /, *args: Any, **kwargs: Any
) -> Any:
    if scaler.is_enabled():
        for listener in listeners:
            listener()
    return original(scaler, *args, **kwargs)


# (with listening_to_...(listener): ...) calls the listener in a block:

# with the roots of each backward pass and the gradients given for them, before it begins
listening_to_backward = _Heard(torch.autograd, "backward", _backward).by

# with the gradients and the L2 norm that any clip_grad_norm_ measures
listening_to_norms = _Heard(clip_grad, "_get_total_norm", _norm).by

# with the norm to which clip_grad_norm_ clips, before it does
listening_to_clipping = _Heard(clip_grad, "_clip_grads_with_norm_", _clip).by

# without arguments, at steps that an enabled torch.amp.GradScaler makes or skips
listening_to_torch_scaler = _Heard(torch.amp.GradScaler, "step", _scaler_step).by
