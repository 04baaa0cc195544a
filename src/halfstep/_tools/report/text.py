"""Text of a report: ordered sentences, lines for a terminal, and JSON."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from textwrap import shorten
from typing import Any

from halfstep._common.numbers import count, listed, percent, things
from halfstep._common.text import SEVERITIES, Sentence, Severity, aligned, one_line, say
from halfstep._tools.json import to_plain
from halfstep._tools.record.run import NOTE_SEVERITIES, Kind, dtypes_text
from halfstep._tools.report import about_steps, about_tensors
from halfstep._tools.report.compare_runs import RunComparison
from halfstep._tools.report.summary import NOTABLE, Summary

FOLLOWED = "What followed"  # the heading of the consequences of a problem, in all forms
SCHEMA = 1  # the version of the `--json` output; it changes unless fields are only added
ENOUGH = 10  # number of steps from which a run without problems is called well
_GRADIENTS: dict[Kind, str] = {"parameter_gradient": "a parameter", "output_gradient": "an output"}


# --- sentences, the causes first ------------------------------------------------------------------


def about_loss_and_skips(summary: Summary) -> list[Sentence]:
    """Return sentences on bad and skipped steps and, if the op is unknown, how to find it."""
    said = [*about_steps.about_loss(summary), *about_steps.about_skips(summary)]
    causes = [n for n, each in enumerate(said) if _is_problem(each) and not each.follows]
    if causes and not (summary.bad_places or summary.facts.header.is_diagnosing):
        first, call = said[causes[0]], about_steps.again(summary.facts, "--diagnose")
        advice = (" To find the op and its cure, run ", call, ".")
        said[causes[0]] = replace(first, cure=first.cure + advice)
    return said


_TOPICS = (
    about_steps.about_end,
    about_steps.about_diagnoses,
    about_loss_and_skips,
    about_steps.about_gradients,
    about_tensors.about_buffers,
    about_tensors.about_non_finite,
    about_tensors.about_motion,
    about_steps.about_rise,
    about_steps.about_scale,
    about_tensors.about_updates,
    about_tensors.about_underflow,
    about_tensors.about_range,
    about_tensors.about_zeros,
    about_tensors.about_samples,
)


def sentences(summary: Summary) -> tuple[Sentence, ...]:
    """Return the sentences about a run, the worst first.

    Without problems and warnings, the first sentence is the verdict on precision, with the numbers.
    Consequences of a problem come after it and have no cure, since their cause has one. Notices
    have no cure either.
    """
    found = [sentence for topic in _TOPICS for sentence in topic(summary)]
    found += _notes(summary)
    is_good = summary.steps.num > 0 and not any(map(_is_problem, found))
    verdict = about_precision(summary, is_good=is_good)
    if not any(_is_problem(each) and not each.follows for each in found):
        found = [replace(each, follows=False) for each in found]
    found = [
        replace(each, cure=()) if each.follows or each.severity == "notice" else each
        for each in found
    ]
    is_first = summary.has_run_lower is False or verdict.severity == "good"
    return (verdict, *_in_order(found)) if is_first else _in_order([*found, verdict])


def _is_problem(sentence: Sentence) -> bool:
    return sentence.severity in ("bad", "warning")


def _in_order(found: list[Sentence]) -> tuple[Sentence, ...]:
    """Return the sentences, the worst first; consequences come after the worst causes.

    The first cause gets the severity of its worst consequence.
    """
    if not found:
        return ()
    followed = [each for each in found if each.follows]
    causes = sorted((each for each in found if not each.follows), key=_badness)
    worst = min(map(_badness, found))
    causes[0] = replace(causes[0], severity=SEVERITIES[worst])
    num = sum(_badness(cause) == worst for cause in causes)
    return (*causes[:num], *sorted(followed, key=_badness), *causes[num:])


def _badness(sentence: Sentence) -> int:
    return SEVERITIES.index(sentence.severity)


def _notes(summary: Summary) -> Iterator[Sentence]:
    for note in summary.notes:
        severities = (each for said, each in NOTE_SEVERITIES.items() if said in note.text)
        severity: Severity = next(severities, "notice")
        is_at_end = note.step > summary.steps.num  # it has the number of a step that never came
        has_step = severity != "notice" or re.search(r"\bstep \d|first step", note.text)
        is_dated = has_step or is_at_end or note.step < 2  # 1: perhaps long before the first
        text = note.text if note.text.endswith((".", "!", "?")) else f"{note.text}."
        if not is_dated:
            text = f"After step {note.step - 1}: {text}"
        elif re.match(r"[a-z]+[ ,:]", text):  # a word, and no name such as torch.amp
            text = text[0].upper() + text[1:]
        yield say(severity, text)


def about_precision(summary: Summary, *, is_good: bool) -> Sentence:
    """Return in which dtypes products ran; if nothing else is bad, with the numbers of the run."""
    ran = dtypes_text(summary.products)
    severity: Severity = "notice"
    said, numbers = f"{ran[0].upper()}{ran[1:]}", _numbers(summary) if is_good else ()
    if summary.has_run_lower is False:
        has_amp = about_steps.has_amp(summary.facts)
        if has_amp or summary.is_lowered or about_steps.is_scaled(summary):
            what = "autocast was on" if summary.is_lowered else "the loss was scaled"
            said += f", although {'--amp was given' if has_amp else what}"
            severity = "warning"
    elif is_good:
        is_fine = summary.steps.num >= ENOUGH and summary.has_run_lower and summary.layers
        severity = "good"
        said = f"{'Precision: fine' if is_fine else 'Nothing bad was seen'}. {said}"
    return say(severity, "; ".join([said, *numbers]) + ".")


def _numbers(summary: Summary) -> Iterator[str]:
    """Yield the numbers of a run without problems."""
    steps = summary.steps
    num = count(steps.num_skipped) if steps.num_skipped else "none"
    yield f"{things(steps.num, 'step')}, {num} skipped{about_steps.kinds_of_skips(steps)}"
    if course := about_steps.about_course(summary):
        yield course
    in_samples = f"in {things(len(summary.sampled), 'sampled step')}"
    for kind, whose in _GRADIENTS.items():
        layers, is_output = summary.of_kind(kind), kind == "output_gradient"
        # No zero shows its cause, nor a sum of several passes what each has lost: zeros are said.
        has_passed = not is_output and any(map(summary.underflows, layers))
        shares = [each.share_zeros if has_passed else each.share_lost for each in layers]
        few = [share for share in shares if is_output or share < NOTABLE]
        most = max(few, default=0.0)
        if few and (most or not is_output):
            who = whose if len(few) == len(layers) else f"{len(few)} of {len(layers)} parameters"
            share = f"at most {percent(most)}" if most else "none"
            would = f"would underflow in {layers[0].format}"
            ends = "are zero, as underflow would make them," if has_passed else would
            yield f"{share} of the gradient entries of {who} {ends} {in_samples}"
    if summary.lost_updates is not None and any(
        x.is_low_weight and x.updates for x in summary.layers
    ):
        yield f"{percent(summary.lost_updates.mean)} of the updates were lost to rounding"


# --- JSON -----------------------------------------------------------------------------------------


def summary_json(summary: Summary, *processes: Summary) -> dict[str, Any]:
    """Return the whole summary with its sentences; inf and NaN are strings, as in the record.

    ``processes``: those of other processes of the run.
    """
    loss = None if summary.losses else summary.loss  # else they are of each optimizer in turn
    norm = None if summary.num_optimizers > 1 else summary.norm
    plain_values: dict[str, Any] = to_plain(asdict(replace(summary, loss=loss, norm=norm)))
    keys = ("severity", "text", "follows")
    said = [{key: getattr(sentence, key) for key in keys} for sentence in sentences(summary)]
    others = list(map(summary_json, processes))
    head = {"schema": SCHEMA, "kind": "report", "sentences": said, "processes": others}
    return head | plain_values


def comparison_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the whole comparison, with the summaries of all runs."""
    verdict = {"severity": comparison.verdict.severity, "text": comparison.verdict.text}
    values: dict[str, Any] = to_plain(asdict(replace(comparison, runs=())))
    runs = [summary_json(run) for run in comparison.runs]
    return {"schema": SCHEMA, "kind": "comparison"} | values | {"verdict": verdict, "runs": runs}


# --- terminal text --------------------------------------------------------------------------------


def summary_text(summary: Summary) -> str:
    """Return the sentences for a terminal."""
    labels = ((FOLLOWED.lower() if s.follows else s.severity, s.text) for s in sentences(summary))
    return "\n".join(f"{label}: {text}" for label, text in labels)


def summary_row(summary: Summary) -> tuple[str, ...]:
    """Return a line of a table of processes: the record, its steps, skips and first problem."""
    said, steps = sentences(summary), summary.steps
    first = next(filter(_is_problem, said), said[0])
    finding = shorten(f"{first.severity}: {first.text}", 100, placeholder=" ...")
    return summary.path, count(steps.num), count(steps.num_skipped), finding


def comparison_text(comparison: RunComparison) -> str:
    """Return the differences between runs for a terminal."""
    names, verdict = [one_line(each) for each in comparison.names], comparison.verdict
    first, *others = (one_line(run.path) for run in comparison.runs)
    is_pair = len(names) == 2
    head = ("", *names, *(["difference"] if is_pair else []))
    entries = ((e.name, *e.texts, *[e.difference] * is_pair) for e in comparison.entries)
    rows = ((what, *map(one_line, texts)) for what, texts in comparison.versions)
    parts = [
        f"{verdict.severity}: {verdict.text}",
        f"{first} against {listed(others)}",
        _table(head, entries),
        _table(("what differs", *names), rows) if comparison.versions else "",
    ]
    return "\n\n".join(filter(None, parts))


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(aligned([head, *rows], right=(), empty=""))  # a run has its column
