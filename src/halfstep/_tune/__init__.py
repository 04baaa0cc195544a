"""Lower precision beside float32, module by module: whether it does, and which islands it needs."""

from halfstep._tune.check import SelfCheck, self_check
from halfstep._tune.result import Tuned
from halfstep._tune.tuner import tune

__all__ = ["SelfCheck", "Tuned", "self_check", "tune"]
