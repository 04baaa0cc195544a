"""What happened, how bad it is, and what to do, in sentences: all that a tired person reads."""

from __future__ import annotations

import re
from collections.abc import Iterator

from halfstep._common.numbers import percent, things
from halfstep._common.text import SEVERITIES, Code, Sentence, Severity, say
from halfstep._report import about_diagnoses, about_steps, about_tensors
from halfstep._report.summary import Summary

__all__ = ["Code", "Sentence", "Severity", "sentences"]


def about_loss_and_skips(summary: Summary) -> list[Sentence]:
    """Say when steps were bad or skipped and, unless that is known, how to learn which op it is."""
    loss, skips = list(about_steps.about_loss(summary)), list(about_steps.about_skips(summary))
    # A run whose bad steps could not be replayed has been asked already.
    if summary.bad_places or any("was not replayed" in note.text for note in summary.notes):
        return [*loss, *skips]
    if summary.steps.reasons.keys() == {"norm"}:  # no op is to blame
        return [*about_diagnoses.with_advice(loss), *skips]
    return about_diagnoses.with_advice([*loss, *skips])


_TOPICS = (
    about_steps.about_end,
    about_diagnoses.about_diagnoses,
    about_loss_and_skips,
    about_tensors.about_non_finite,
    about_steps.about_scale,
    about_tensors.about_underflow,
    about_tensors.about_range,
    about_tensors.about_zeros,
    about_tensors.about_samples,
)


def sentences(summary: Summary) -> tuple[Sentence, ...]:
    """Return what is to be said about a run, the worst first.

    If nothing is bad and nothing a warning, the first sentence says so with the numbers.
    """
    found = [sentence for topic in _TOPICS for sentence in topic(summary)]
    if summary.steps.after_growth:
        found.append(about_steps.after_growth(summary))
    found += _notes(summary)
    if not any(sentence.severity in ("bad", "warning") for sentence in found):
        return (_all_is_well(summary), *found)
    if summary.steps.start_up:
        found.append(say("notice", f"{about_steps.start_up(summary)}."))
    return tuple(sorted(found, key=lambda sentence: SEVERITIES.index(sentence.severity)))


def _notes(summary: Summary) -> Iterator[Sentence]:
    for note in summary.notes:
        severity: Severity = "bad" if "ranks disagree" in note.text else "notice"
        is_dated = not note.step or re.search(r"\bstep \d", note.text) is not None
        yield say(severity, "" if is_dated else f"Step {note.step}: ", f"{note.text.rstrip('.')}.")


def _all_is_well(summary: Summary) -> Sentence:
    steps = summary.steps
    parts = [f"All is well: {things(steps.num, 'step')}"]
    if not steps.num_skipped:
        parts.append("none skipped")
    elif steps.num_skipped_later:
        parts.append(f"{percent(steps.share_skipped_later)} skipped")
    elif steps.start_up:
        parts.append(about_steps.start_up(summary))
    course = about_steps.about_course(summary)
    parts += [course] if course else []
    if summary.gradients is not None:
        share = about_tensors.worst_share_lost(summary)
        most = f"at most {percent(share)} of the gradient entries of a parameter underflow"
        parts.append(most if share else "no gradient underflows")
    return say("good", "; ".join(parts) + ".")
