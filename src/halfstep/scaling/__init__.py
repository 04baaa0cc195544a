"""The gradient scale: keep small gradients out of the range where float16 flushes them to zero."""

from halfstep.scaling.outcomes.outcome import Outcome
from halfstep.scaling.scale.rules import Dynamic, LogMax, Static
from halfstep.scaling.scale.state import Reason
from halfstep.scaling.scaler import GradScaler

__all__ = ["Dynamic", "GradScaler", "LogMax", "Outcome", "Reason", "Static"]
