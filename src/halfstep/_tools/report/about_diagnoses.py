"""Sentences about bad steps that were replayed: the op, the reason and the cure."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import suppress

from halfstep._common.numbers import at_steps, things
from halfstep._common.text import SEVERITIES, Code, Sentence, Severity, say
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis, parts
from halfstep._tools.report.about_steps import severity_of_skips
from halfstep._tools.report.summary import BadPlace, Summary

MOST_PLACES = 5
"""The largest number of places with a sentence of their own; the rest are counted."""
_REPLAYED = {
    True: " Cure, confirmed by a replay: ",
    False: " Tried, and not enough: ",
    None: " This should help: ",
}


def about_diagnoses(summary: Summary) -> Iterator[Sentence]:
    """Yield sentences on which ops made steps bad, with the cures."""
    weights, first = {x.name for x in summary.of_kind("parameter")}, summary.went_bad_at
    for place in summary.bad_places[:MOST_PLACES]:
        # An op that reads a weight which an earlier bad step has left with inf or NaN.
        follows = first is not None and first < place.steps[0] and place.diagnosis.tensor in weights
        yield say(
            severity_of(place, summary),
            when(place, summary).capitalize(),
            *_what(place.diagnosis),
            ".",
            cure=_cure(place.diagnosis.cure),
            evidence="diagnoses",
            follows=follows,
        )
    left = summary.bad_places[MOST_PLACES:]
    if left:
        severities = [severity_of(place, summary) for place in left]
        yield say(
            min(severities, key=SEVERITIES.index),
            f"{things(len(left), 'more place')} went bad in other steps.",
            evidence="diagnoses",
        )


def severity_of(place: BadPlace, summary: Summary) -> Severity:
    """Return the severity of a place; a too large scale is as bad as the skips that it caused."""
    if place.diagnosis.verdict == "none":
        return "notice"
    steps = summary.steps
    if place.diagnosis.verdict != "scale" or not set(steps.skipped) >= set(place.steps):
        return "bad"
    return "notice" if set(steps.later).isdisjoint(place.steps) else severity_of_skips(steps)


def when(place: BadPlace, summary: Summary) -> str:
    """Return the steps and, if there are several processes, the ranks: ``step 3 on rank 1``."""
    steps = at_steps(place.steps)
    return steps if summary.facts.world_size == 1 else f"{steps} on {at_steps(place.ranks, 'rank')}"


def _what(found: Diagnosis) -> Iterator[str | Code]:
    """Yield what made the steps bad, as a text that follows the step numbers."""
    yield " went bad"
    if found.verdict == "none":
        yield ", but in the replay every loss and gradient was finite"
    else:
        yield ": "
        yield from parts(found)
    if found.verdict in ("none", "unknown") and found.notes:
        yield f" ({'; '.join(found.notes)})"


def _cure(cure: Cure | None) -> Iterator[str | Code]:
    if cure is None:
        return
    if cure.kind == "data":  # nothing to paste
        yield f" What to do: {cure.text}"
    else:
        yield _REPLAYED[cure.is_finite]
        for number, text in enumerate(cure.text.splitlines()):
            yield " " if number else ""
            yield Code(text.strip()) if _is_code(text.strip()) else text.strip()
    yield "."


def _is_code(text: str) -> bool:
    """Return whether a line is Python, such as the head of a block, and no sentence."""
    with suppress(SyntaxError):
        ast.parse(text if not text.split("  #")[0].endswith(":") else f"{text}\n    pass")
        return True
    return False
