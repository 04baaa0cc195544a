"""Which dtype each op runs in: policies, and the context that carries them out."""

from halfstep.casting.context import autocast
from halfstep.casting.custom_function import custom_bwd, custom_fwd
from halfstep.casting.islands import keep
from halfstep.casting.policy import Policy, preset
from halfstep.casting.rule import Rule
from halfstep.casting.weight_cache import hold_casts

__all__ = [
    "Policy",
    "Rule",
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "hold_casts",
    "keep",
    "preset",
]
