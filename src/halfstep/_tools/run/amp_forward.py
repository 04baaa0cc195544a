"""Top-level calls of modules and loss functions, run under autocast."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from halfstep._autocast import Policy, autocast
from halfstep._common.nested import map_leaves
from halfstep._common.patches import TopLevelCalls, not_compiled
from halfstep._pytorch import autograd, compiler, modes
from halfstep._pytorch.amp import Switches
from halfstep._tools.replay.replay import is_replaying
from halfstep._tools.run.amp_script import ScriptState
from halfstep.events import has_own_policies

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


class Forward(TopLevelCalls):
    """Patches that run top-level calls under autocast.

    Module rules of the policy apply to the first module that runs.
    """

    def __init__(
        self, dtype: torch.dtype, policy: Policy | str | None, script: ScriptState
    ) -> None:
        super().__init__()
        self._dtype, self._policy, self._script = dtype, policy, script
        self._contexts: dict[str, autocast] = {}
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def is_on(self) -> bool:
        return self._script.is_on

    @not_compiled
    def call_module(
        self, original: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        context = self._context_of(module)
        if context is None:
            return original(module, *args, **kwargs)
        return in_float32(self._under(context, original, module, *args, **kwargs), self._dtype)

    @not_compiled
    def call_loss(self, name: str, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run a loss function under autocast if an argument is in the lower precision."""
        context = self._context_of_loss(name, [*args, *kwargs.values()])
        return self._under(context, original, *args, **kwargs)

    @not_compiled
    def _under(
        self,
        context: AbstractContextManager[object],
        function: Callable[..., Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        with context, self.inside():
            return function(*args, **kwargs)

    def note_region(self, switches: Switches) -> None:
        """Note an autocast that the script enters inside a call, as accelerate's forward does."""
        if (
            self.is_inside
            and switches.enabled
            and switches.dtype in (torch.float16, torch.bfloat16)
        ):
            self._note_own(switches.dtype)

    def _note_own(self, dtype: torch.dtype) -> None:
        # An autocast entered in a backward pass is our own, restored by a checkpoint; so is one
        # of a replay.
        is_scripts = autograd.backward_number() < 0 and not is_replaying()
        if is_scripts and self._script.is_on:
            self._script.note_own_autocast(dtype)

    @compiler.do_not_compile_alone
    def _context_of(self, module: nn.Module) -> AbstractContextManager[object] | None:
        """Return the autocast context for an outermost module, or None to run it unchanged."""
        param = next(module.parameters(), None)
        if param is None:
            return None
        if not self._may_enter(param.device.type):
            return None
        if module not in self._checked:
            self._checked.add(module)
            reason = _why_not_scaled(module) if self._script.is_scaling else None
            if reason is not None:
                self._script.switch_off(reason)
                return None
        self._script.note_call(self._script.modules, type(_unwrapped(module)).__name__)
        return self._context(param.device.type, module)

    @compiler.do_not_compile_alone
    def _context_of_loss(self, name: str, args: list[Any]) -> AbstractContextManager[object]:
        self._script.note_call(self._script.losses, name)
        # Models return float32. A loss of float32 inputs needs no autocast.
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
        device = next((t.device.type for t in tensors if t.dtype is self._dtype), None)
        if device is None or not self._may_enter(device):
            return nullcontext()
        return self._context(device, None)

    def _may_enter(self, device: str) -> bool:
        # An exported or traced program cannot carry a policy with it.
        if (
            self._script.is_by_hand
            or modes.is_jit_tracing()
            or compiler.is_exporting()
            or modes.is_tracing_before_autocast()
            or not torch.amp.is_autocast_available(device)
        ):
            return False
        if has_own_policies() or torch.is_autocast_enabled(device):
            self._note_own(torch.get_autocast_dtype(device))
            return False
        return True

    def _context(self, device: str, module: nn.Module | None) -> autocast:
        if device not in self._contexts:
            context = autocast(device, self._dtype, policy=self._policy, module=module)
            self._contexts[device] = context
        return self._contexts[device]


def _why_not_scaled(module: nn.Module) -> str | None:
    """Return why halfstep cannot scale the gradients of a model, or None if it can."""
    name = type(_unwrapped(module)).__name__
    if any(p.dtype is torch.float16 and p.requires_grad for p in module.parameters()):
        return f"the script keeps parameters of {name} in float16 itself"
    if any(cls.__name__ in _SHARDED for inner in module.modules() for cls in type(inner).__mro__):
        return (
            f"{name} is sharded by FSDP, whose gradients only a GradScaler in the script can reach "
            "(--amp bf16 needs none)"
        )
    return None


def _unwrapped(module: nn.Module) -> nn.Module:
    """Return the script's own module, without wrappers for compilation or replication."""
    inner = compiler.compiled_from(module) or getattr(module, "module", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else module


# --- outputs in float32 ---------------------------------------------------------------------------


@compiler.do_not_compile_alone
def in_float32(value: Any, lower: torch.dtype) -> Any:
    """Return ``value`` with all its tensors of dtype ``lower`` cast to float32.

    Nested lists, tuples, named tuples, dictionaries (including a transformers ``ModelOutput``) and
    dataclasses are searched. A container without such tensors is returned as it is, not copied.
    Objects of other classes, such as a key-value cache, stay unchanged. Sync: none.
    """

    def each(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return item.float() if item.dtype is lower else item
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return _dataclass_in_float32(item, lower)
        return item

    return map_leaves(each, value)


def _dataclass_in_float32(value: Any, lower: torch.dtype) -> Any:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    new = in_float32(fields, lower)
    if new is fields:
        return value
    result = copy.copy(value)
    for name, item in new.items():
        object.__setattr__(result, name, item)  # the dataclass may be frozen
    return result
