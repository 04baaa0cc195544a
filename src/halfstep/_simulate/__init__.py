"""Simulation of a lower precision, on a machine that need not have it."""

from halfstep._simulate.simulate import simulate

__all__ = ["simulate"]
