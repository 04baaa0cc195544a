"""The sentences about a run: the causes first, then what followed from them, then the rest."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace

from halfstep._common.numbers import count, percent, things
from halfstep._common.text import SEVERITIES, Sentence, Severity, say
from halfstep._report import about_diagnoses, about_steps, about_tensors
from halfstep._report.summary import Summary

FOLLOWED = "What followed"
"""The heading over the consequences of a problem, in all forms."""


def about_loss_and_skips(summary: Summary) -> list[Sentence]:
    """Return when steps were bad or skipped and, if unknown, how to find the op."""
    loss, skips = list(about_steps.about_loss(summary)), list(about_steps.about_skips(summary))
    # A run whose bad steps could not be replayed was already run with --diagnose.
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
    about_tensors.about_updates,
    about_tensors.about_underflow,
    about_tensors.about_range,
    about_tensors.about_zeros,
    about_tensors.about_samples,
)


def sentences(summary: Summary) -> tuple[Sentence, ...]:
    """Return the sentences about a run, the worst first.

    Without problems and warnings, the first sentence says so, with the numbers. What followed from
    a problem stands behind it, and has no cure: its cause has one. Nor has a mere notice.
    """
    found = [sentence for topic in _TOPICS for sentence in topic(summary)]
    found += _notes(summary)
    if not any(_is_problem(each) for each in found):
        found.insert(0, _all_is_well(summary))
    if not any(_is_problem(each) and not each.follows for each in found):
        found = [replace(each, follows=False) for each in found]
    found = [
        replace(each, cure=()) if each.follows or each.severity == "notice" else each
        for each in found
    ]
    return _in_order(found)


def _is_problem(sentence: Sentence) -> bool:
    return sentence.severity in ("bad", "warning")


def _in_order(found: list[Sentence]) -> tuple[Sentence, ...]:
    """Return the sentences, the worst first; what followed stands behind the worst causes.

    The first cause is as bad as the worst that followed from it.
    """
    if found[0].severity == "good":
        return tuple(found)
    followed = [each for each in found if each.follows]
    causes = sorted((each for each in found if not each.follows), key=_badness)
    worst = min(map(_badness, found))
    causes[0] = replace(causes[0], severity=SEVERITIES[worst])
    num = sum(_badness(each) == worst for each in causes)
    return (*causes[:num], *sorted(followed, key=_badness), *causes[num:])


def _badness(sentence: Sentence) -> int:
    return SEVERITIES.index(sentence.severity)


def _notes(summary: Summary) -> Iterator[Sentence]:
    for note in summary.notes:
        severity: Severity = "bad" if "ranks disagree" in note.text else "notice"
        is_dated = not note.step or re.search(r"\bstep \d", note.text) is not None
        yield say(severity, "" if is_dated else f"Step {note.step}: ", f"{note.text.rstrip('.')}.")


def _all_is_well(summary: Summary) -> Sentence:
    steps = summary.steps
    parts = [f"All is well: {things(steps.num, 'step')}"]
    num = count(steps.num_skipped) if steps.num_skipped else "none"
    parts.append(f"{num} skipped{about_steps.kinds_of_skips(steps)}")
    course = about_steps.about_course(summary)
    parts += [course] if course else []
    layers = summary.of_kind("parameter_gradient")
    if layers:
        worst = max(layers, key=lambda layer: layer.share_lost)
        if worst.share_lost:
            of_all = f"at most {percent(worst.share_lost)} of the gradient entries of a parameter"
            parts.append(f"{of_all} {about_tensors.underflow(summary, worst)}")
        else:
            parts.append(f"no gradient {about_tensors.underflow(summary, worst, 's')}")
    if summary.lost_updates is not None and any(x.is_low_weight for x in summary.layers):
        share = summary.lost_updates.recent or 0.0
        parts.append(f"{percent(share)} of the updates were lost to rounding")
    return say("good", "; ".join(parts) + ".")
