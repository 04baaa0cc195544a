"""Policies, which assign a dtype to each op, and the autocast context that applies them."""

from halfstep._autocast.context import (
    autocast,
    custom_bwd,
    custom_fwd,
    default_device,
    settled_policy,
    use_policy,
)
from halfstep._autocast.modules import keep
from halfstep._autocast.policy import Policy, preset
from halfstep._autocast.rule import Rule

__all__ = [
    "Policy",
    "Rule",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "default_device",
    "keep",
    "preset",
    "settled_policy",
    "use_policy",
]
