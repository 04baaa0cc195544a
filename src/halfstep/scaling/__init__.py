"""The gradient scale: keep small gradients out of the range where float16 flushes them to zero."""

from halfstep.scaling.outcome import Outcome
from halfstep.scaling.rules import Dynamic, LogMax, Static
from halfstep.scaling.scaler import GradScaler
from halfstep.scaling.state import Reason

__all__ = ["Dynamic", "GradScaler", "LogMax", "Outcome", "Reason", "Static"]
