"""Simulation of lower precision, on machines with or without it."""

from halfstep._simulate.simulate import simulate

__all__ = ["simulate"]
