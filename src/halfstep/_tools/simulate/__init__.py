"""Simulation of lower precision, on machines with or without it."""

from halfstep._tools.simulate.simulate import simulate

__all__ = ["simulate"]
