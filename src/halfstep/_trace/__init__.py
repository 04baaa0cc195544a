"""Trace: every op of a block with its module, dtypes, rule, casts and time; and what is wasted."""
