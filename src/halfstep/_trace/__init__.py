"""Trace: every op of a block with its module, dtypes, rule, casts and time; and what is wasted."""

from halfstep._trace.recording import Recording
from halfstep._trace.trace import trace

__all__ = ["Recording", "trace"]
