"""What ran: every op with its module, dtypes, rule, casts and time; and what is wasted."""

from halfstep.tracing.recording import Recording
from halfstep.tracing.trace import trace

__all__ = ["Recording", "trace"]
