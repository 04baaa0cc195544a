"""Lower precision beside float32, module by module: whether it does, and which islands it needs."""

from halfstep.tuning.check import SelfCheck, self_check
from halfstep.tuning.result import Tuned
from halfstep.tuning.tuner import tune

__all__ = ["SelfCheck", "Tuned", "self_check", "tune"]
