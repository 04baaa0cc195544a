"""What is said of a run at its end: what it knows without its record, and the last line."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import fmean

from halfstep._common.numbers import at_steps, count, number, percent, things
from halfstep._common.text import names
from halfstep._tools.record.run import Seen

HARMFUL = 0.05
"""The share of lost updates from which on it is said."""


def findings(seen: Seen, *, guard: str, masters: str) -> Iterator[str]:
    """Yield what went wrong, with the options that prevent it; empty where they are of no use."""
    if seen.lost and seen.has_low_weights and fmean(seen.lost) >= HARMFUL:
        share = percent(fmean(seen.lost))
        sampled = things(len(seen.lost), "sampled step")
        yield f"{share} of the updates in {sampled} were lost to rounding{_prevents(masters)}"
    if seen.bad_buffers:
        which = "".join(x if isinstance(x, str) else x.text for x in names(seen.bad_buffers))
        num = things(len(seen.bad_buffers), "buffer")
        yield f"{num} of the model ended with inf or NaN: {which}{_prevents(guard)}"
    if seen.num_bad_taken:
        when = f"{things(seen.num_bad_taken, 'step')} (first: {at_steps([seen.first_bad_taken])})"
        yield f"an optimizer stepped although the loss was inf or NaN, in {when}{_prevents(guard)}"
    if seen.scale is not None and seen.scale < 1 <= seen.first_scale:
        fell = f"from {number(seen.first_scale)} to {number(seen.scale)}"
        yield f"the scale fell {fell}, where it protects no gradient{_prevents(guard)}"


def _prevents(option: str) -> str:
    return f"; halfstep run {option} prevents that" if option else ""


def recorded(num_steps: int, num_skipped: int, seen: Seen) -> str:
    """Return how many steps a run had, and the record has."""
    if seen.problem is None:
        return f"{things(num_steps, 'step')} recorded, {count(num_skipped)} skipped"
    return (
        f"{things(num_steps, 'step')}, {count(num_skipped)} skipped, of which the record has "
        f"{count(seen.num_written)}, because it could not be written ({seen.problem})"
    )
