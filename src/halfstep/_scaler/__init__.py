"""Dynamic loss scaling: keeps small gradients from underflowing in float16.

Other rooms know these names, and :mod:`halfstep._scaler.access`.
"""

from halfstep._scaler.guard import Guard, GuardScaler, guard, is_guarded
from halfstep._scaler.journal import DueSchedules
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import Outcome, pack, unpack
from halfstep._scaler.scale_state import Dynamic, Reason, Static
from halfstep._scaler.scaler import GradScaler

__all__ = [
    "DueSchedules",
    "Dynamic",
    "GradScaler",
    "Guard",
    "GuardScaler",
    "LossScale",
    "Outcome",
    "Reason",
    "Static",
    "guard",
    "is_guarded",
    "pack",
    "unpack",
]
