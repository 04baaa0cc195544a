"""Automatic mixed precision for PyTorch that is safe, visible and editable.

The calls of ``torch.amp``, implemented anew: change the import, keep the code.

>>> from halfstep import GradScaler, autocast
"""

from halfstep.casting import (
    Policy,
    Rule,
    autocast,
    cache_info,
    clear_cache,
    custom_bwd,
    custom_fwd,
    keep,
    limit_cache,
    preset,
)
from halfstep.errors import CallOrderError
from halfstep.recording.record import record
from halfstep.scaling import Dynamic, GradScaler, LogMax, Outcome, Reason, Static
from halfstep.tracing import trace

__version__ = "0.1.0.dev0"

__all__ = [
    "CallOrderError",
    "Dynamic",
    "GradScaler",
    "LogMax",
    "Outcome",
    "Policy",
    "Reason",
    "Rule",
    "Static",
    "__version__",
    "autocast",
    "cache_info",
    "clear_cache",
    "custom_bwd",
    "custom_fwd",
    "keep",
    "limit_cache",
    "preset",
    "record",
    "trace",
]
