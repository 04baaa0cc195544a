"""Which dtype each op runs in: policies, and the context that carries them out."""

from halfstep.autocast.context import autocast
from halfstep.autocast.custom_function import custom_bwd, custom_fwd
from halfstep.autocast.policy import Policy, Rule
from halfstep.autocast.presets import preset

__all__ = ["Policy", "Rule", "autocast", "custom_bwd", "custom_fwd", "preset"]
