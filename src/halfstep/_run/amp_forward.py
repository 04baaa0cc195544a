"""Top-level calls of modules and loss functions, run under autocast."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from halfstep._autocast import Policy, autocast
from halfstep._autocast.scopes import current as current_scope
from halfstep._common.top_level_calls import TopLevelCalls, not_compiled
from halfstep._pytorch import autograd, compiler, modes
from halfstep._run.amp_script import ScriptState

_SHARDED = ("FSDPModule", "FullyShardedDataParallel")


class Forward(TopLevelCalls):
    """Runs top-level calls under autocast.

    Args:
        dtype: The lower precision.
        policy: As for :class:`halfstep.autocast`; its rules for modules apply to the first module
            that runs.
        script: Notes what was found.
    """

    def __init__(
        self, dtype: torch.dtype, policy: Policy | str | None, script: ScriptState
    ) -> None:
        super().__init__()
        self._dtype = dtype
        self._policy = policy
        self._script = script
        self._contexts: dict[str, autocast] = {}
        self._checked: weakref.WeakSet[nn.Module] = weakref.WeakSet()

    @property
    def is_on(self) -> bool:
        """Whether calls run under autocast."""
        return self._script.is_on

    @not_compiled
    def call_module(
        self,
        original: Callable[..., Any],
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a module under autocast."""
        context = self._context_of(module)
        if context is None:
            return original(module, *args, **kwargs)
        return in_float32(self._under(context, original, module, *args, **kwargs), self._dtype)

    @not_compiled
    def call_loss(
        self,
        name: str,
        original: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Run a loss function under autocast if it receives lower precision."""
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
        with self.inside(), context:
            return function(*args, **kwargs)

    @compiler.do_not_compile_alone
    def _context_of(self, module: nn.Module) -> AbstractContextManager[object] | None:
        """Return the context of an outermost module; None for no context."""
        param = next(module.parameters(), None)
        if param is None or not self._may_enter(param.device.type):
            return None
        if module not in self._checked:
            self._checked.add(module)
            reason = _why_not_scaled(module) if self._script.is_scaling else None
            if reason is not None:
                self._script.switch_off(reason)
                return None
        self._script.modules.setdefault(type(_unwrapped(module)).__name__)
        return self._context(param.device.type, module)

    @compiler.do_not_compile_alone
    def _context_of_loss(self, name: str, args: list[Any]) -> AbstractContextManager[object]:
        """Return the context of a loss function."""
        self._script.losses.setdefault(name)
        # On float32, which models return, autocast changes nothing.
        tensors = (arg for arg in args if isinstance(arg, torch.Tensor))
        device = next((t.device.type for t in tensors if t.dtype is self._dtype), None)
        if device is None or not self._may_enter(device):
            return nullcontext()
        return self._context(device, None)

    def _may_enter(self, device: str) -> bool:
        # An exported or traced program runs elsewhere and cannot keep a policy.
        if modes.is_jit_tracing() or compiler.is_exporting():
            return False
        if modes.is_tracing_before_autocast():
            return False
        if not torch.amp.is_autocast_available(device):
            return False
        if current_scope().policies or torch.is_autocast_enabled(device):
            # In the backward pass it is our own, restored by a checkpoint.
            if autograd.backward_number() < 0 and self._script.is_on:
                self._script.note_own_autocast()
            return False
        return True

    def _context(self, device: str, module: nn.Module | None) -> autocast:
        context = self._contexts.get(device)
        if context is None:
            context = autocast(device, self._dtype, policy=self._policy, module=module)
            self._contexts[device] = context
        return context


def _why_not_scaled(module: nn.Module) -> str | None:
    """Return why the gradients of a model cannot be scaled from outside; None if they can."""
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
    """Return the module inside compiled or replicated wrappers, as the script knows it."""
    inner = compiler.compiled_from(module) or getattr(module, "module", None)
    return _unwrapped(inner) if isinstance(inner, nn.Module) else module


# --- outputs in float32 ---------------------------------------------------------------------------


@compiler.do_not_compile_alone
def in_float32(value: Any, lower: torch.dtype) -> Any:
    """Return ``value`` with every tensor in it that has the dtype ``lower`` as float32.

    Searches lists, tuples, named tuples, mappings (such as a transformers ``ModelOutput``) and
    dataclasses, nested in any way. A container without such tensors is returned itself, not a copy;
    objects of other classes, such as a key-value cache, stay unchanged. Sync: none.
    """
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype is lower else value
    if isinstance(value, MutableMapping):
        return _mapping(value, lower)
    if isinstance(value, list | tuple):
        return _sequence(value, lower)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _dataclass(value, lower)
    return value


def _sequence(value: Any, lower: torch.dtype) -> Any:
    items = [in_float32(item, lower) for item in value]
    if all(item is old for item, old in zip(items, value, strict=True)):
        return value
    make = getattr(type(value), "_make", type(value))  # a named tuple takes its fields one by one
    return make(items)


def _mapping(value: MutableMapping[Any, Any], lower: torch.dtype) -> Any:
    items = {key: in_float32(item, lower) for key, item in value.items()}
    if all(items[key] is item for key, item in value.items()):
        return value
    result = copy.copy(value)  # keeps the attributes of its class
    for key, item in items.items():
        result[key] = item
    return result


def _dataclass(value: Any, lower: torch.dtype) -> Any:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    changed = {name: in_float32(item, lower) for name, item in fields.items()}
    if all(changed[name] is item for name, item in fields.items()):
        return value
    result = copy.copy(value)
    for name, item in changed.items():
        object.__setattr__(result, name, item)  # it may be frozen
    return result
