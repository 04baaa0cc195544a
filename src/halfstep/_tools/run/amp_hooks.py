"""Hooks of a script in scaled backward passes: they see gradients as without the scale.

A gradient is divided before the hook and multiplied after it: exact, since the scale is a power of
two. A hook on lower-precision tensors sees float32, as it would without autocast.
"""

from __future__ import annotations

import inspect
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from halfstep._common.nested import map_tensors
from halfstep._pytorch.autograd import version_of
from halfstep._pytorch.modules import GLOBAL_BACKWARD_HOOKS
from halfstep._tools.patches import Patches
from halfstep._tools.run.amp_backward import Backward, ScaledPass

_thread = threading.local()


class _Hook:
    """A hook of the script. In a copy or a file of its module, the script's own stands for it."""

    def __init__(
        self, hook: Callable[..., Any], backward: Backward, kind: Callable[..., Any]
    ) -> None:
        self.hook, self._backward, self._kind = hook, backward, kind
        self.__name__ = getattr(hook, "__name__", "hook")

    def __call__(self, *args: Any) -> Any:
        running = self._backward.running
        # A pass inside of a hook has gradients without a scale.
        if running is None or getattr(_thread, "is_in_hook", False):
            return self.hook(*args)
        _thread.is_in_hook = True
        try:
            return self._kind(self.hook, running, *args)
        finally:
            _thread.is_in_hook = False

    def __reduce__(self) -> tuple[object, ...]:
        return _same, (self.hook,)


def _same(hook: object) -> object:
    return hook


def _of_tensor(hook: Callable[..., Any], running: ScaledPass, grad: Tensor) -> Any:
    shown = running.shown(grad)
    version = version_of(shown)
    result = hook(shown)
    if result is None and version_of(shown) != version:  # written in place
        result = shown
    return running.hidden(result, grad)


def _of_module(hook: Callable[..., Any], running: ScaledPass, module: Any, *grads: Any) -> Any:
    replaced = grads[0]
    result = hook(module, *map_tensors(running.shown, grads))
    if result is None or isinstance(result, Tensor):
        return running.hidden(result, replaced[0])
    if len(result) != len(replaced):  # PyTorch raises an error
        return result
    return tuple(map(running.hidden, result, replaced))


def _after_accumulation(hook: Callable[..., Any], running: ScaledPass, param: Tensor) -> Any:
    if param.grad is not None:
        running.note(param.grad)
    running.unscale_([param])
    result = hook(param)
    if not running.is_used:  # else the optimizer has stepped in the hook
        running.include([param])
    return result  # an error of PyTorch if it is not None


def install(patches: Patches, backward: Backward) -> None:
    """Wrap what registers hooks on gradients."""

    def wrap(owner: Any, name: str, kind: Callable[..., Any]) -> None:
        def register(original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
            is_ours = str(sys._getframe(2).f_globals.get("__name__")).startswith("halfstep.")
            if is_ours or torch.compiler.is_compiling():
                return original(*args, **kwargs)
            given = inspect.signature(original).bind(*args, **kwargs)
            hook = given.arguments["hook"]
            if callable(hook) and not isinstance(hook, _Hook):
                given.arguments["hook"] = _Hook(hook, backward, kind)
            return original(*given.args, **given.kwargs)

        patches.wrap(owner, name, register)

    wrap(Tensor, "register_hook", _of_tensor)
    wrap(Tensor, "register_post_accumulate_grad_hook", _after_accumulation)
    for name in ("full_backward_hook", "full_backward_pre_hook", "backward_hook"):
        wrap(torch.nn.Module, f"register_{name}", _of_module)
    for owner, name in GLOBAL_BACKWARD_HOOKS:
        wrap(owner, name, _of_module)
