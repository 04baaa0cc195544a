"""What the page and the lines say in the same words."""

from __future__ import annotations

import os
import shlex
from datetime import timedelta
from pathlib import Path

from halfstep._common.numbers import seconds
from halfstep._common.text import printable
from halfstep._record.run import Diagnosed, Step
from halfstep._report.about_diagnoses import headline
from halfstep._watch.state import Watched


def what_runs(watched: Watched) -> list[str]:
    """Return the command, the model and the lower precision, as far as they are known."""
    words = [" ".join(watched.run.header.command)]
    words += [model.name for model in watched.run.models[-1:]]
    words += [policy.dtype for policy in watched.run.policies[-1:]]
    return [printable(word) for word in words if word]


def where_it_runs(watched: Watched) -> list[str]:
    """Return the machine, the device and the number of ranks."""
    header = watched.run.header
    words = [text for text in (header.machine, header.device) if text]
    num_ranks, world_size = len(watched.run.ranks), header.world_size or 1
    if world_size > 1 or num_ranks > 1:
        of_all = f" of {world_size}" if num_ranks < world_size else ""
        words.append(f"{num_ranks}{of_all} ranks")
    if watched.run.num_segments > 1:
        words.append(f"started {watched.run.num_segments} times")
    return [printable(word) for word in words]


def how_far(watched: Watched) -> list[str]:
    """Return the number of the last step, the time it took to get there, and the pace."""
    if watched.last is None:
        return ["no step yet"]
    words = [f"step {watched.last.step:,}", str(timedelta(seconds=int(watched.duration)))]
    each = watched.seconds_per_step
    if each:
        words.append(f"{1 / each:.3g} steps/s" if each < 1 else f"{seconds(each)}/step")
    return words


def state(watched: Watched, now: float) -> str:
    """Say whether it runs, has ended, or seems to have died."""
    silent = watched.silent_for(now)
    if watched.run.has_ended:
        error = watched.run.error
        on_rank = f" on rank {watched.run.error_rank}" if len(watched.run.ranks) > 1 else ""
        return "ended" if error is None else f"ended{on_rank} with {printable(error)}"
    if silent is not None:
        ago = timedelta(seconds=int(silent))
        return f"silent: last event {ago} ago; was it killed?"
    return "running"


def why_skipped(step: Step) -> str:
    """Return the reason of a skipped step."""
    return printable(step.reason or "unknown")


def what_is_wrong(diagnosed: Diagnosed) -> str:
    """Return what a diagnosis has found, in a line."""
    return printable(headline(diagnosed.diagnosis))


def missing(path: Path | None) -> str:
    """Name the record that is not there."""
    return "a record in runs/" if path is None else printable(os.fspath(path))


def how_to_start(path: Path | None) -> str:
    """Say what makes that record."""
    output = "" if path is None else f"-o {_quoted(path)} "
    return f"start the training with `halfstep run {output}train.py`"


def report_command(path: Path) -> str:
    """Return what makes the report of a record."""
    return f"halfstep report {_quoted(path)}"


def _quoted(path: Path) -> str:
    return printable(shlex.quote(os.fspath(path)))
