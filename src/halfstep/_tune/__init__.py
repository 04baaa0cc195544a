"""Versions of a model beside each other: self-checks, tuning, comparisons."""

from halfstep._tune.check import SelfCheck, self_check
from halfstep._tune.compare import Drift, compare
from halfstep._tune.tuner import Tuned, tune

__all__ = ["Drift", "SelfCheck", "Tuned", "compare", "self_check", "tune"]
