"""torch.optim and gradient clipping: steps, step hooks, schedulers and norms."""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from traceback import walk_stack
from types import MethodType
from typing import Any

import torch


def is_hooked(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Return whether ``step`` of a class has hooks, which its first instance installs."""
    return getattr(optimizer_class.step, "hooked", False)


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether hooks of its own see the steps of an optimizer."""
    known = vars(optimizer)
    return bool(known["_optimizer_step_pre_hooks"] or known["_optimizer_step_post_hooks"])


def is_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer saves its own state, unlike wrappers, which save another's.

    Wrappers in many libraries do not call ``Optimizer.__init__``; those of Lightning have all
    attributes of the optimizer that they wrap.
    """
    sharded: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    is_sharded = isinstance(optimizer, getattr(sharded, "ZeroRedundancyOptimizer", ()))
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", None)
    is_copy = any(
        isinstance(each, torch.optim.Optimizer)
        and each is not optimizer
        and vars(each).get("_optimizer_load_state_dict_pre_hooks") is hooks
        for each in vars(optimizer).values()
    )
    return hooks is not None and not is_sharded and not is_copy


# The code object of PyTorch's wrapper around ``step`` of every optimizer class.
_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def optimizer_step_depth() -> int:
    """Return the number of nested optimizer steps running in this thread."""
    return sum(frame.f_code is _STEP_CODE for frame, _ in walk_stack(sys._getframe(1)))


TRANSPARENT: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()
"""Wrappers of ``step`` of a class that do nothing for an optimizer whose ``step`` is replaced."""

# (function): wraps a function with the step hooks of its optimizer, like ``step``.
with_step_hooks: Callable[[Callable[..., Any]], Callable[..., Any]] = (
    torch.optim.Optimizer.profile_hook_step
)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """Return the unhooked, bound ``step`` of an optimizer's class; None if it was replaced.

    Wrappers that a scheduler installed to detect calls, and :data:`TRANSPARENT` ones, do not count
    as replacements.
    """
    own: Any = type(optimizer).step
    there: Any = vars(optimizer).get("step")
    if there is not None and not (_is_schedulers(there) and there.__wrapped__ is own):
        return None
    if own in TRANSPARENT:
        own = own.__wrapped__
    if is_hooked(type(optimizer)):
        if getattr(own, "__code__", None) is not _STEP_CODE:
            return None  # replaced later, with functools.wraps: it calls the hooked one
        own = own.__wrapped__
    return MethodType(own, optimizer)


def tell_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """Record a call of ``step``, in place of the wrapper that a scheduler installed."""
    if _is_schedulers(optimizer.step):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _is_schedulers(step: Any) -> bool:
    return getattr(step, "_wrapped_by_lr_sched", False)


def replace_method(owner: object, name: str, call: Callable[..., Any]) -> MethodType:
    """Replace a method on an instance by ``call(owner, ...)``, with its signature and attributes.

    The result is the replacement, a method, because schedulers use its ``__func__``.
    """
    original = getattr(owner, name)
    # With a bound method in ``__wrapped__`` the signature would lose its first parameter.
    function = getattr(original, "__func__", original)
    replacement: Any = wraps(function)(call)
    if function is original and not _is_schedulers(original):  # as of torch.compile and accelerate
        with suppress(ValueError, TypeError):
            signature = inspect.signature(original)
            itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
            replacement.__signature__ = signature.replace(
                parameters=[itself, *signature.parameters.values()]
            )
    method = MethodType(replacement, owner)
    setattr(owner, name, method)
    return method


def is_being_made(scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Return whether the current ``step`` of a scheduler is the one made by its constructor."""
    return scheduler._is_initial
