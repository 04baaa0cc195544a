"""The public names, in the places that they come from."""

from torch.amp import is_autocast_available

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
    "autocast",
    "custom_bwd",
    "custom_fwd",
    "diagnose",
    "doctor",
    "hold_casts",
    "is_autocast_available",
    "keep",
    "preset",
    "record",
    "self_check",
    "simulate",
    "trace",
    "tune",
]
