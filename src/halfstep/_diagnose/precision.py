"""Precision of a replay: replaces the settings of every autocast region that the step enters."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep._autocast import kernels
from halfstep._autocast.modules import Wrapped, matching, name_modules, unwrap
from halfstep._autocast.policy import Policy, preset
from halfstep._autocast.region import Region, Settings, changed
from halfstep._common.patches import Patches
from halfstep._pytorch import amp


@dataclass(frozen=True)
class Precision:
    """Dtype and policy of autocast in a replay.

    Attributes:
        dtype: The lower precision; float32 for no autocast, None for that of the step.
        policy: The policy; None for that of the step.
    """

    dtype: torch.dtype | None = None
    policy: Policy | None = None

    def settings(self, asked: Settings) -> Settings:
        """Return the settings of this precision for a region of the step."""
        # Without a cache: cached casts of weights would be missing among the ops of a replay.
        switches = asked.switches._replace(cache=False)
        if not switches.enabled:
            return asked
        if self.dtype is torch.float32:
            return Settings(switches._replace(enabled=False), None, inherit=False)
        if self.dtype is not None:
            switches = switches._replace(dtype=self.dtype)
        if self.policy is None:
            return asked._replace(switches=switches)
        return Settings(switches, kernels.prepare(self.policy, switches.device), inherit=False)


UNCHANGED = Precision()
"""The precision of the step itself."""


@dataclass(frozen=True)
class EnteredAutocast:
    """Autocast region that a step has entered.

    Attributes:
        device: The device type.
        dtype: The lower precision.
        policy: The policy; None for that of plain ``torch.autocast``.
    """

    device: str
    dtype: torch.dtype
    policy: Policy | None


@contextmanager
def autocast_as(
    precision: Precision, model: nn.Module | None, patches: Patches
) -> Iterator[list[EnteredAutocast]]:
    """Apply a precision to every autocast region that is entered in the block.

    Args:
        precision: The precision.
        model: The model that rules for modules refer to.
        patches: Patches of methods of ``torch.autocast``, which the caller undoes.

    Yields:
        The regions that the step enters, each once, in order.
    """
    entered: list[EnteredAutocast] = []

    def change(asked: Settings) -> Settings:
        if asked.switches.enabled:
            policy = None
            if asked.policy is not None:
                policy = kernels.prepared(asked.policy).policy
            found = EnteredAutocast(asked.switches.device, asked.switches.dtype, policy)
            if found not in entered:
                entered.append(found)
        return precision.settings(asked)

    with ExitStack() as stack:
        if precision.policy is not None and precision.policy.module_rules:
            stack.enter_context(_named(model, precision.policy))
        stack.enter_context(changed(change))
        _follow_torch_autocast(patches, precision, change)
        yield entered


@contextmanager
def _named(model: nn.Module | None, policy: Policy) -> Iterator[None]:
    """Name the modules of a model for which a policy has rules, in the block."""
    found: dict[nn.Module, str | None] = {}
    if model is not None:
        for rule in policy.module_rules:
            for module in matching(model, rule.module or "", f"policy rule {rule}").values():
                found[module] = getattr(module, "_path", "") if _is_wrapped(module) else None
    try:
        name_modules(model, policy)
        yield
    finally:
        for module, path in found.items():
            if _is_wrapped(module):
                module._path = path or ""  # type: ignore[assignment]
                unwrap(module)


def _is_wrapped(module: nn.Module) -> bool:
    return isinstance(module, Wrapped)


def _follow_torch_autocast(
    patches: Patches, precision: Precision, entered: Callable[[Settings], Settings]
) -> None:
    """Observe plain ``torch.autocast``, and change it unless the precision is that of the step."""
    regions: dict[int, list[Region]] = {}

    def enter(original: Any, context: Any) -> Any:
        switches = amp.switches_of(context)
        if precision == UNCHANGED:
            entered(Settings(switches, None, inherit=False))
            return original(context)
        number = kernels.prepare(preset("torch"), switches.device) if switches.enabled else None
        region = Region(Settings(switches, number, inherit=False))
        region.__enter__()
        regions.setdefault(id(context), []).append(region)
        return context

    def leave(original: Any, context: Any, *error: Any) -> Any:
        if precision == UNCHANGED:
            return original(context, *error)
        regions[id(context)].pop().__exit__(*error)
        return None

    patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", enter)
    patches.wrap(torch.amp.autocast_mode.autocast, "__exit__", leave)
