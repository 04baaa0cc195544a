"""Dynamic loss scaling: keeps small gradients from underflowing in float16."""

from halfstep._scaler.outcome import Outcome
from halfstep._scaler.rules import Dynamic, Static
from halfstep._scaler.scale_state import Reason
from halfstep._scaler.scaler import GradScaler

__all__ = ["Dynamic", "GradScaler", "Outcome", "Reason", "Static"]
