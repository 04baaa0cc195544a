"""Variants of a replay: changed settings of its autocast regions, and float32 parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from halfstep._autocast import HALVES, Policy, Region, Settings, preset
from halfstep._autocast.access import changed, named, policy_of, with_policy
from halfstep._common.nested import map_plain
from halfstep._pytorch import amp
from halfstep._tools.patches import Patches


@dataclass(frozen=True)
class Variant:
    """Settings of a replay that differ from the step; None leaves a setting unchanged."""

    dtype: torch.dtype | None = None  # lower precision of autocast; float32 turns autocast off
    policy: Policy | None = None  # policy of autocast
    scale: float | None = None  # scale of all losses

    def settings(self, asked: Settings) -> Settings:
        # The cache is off, since cached casts of weights would be missing from the observed ops.
        switches = asked.switches._replace(cache=False)
        if not switches.enabled:
            return asked
        if self.dtype is torch.float32:
            return Settings(switches._replace(enabled=False), None, inherit=False)
        if self.dtype is not None:
            switches = switches._replace(dtype=self.dtype)
        if self.policy is None:
            return asked._replace(switches=switches)
        changed = Settings(switches, None, inherit=False)
        return with_policy(changed, self.policy, only_observed=True)


@dataclass(frozen=True)
class EnteredAutocast:
    """Autocast region that a step entered; the policy is None for plain ``torch.autocast``."""

    device: str
    dtype: torch.dtype
    policy: Policy | None


@contextmanager
def autocast_as(
    variant: Variant, model: nn.Module | None, patches: Patches
) -> Iterator[list[EnteredAutocast]]:
    """Apply a variant to every autocast region that is entered in the block.

    Yields the list of entered regions, each once, in order. Module rules refer to ``model``. The
    caller undoes the patches, which replace methods of ``torch.autocast``.
    """
    entered: list[EnteredAutocast] = []

    def change(asked: Settings) -> Settings:
        switches = asked.switches
        if switches.enabled:
            found = EnteredAutocast(switches.device, switches.dtype, policy_of(asked))
            if found not in entered:
                entered.append(found)
        return variant.settings(asked)

    with ExitStack() as stack:
        if variant.policy is not None and variant.policy.module_rules:
            stack.enter_context(named(model, variant.policy))
        stack.enter_context(changed(change))
        _follow_torch_autocast(patches, change, variant)
        yield entered


def _follow_torch_autocast(
    patches: Patches, change: Callable[[Settings], Settings], variant: Variant
) -> None:
    """Observe plain ``torch.autocast``, and replace it if a variant changes autocast."""
    regions: dict[int, list[Region]] = {}
    is_changed = variant.dtype is not None or variant.policy is not None
    has_own_rules = variant.policy is None and variant.dtype is not torch.float32

    def enter(original: Any, context: Any) -> Any:
        switches = amp.switches_of(context)
        if not is_changed:
            change(Settings(switches, None, inherit=False))
            return original(context)
        # A checkpoint re-enters torch.autocast for a halfstep.autocast region: keep its policy.
        settings = Settings(switches, None, inherit=True)
        if switches.enabled and has_own_rules:
            settings = with_policy(settings, preset("torch"), only_observed=True)
        region = Region(settings)
        region.__enter__()
        regions.setdefault(id(context), []).append(region)
        return context

    def leave(original: Any, context: Any, *error: Any) -> Any:
        if not is_changed:
            return original(context, *error)
        regions[id(context)].pop().__exit__(*error)
        return None

    patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", enter)
    patches.wrap(torch.amp.autocast_mode.autocast, "__exit__", leave)


# --- models with parameters in lower precision ----------------------------------------------------


def half_of(modules: Iterable[nn.Module]) -> tuple[str, torch.dtype] | None:
    """Return the device type and dtype of the first lower-precision parameter, or None."""
    params = chain.from_iterable(module.parameters() for module in modules)
    return next(((p.device.type, p.dtype) for p in params if p.dtype in HALVES), None)


@contextmanager
def float32_parameters(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Cast parameters and buffers to float32; the undo log of the replay restores them."""
    for module in modules:
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.dtype in HALVES:
                tensor.grad = None
                tensor.data = tensor.data.float()
    yield


@contextmanager
def all_in_float32(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Compute in float32 with float32 parameters, even if the code casts to lower precision."""
    with float32_parameters(modules), _InFloat32():
        yield


class _InFloat32(TorchFunctionMode):
    """Function mode that casts arguments to float32 and replaces casts to lower precision."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = map_plain(_widened, (args, kwargs or {}))
        if getattr(func, "__name__", "") in ("half", "bfloat16"):
            return args[0].float()
        return func(*args, **kwargs)


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.float() if value.dtype in HALVES else value
    return torch.float32 if isinstance(value, torch.dtype) and value in HALVES else value
