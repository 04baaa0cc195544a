"""The same as plain lines, for a file, a pipe or grep."""

from __future__ import annotations

from operator import itemgetter

from halfstep._common.numbers import bits, number, percent, power
from halfstep._common.text import printable
from halfstep._record.following import Update
from halfstep._record.run import Culprits, Diagnosed, Step
from halfstep._watch import words
from halfstep._watch.state import Watched, Worst

NUM_WORST = 3
DEFAULT_EVERY = 50


def heading(watched: Watched) -> str:
    """Return the line that comes first."""
    facts = ", ".join(words.what_runs(watched) + words.where_it_runs(watched))
    return printable(f"run {watched.run.path}  {facts}")


def lines(watched: Watched, update: Update, every: int | None) -> list[str]:
    """Return what is new by step: every so-many-th step, each skip, diagnosis, sample, note.

    Args:
        watched: What is known, with the update.
        update: What is new.
        every: A line for each step whose number it divides, and for the first; as often as samples
            are taken when None.
    """
    every = every or watched.run.header.every or DEFAULT_EVERY
    new = update.new
    found = [(note.step, f"note {note.step}  {note.text}") for note in new.notes]
    found += [
        (step.step, step_line(step))
        for step in new.steps
        if not step.taken or step.step == 1 or step.step % every == 0
    ]
    found += [(culprits.step, _culprits_line(culprits)) for culprits in new.culprits]
    found += [(each.step, _diagnosis_line(each)) for each in new.diagnoses]
    for sample in new.samples:
        worst = watched.worst()[:NUM_WORST]
        found += [(sample.step, _layer_line(sample.step, each)) for each in worst]
    return [printable(line) for _, line in sorted(found, key=itemgetter(0))]


def step_line(step: Step) -> str:
    """Return the line of a step."""
    verdict = "taken"
    if not step.taken:
        verdict = f"skipped: {words.why_skipped(step)}, scale now {power(step.scale_after)}"
    return (
        f"step {step.step}  loss {number(step.loss)}  scale {power(step.scale)}  "
        f"norm {number(step.norm)}  {verdict}"
    )


def _culprits_line(culprits: Culprits) -> str:
    module = culprits.began_in or "a module that the gradients do not tell"
    return (
        f"skip {culprits.step}  began in {module}  "
        f"parameters {culprits.num_parameters}  rank {culprits.rank}"
    )


def _diagnosis_line(diagnosed: Diagnosed) -> str:
    what = words.what_is_wrong(diagnosed)
    return f"diagnosis {diagnosed.step}  rank {diagnosed.rank}  {what}"


def _layer_line(step: int, worst: Worst) -> str:
    measured = worst.measured
    return (
        f"sample {step}  headroom {bits(worst.judged.headroom)}  "
        f"underflow {percent(worst.judged.share_lost)}  nan {measured.nan}  "
        f"inf {measured.inf}  {measured.kind} {measured.name}"
    )


def end_line(watched: Watched, now: float) -> str:
    """Return the line that comes last: how it stands, in one line."""
    facts = ", ".join(words.how_far(watched))
    if watched.num_steps:
        share = percent(watched.num_skipped / watched.num_steps)
        facts += f", skipped {watched.num_skipped} of {watched.num_steps} ({share})"
    return f"{words.state(watched, now)}  {facts}"
