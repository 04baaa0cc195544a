"""Hooks of a script in scaled backward passes: they see gradients as without the scale.

A gradient is divided before the hook and multiplied after it: exact, since the scale is a power of
two. A hook on lower-precision tensors sees float32, as it would without autocast.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from halfstep._common.nested import map_tensors
from halfstep._common.patches import Patches
from halfstep._pytorch.autograd import version_of
from halfstep._pytorch.modules import GLOBAL_BACKWARD_HOOKS
from halfstep._tools.run.amp_backward import Backward, ScaledPass

_MODULE_HOOKS = (
    "register_full_backward_hook", "register_full_backward_pre_hook", "register_backward_hook",
)  # fmt: skip


class _Thread(threading.local):
    is_in_hook = False


_thread = _Thread()


@contextmanager
def _in_hook() -> Iterator[None]:
    """Leave the hooks of a pass inside of a hook alone: its gradients have no scale."""
    _thread.is_in_hook = True
    try:
        yield
    finally:
        _thread.is_in_hook = False


class _Hook:
    """A hook of the script. In a copy or a file of its module, the script's own stands for it."""

    def __init__(self, hook: Callable[..., Any], backward: Backward) -> None:
        self.hook, self._backward = hook, backward
        self.__name__ = getattr(hook, "__name__", "hook")

    def __call__(self, *args: Any) -> Any:
        running = self._backward.running
        if running is None or _thread.is_in_hook:
            return self.hook(*args)
        with _in_hook():
            return self._call(running, *args)

    def __reduce__(self) -> tuple[object, ...]:
        return _same, (self.hook,)

    def _call(self, running: ScaledPass, *args: Any) -> Any:
        raise NotImplementedError


def _same(hook: object) -> object:
    return hook


class _OfTensor(_Hook):
    def _call(self, running: ScaledPass, *args: Any) -> Any:
        [grad] = args
        shown = running.shown(grad)
        version = version_of(shown)
        result = self.hook(shown)
        if result is None and version_of(shown) != version:  # written in place
            result = shown
        return running.hidden(result, grad)


class _OfModule(_Hook):
    def _call(self, running: ScaledPass, *args: Any) -> Any:
        module, replaced, *_ = args
        result = self.hook(module, *map_tensors(running.shown, args[1:]))
        if result is None or isinstance(result, Tensor):
            return running.hidden(result, replaced[0])
        return tuple(map(running.hidden, result, replaced))


class _AfterAccumulation(_Hook):
    def _call(self, running: ScaledPass, *args: Any) -> Any:
        [param] = args
        if param.grad is not None:
            running.note(param.grad)
        running.unscale_([param])
        self.hook(param)
        if not running.is_used:  # else the optimizer has stepped in the hook
            running.include([param])


def install(patches: Patches, backward: Backward) -> None:
    """Wrap what registers hooks on gradients."""

    def wrap(owner: Any, name: str, kind: type[_Hook]) -> None:
        def register(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            is_ours = str(sys._getframe(2).f_globals.get("__name__")).startswith("halfstep.")
            if is_ours or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            place = 0 if len(args) == 1 and "hook" not in kwargs else 1
            if "hook" in kwargs:
                kwargs["hook"] = wrapped(kwargs["hook"])
            else:
                args = (*args[:place], wrapped(args[place]), *args[place + 1 :])
            return original(*args, **kwargs)

        def wrapped(hook: Any) -> Any:
            return hook if isinstance(hook, _Hook) or not callable(hook) else kind(hook, backward)

        patches.wrap(owner, name, register)

    wrap(Tensor, "register_hook", _OfTensor)
    wrap(Tensor, "register_post_accumulate_grad_hook", _AfterAccumulation)
    for name in _MODULE_HOOKS:
        wrap(torch.nn.Module, name, _OfModule)
    for owner, name in GLOBAL_BACKWARD_HOOKS:
        wrap(owner, name, _OfModule)
