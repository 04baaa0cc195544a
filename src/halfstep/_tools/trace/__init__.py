"""Traces: every op of a block with module, dtypes, rule, casts and time."""
