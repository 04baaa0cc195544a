"""Which dtype each op runs in: policies, and the context that carries them out."""

from halfstep.casting.context import autocast
from halfstep.casting.custom_function import custom_bwd, custom_fwd
from halfstep.casting.islands import keep
from halfstep.casting.policy import Policy, preset
from halfstep.casting.rule import Rule
from halfstep.casting.weight_cache import cache_info, clear_cache, limit_cache

__all__ = [
    "Policy",
    "Rule",
    "autocast",
    "cache_info",
    "clear_cache",
    "custom_bwd",
    "custom_fwd",
    "keep",
    "limit_cache",
    "preset",
]
