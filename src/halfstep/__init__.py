"""Automatic mixed precision for PyTorch that is safe, visible and editable.

The calls of ``torch.amp``, implemented anew: change the import, keep the code.

>>> from halfstep import GradScaler, autocast
"""

from halfstep.casting import (
    Policy,
    Rule,
    autocast,
    custom_bwd,
    custom_fwd,
    hold_casts,
    keep,
    preset,
)
from halfstep.diagnosing.diagnose import diagnose
from halfstep.diagnosing.diagnosis import Diagnosis
from halfstep.doctoring.checkup import doctor
from halfstep.errors import CallOrderError
from halfstep.recording.record import record
from halfstep.scaling import Dynamic, GradScaler, LogMax, Outcome, Reason, Static
from halfstep.simulating import simulate
from halfstep.tracing import trace
from halfstep.tuning import self_check, tune

__version__ = "0.1.0.dev0"

__all__ = [
    "CallOrderError",
    "Diagnosis",
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
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "doctor",
    "hold_casts",
    "keep",
    "preset",
    "record",
    "self_check",
    "simulate",
    "trace",
    "tune",
]
