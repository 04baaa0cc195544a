"""The text of the live view: plain lines for a pipe or grep, and phrases that the page shares."""

from __future__ import annotations

import os
import shlex
import sys
import time
from collections.abc import Iterator
from datetime import timedelta
from operator import itemgetter
from pathlib import Path
from typing import Self

from halfstep._common.numbers import bits, number, percent, power, seconds
from halfstep._common.text import printable
from halfstep._record.read import RecordUpdate
from halfstep._record.run import Diagnosed, Run, Step
from halfstep._report.about_diagnoses import headline
from halfstep._watch.state import LiveRun, name_of

NUM_WORST = 3
DEFAULT_EVERY = 50


class PlainLines:
    """A printer of updates as plain lines, see :func:`new_lines`."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._last: LiveRun | None = None
        self._has_said_silent = False

    def show(self, live: LiveRun, update: RecordUpdate) -> None:
        """Print the update."""
        self._last = live
        if update.is_anew:
            print(heading(live))
        for line in new_lines(live, update, self._every):
            print(line)
        is_silent = live.silent_for(time.time()) is not None
        if is_silent and not self._has_said_silent:
            print(run_state(live, time.time()))
        self._has_said_silent = is_silent
        sys.stdout.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Print the final state, unless the reader has closed the pipe."""
        if self._last is not None and not isinstance(exception[1], BrokenPipeError):
            print(end_line(self._last, time.time()), flush=True)


def heading(live: LiveRun) -> str:
    """Return the first line."""
    facts = ", ".join(what_runs(live) + where_it_runs(live))
    return printable(f"run {live.run.path}  {facts}")


def new_lines(live: LiveRun, update: RecordUpdate, every: int | None) -> list[str]:
    """Return the new lines by step: some steps, and each skip, diagnosis, sample and note.

    Args:
        live: The run, including the update.
        update: The update.
        every: Print the first step and every multiple of this number; None for the interval of
            samples.
    """
    lines = _new_lines(live, update.new, every or live.run.header.every or DEFAULT_EVERY)
    return [printable(line) for _, line in sorted(lines, key=itemgetter(0))]


def _new_lines(live: LiveRun, new: Run, every: int) -> Iterator[tuple[int, str]]:
    """Yield the new lines with their steps."""
    for note in new.notes:
        yield note.step, f"note {note.step}  {note.text}"
    for step in new.steps:
        if not step.taken or step.step == 1 or step.step % every == 0:
            yield step.step, _step_line(step, name_of(step) if live.has_own_losses else "")
    for culprits in new.culprits:
        yield (
            culprits.step,
            f"skip {culprits.step}  began in {culprits.began_in or 'an unknown module'}  "
            f"parameters {culprits.num_parameters}  rank {culprits.rank}",
        )
    for each in new.diagnoses:
        yield each.step, f"diagnosis {each.step}  rank {each.rank}  {what_is_wrong(each)}"
    for sample in new.samples:
        for measured, fit in live.worst()[:NUM_WORST]:
            yield (
                sample.step,
                f"sample {sample.step}  headroom {bits(fit.headroom)}  "
                f"{fit.verb} {percent(fit.share_lost)}  nan {measured.nan}  inf {measured.inf}  "
                f"{measured.kind} {measured.name}",
            )


def _step_line(step: Step, optimizer: str) -> str:
    verdict = "taken"
    if not step.taken:
        verdict = f"skipped: {why_skipped(step)}, scale now {power(step.scale_after)}"
    lost = step.share_lost_updates
    whose = optimizer and f" of {optimizer}"
    return (
        f"step {step.step}  loss {number(step.loss)}{whose}  scale {power(step.scale)}  "
        f"norm {number(step.norm)}  {verdict}"
        f"{'' if lost is None else f'  lost updates {percent(lost)}'}"
    )


def end_line(live: LiveRun, now: float) -> str:
    """Return the last line: the state of the run."""
    facts = ", ".join(how_far(live))
    if live.num_steps:
        share = percent(live.num_skipped / live.num_steps)
        facts += f", skipped {live.num_skipped} of {live.num_steps} ({share})"
    return f"{run_state(live, now)}  {facts}"


# --- phrases that the page shares -----------------------------------------------------------------


def what_runs(live: LiveRun) -> list[str]:
    """Return the command, the model and the lower precision, if known."""
    words = [" ".join(live.run.header.command)]
    words += [model.name for model in live.run.models[-1:]]
    words += [policy.dtype for policy in live.run.policies[-1:]]
    return [printable(word) for word in words if word]


def where_it_runs(live: LiveRun) -> list[str]:
    """Return the machine, the device and the number of ranks."""
    header = live.run.header
    words = [text for text in (header.machine, header.device) if text]
    num_ranks, world_size = len(live.run.ranks), header.world_size or 1
    if world_size > 1 or num_ranks > 1:
        of_all = f" of {world_size}" if num_ranks < world_size else ""
        words.append(f"{num_ranks}{of_all} ranks")
    if live.run.num_segments > 1:
        words.append(f"started {live.run.num_segments} times")
    return [printable(word) for word in words]


def how_far(live: LiveRun) -> list[str]:
    """Return the number of the last step, the time it took to get there, and the pace."""
    if live.last is None:
        return ["no step yet"]
    words = [f"step {live.last.step:,}", str(timedelta(seconds=int(live.last.time)))]
    each = live.seconds_per_step
    if each:
        words.append(f"{1 / each:.3g} steps/s" if each < 1 else f"{seconds(each)}/step")
    return words


def run_state(live: LiveRun, now: float) -> str:
    """Return whether the run is running, has ended, or seems to have died, in words."""
    error, silent = live.run.error, live.silent_for(now)
    if live.run.has_ended:
        on_rank = f" on rank {live.run.error_rank}" if len(live.run.ranks) > 1 else ""
        return "ended" if error is None else f"ended{on_rank} with {printable(error)}"
    if silent is not None:
        ago = timedelta(seconds=int(silent))
        return f"silent: last event {ago} ago; was it killed?"
    return "running"


def why_skipped(step: Step) -> str:
    """Return the reason for a skipped step."""
    return printable(step.reason or "unknown")


def what_is_wrong(diagnosed: Diagnosed) -> str:
    """Return a diagnosis in one line."""
    return printable(headline(diagnosed.diagnosis))


def missing(path: Path | None) -> str:
    """Return what is missing: a record, and where."""
    return f"a record in {'runs/' if path is None else printable(os.fspath(path))}"


def how_to_start(path: Path | None) -> str:
    """Return how to start the missing record."""
    output = "" if path is None else f"-o {_quoted(path)} "
    return f"start the training with `halfstep run {output}train.py`"


def report_command(path: Path) -> str:
    """Return the command that creates the report of a record."""
    return f"halfstep report {_quoted(path)}"


def _quoted(path: Path) -> str:
    return printable(shlex.quote(os.fspath(path)))
