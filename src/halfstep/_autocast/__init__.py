"""Policies, which assign a dtype to each op, and the autocast context that applies them."""

from halfstep._autocast.context import (
    autocast,
    custom_bwd,
    custom_fwd,
    default_device,
    settled_policy,
    use_policy,
)
from halfstep._autocast.modules import keep, name_modules
from halfstep._autocast.policy import Policy, preset
from halfstep._autocast.region import Region, current_policy, current_settings
from halfstep._autocast.rule import HALVES, LOWER_PRECISIONS, Action, Rule, holds_where
from halfstep._autocast.scopes import Settings

__all__ = [
    "HALVES",
    "LOWER_PRECISIONS",
    "Action",
    "Policy",
    "Region",
    "Rule",
    "Settings",
    "autocast",
    "current_policy",
    "current_settings",
    "custom_bwd",
    "custom_fwd",
    "default_device",
    "holds_where",
    "keep",
    "name_modules",
    "preset",
    "settled_policy",
    "use_policy",
]
