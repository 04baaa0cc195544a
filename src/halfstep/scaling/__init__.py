"""The gradient scale: keep small gradients out of the range where float16 flushes them to zero."""

from halfstep.scaling.scaler import GradScaler

__all__ = ["GradScaler"]
