"""torch.optim and the clipping of gradients: steps that run, schedulers, norms."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch


def is_hooked(optimizer_class: type[torch.optim.Optimizer]) -> bool:
    """Say whether an optimizer of this class was made: then its ``step`` calls the step hooks."""
    return getattr(optimizer_class.step, "hooked", False)


def is_whole(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer saves its own state: wrappers have that of another one saved.

    Those of many libraries do not call ``Optimizer.__init__``.
    """
    sharded: Any = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    is_sharded = isinstance(optimizer, getattr(sharded, "ZeroRedundancyOptimizer", ()))
    return hasattr(optimizer, "_optimizer_load_state_dict_pre_hooks") and not is_sharded


# The code of the function that PyTorch puts around ``step`` of every class of optimizers.
_STEP_CODE = torch.optim.Optimizer.profile_hook_step(lambda self: None).__code__


def optimizer_step_depth() -> int:
    """Return how many steps of optimizers, each inside the one before, run in this thread."""
    frame: Any = sys._getframe(1)
    depth = 0
    while frame is not None:
        depth += frame.f_code is _STEP_CODE
        frame = frame.f_back
    return depth


# (function): what calls the step hooks of an optimizer around a function, as around its ``step``.
with_step_hooks: Callable[[Callable[..., Any]], Callable[..., Any]] = (
    torch.optim.Optimizer.profile_hook_step
)


def step_without_hooks(optimizer: torch.optim.Optimizer) -> Callable[..., Any] | None:
    """Return the ``step`` of an optimizer's class alone, bound; None if it has another one.

    One that a scheduler has put there, to see that it is called, does not count.
    """
    own: Any = type(optimizer).step
    there: Any = vars(optimizer).get("step")
    if there is not None and not (_is_schedulers(there) and there.__wrapped__ is own):
        return None
    if is_hooked(type(optimizer)):
        if getattr(own, "__code__", None) is not _STEP_CODE:
            return None  # put there since, with functools.wraps: it calls the hooked one
        own = own.__wrapped__
    return MethodType(own, optimizer)


def tell_scheduler(optimizer: torch.optim.Optimizer) -> None:
    """Tell a scheduler that the ``step`` was called which it has put there."""
    if _is_schedulers(optimizer.step):
        optimizer._opt_called = True  # type: ignore[attr-defined]


def _is_schedulers(step: Any) -> bool:
    return getattr(step, "_wrapped_by_lr_sched", False)


def is_being_made(scheduler: torch.optim.lr_scheduler.LRScheduler) -> bool:
    """Say whether a scheduler's ``step`` is the one that its constructor makes."""
    return scheduler._is_initial
