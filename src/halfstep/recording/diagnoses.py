"""A diagnosis as an event of a record, and back."""

from __future__ import annotations

from dataclasses import asdict

from halfstep.decoding import decoded
from halfstep.diagnosing.diagnosis import Diagnosis
from halfstep.recording.lines import Event


def event_of(diagnosis: Diagnosis, step: int) -> Event:
    """Return the event that says what a diagnosis has found of a step."""
    return {"event": "diagnosis", "step": step, **asdict(diagnosis)}


def diagnosis_of(event: Event) -> Diagnosis:
    """Return the diagnosis in an event; what it does not know of in it is left out.

    Every part is looked at: what is made of a record may trust in the types.

    Raises:
        KeyError: It lacks a part.
        TypeError: A part is of another type.
        ValueError: A word is none of those that are known, or a text is no number.
    """
    return decoded(Diagnosis, event)
