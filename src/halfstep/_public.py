"""The public names, in the places that they come from."""

from torch.amp import is_autocast_available

from halfstep._autocast import (
    Policy,
    Rule,
    autocast,
    custom_bwd,
    custom_fwd,
    hold_casts,
    keep,
    preset,
)
from halfstep._diagnose.diagnose import diagnose
from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._doctor.doctor import doctor
from halfstep._record.record import record
from halfstep._scaler import Dynamic, GradScaler, LogMax, Outcome, Reason, Static
from halfstep._simulate import simulate
from halfstep._trace import trace
from halfstep._tune import self_check, tune
from halfstep.errors import CallOrderError

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
