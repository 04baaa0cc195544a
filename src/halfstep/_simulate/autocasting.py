"""Autocast for a whole block: on for forward passes and losses, off in backward passes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from halfstep._autocast import kernels
from halfstep._autocast.policy import Policy
from halfstep._autocast.region import Region, Settings
from halfstep._pytorch import amp

_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)


@contextmanager
def autocast_forward(devices: list[str], dtype: torch.dtype, policy: Policy) -> Iterator[None]:
    """Lower the ops of a block, also to a dtype that the device does not compute in.

    Casts of weights are not kept: each is to be counted, and none to outlive the block.

    Args:
        devices: The device types.
        dtype: What to lower to.
        policy: The policy.
    """
    with ExitStack() as stack:
        for device in devices:
            switches = amp.Switches(device, dtype, True, False)
            number = kernels.prepare(policy, device)
            stack.enter_context(Region(Settings(switches, number, inherit=False)))
        stack.enter_context(_OffInBackward(devices))
        yield


@cache
def without_lowering(policy: Policy) -> Policy:
    """Return a policy that has rules for the same ops, but float32 where ``policy`` lowers.

    Autocast cannot lower to float8. Nor does it help to lower to float32: checkpointed functions
    are then recomputed without autocast.
    """
    return Policy(
        replace(rule, action="fp32") if rule.action == "lower" else rule for rule in policy.rules
    )


class _OffInBackward(TorchFunctionMode):
    """Switches autocast off for backward passes, in which it would lower what ran in float32."""

    def __init__(self, devices: list[str]) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with ExitStack() as stack:
            if func in _BACKWARD:
                for device in self._devices:
                    outside = amp.autocast_switches(device)
                    switches = outside._replace(enabled=False)
                    stack.enter_context(Region(Settings(switches, None, inherit=False)))
            return func(*args, **(kwargs or {}))
