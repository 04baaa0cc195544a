"""The gradient scale: keep small gradients out of the range where float16 flushes them to zero."""

from halfstep._scaler.outcome import Outcome
from halfstep._scaler.rules import Dynamic, LogMax, Static
from halfstep._scaler.scale_state import Reason
from halfstep._scaler.scaler import GradScaler

__all__ = ["Dynamic", "GradScaler", "LogMax", "Outcome", "Reason", "Static"]
