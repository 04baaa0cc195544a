"""A replay in another precision: what every autocast of the step switches on instead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from halfstep._autocast import kernels
from halfstep._autocast.module_names import matching
from halfstep._autocast.named_modules import name_modules
from halfstep._autocast.policy import Policy, preset
from halfstep._autocast.region import Region, Settings, changed
from halfstep._autocast.wrapping import Wrapped, unwrap
from halfstep._common.patches import Patches
from halfstep._pytorch import amp


@dataclass(frozen=True)
class Precision:
    """What autocast is to do in a replay.

    Attributes:
        dtype: The lower precision, float32 for no autocast, None for that of the step.
        policy: The policy; None for that of the step.
    """

    dtype: torch.dtype | None = None
    policy: Policy | None = None

    def settings(self, asked: Settings) -> Settings:
        """Return what is switched on where a step has asked for something."""
        # Kept casts of weights would be missing from the ops of a replay, and some would overflow.
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


AS_IT_IS = Precision()
"""That of the step."""


@dataclass(frozen=True)
class Entered:
    """What a step has asked of autocast.

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
) -> Iterator[list[Entered]]:
    """Let every autocast that is entered meanwhile be as ``precision`` says.

    Args:
        precision: What is to be switched on.
        model: The one that rules for modules are about.
        patches: Takes back what is put in the place of methods of ``torch.autocast``.

    Yields:
        What the step asks for, in the order in which it first does.
    """
    entered: list[Entered] = []

    def change(asked: Settings) -> Settings:
        if asked.switches.enabled:
            policy = None
            if asked.policy is not None:
                policy = kernels.prepared(asked.policy).policy
            found = Entered(asked.switches.device, asked.switches.dtype, policy)
            if found not in entered:
                entered.append(found)
        return precision.settings(asked)

    with ExitStack() as stack:
        if precision.policy is not None and precision.policy.module_rules:
            stack.enter_context(_named(model, precision.policy))
        stack.enter_context(changed(change))
        _follow_torchs(patches, precision, change)
        yield entered


@contextmanager
def _named(model: nn.Module | None, policy: Policy) -> Iterator[None]:
    """Tell the modules of a model their names by which a policy has rules for them, for a while."""
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


def _follow_torchs(
    patches: Patches, precision: Precision, entered: Callable[[Settings], Settings]
) -> None:
    """Let plain ``torch.autocast`` be seen and, if anything is to change, changed."""
    regions: dict[int, list[Region]] = {}

    def enter(original: Any, context: Any) -> Any:
        switches = amp.switches_of(context)
        if precision == AS_IT_IS:
            entered(Settings(switches, None, inherit=False))
            return original(context)
        number = kernels.prepare(preset("torch"), switches.device) if switches.enabled else None
        region = Region(Settings(switches, number, inherit=False))
        region.__enter__()
        regions.setdefault(id(context), []).append(region)
        return context

    def leave(original: Any, context: Any, *error: Any) -> Any:
        if precision == AS_IT_IS:
            return original(context, *error)
        regions[id(context)].pop().__exit__(*error)
        return None

    patches.wrap(torch.amp.autocast_mode.autocast, "__enter__", enter)
    patches.wrap(torch.amp.autocast_mode.autocast, "__exit__", leave)
