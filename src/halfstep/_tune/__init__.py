"""Tuning of lower precision against float32: self-checks of a model, and the islands it needs."""

from halfstep._tune.check import SelfCheck, self_check
from halfstep._tune.tuner import Tuned, tune

__all__ = ["SelfCheck", "Tuned", "self_check", "tune"]
