"""``halfstep watch``: a live view of a training run."""

from __future__ import annotations

import argparse
import os
import sys
import time
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep._cli.exits import CommandError, require_rich
from halfstep._record.files import RUNS, files_in, records_in

if TYPE_CHECKING:
    from halfstep._record.read import Follower, RecordUpdate
    from halfstep._watch.screen import Screen

HELP = "show a run while it goes on: loss, scale, skips, worst layers"
DESCRIPTION = (
    "Shows a recorded training while it runs, in a second terminal: loss, scale and gradient norm "
    "of all steps, lost updates, skipped steps, and the layers that are closest to overflow or "
    "underflow. If the output is not a terminal, it prints plain lines."
)
EPILOG = """\
examples:
  halfstep watch runs/x               the training runs in another terminal
  halfstep watch                      the newest record under runs/
  halfstep watch runs/x --once        print the present state and exit
  halfstep watch runs/x | grep skip   plain lines: run, step, skip, sample, note

It waits for a record that does not exist yet, and ends with the run. Ctrl-C
ends it at any time and does not affect the training. The exit code is 0.
"""

REFRESH_SECONDS = 0.5


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument(
        "record",
        metavar="RUN",
        nargs="?",
        type=Path,
        help="folder of the record, or of several, of which it takes the newest (default: runs/)",
    )
    parser.add_argument("--once", action="store_true", help="print the present state and exit")
    parser.add_argument(
        "--every",
        type=int,
        metavar="N",
        help="in plain lines, print every N-th step (default: the sampled ones); skips are always "
        "printed",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    every: int | None = arguments.every
    if every is not None and every < 1:
        raise CommandError(f"--every must be at least 1, got {every}")
    if isinstance(sys.stdout, TextIOWrapper):  # names of layers may contain any character
        sys.stdout.reconfigure(errors="backslashreplace")
    path = _folder(arguments.record)
    try:
        if arguments.once:
            _print_once(path)
        else:
            _watch(path, every)
    except BrokenPipeError:
        # `| head` has ended; Python must not flush the rest into the closed pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _folder(given: Path | None) -> Path | None:
    if given is None or not given.is_file():
        return given
    if given not in files_in(given.parent).values():
        raise CommandError(f"{given} is not a record: give the folder that `halfstep run` wrote")
    return given.parent


def _watch(path: Path | None, every: int | None) -> None:
    """Show a run until it ends or Ctrl-C is pressed."""
    from halfstep._watch.state import live_run
    from halfstep._watch.text import PlainLines

    is_page = sys.stdout.isatty() and os.environ.get("TERM") not in ("dumb", "unknown")
    view = _screen() if is_page else PlainLines(every)
    try:
        follower, update = _wait_for(path)
        with view:
            known = live_run(None, update)
            view.show(known, update)
            while not known.run.has_ended:
                time.sleep(REFRESH_SECONDS)
                new = follower.read()
                if new is not None:
                    known = live_run(known, new)
                    view.show(known, new)
    except KeyboardInterrupt:  # the way to stop watching, not an error
        pass


def _wait_for(path: Path | None) -> tuple[Follower, RecordUpdate]:
    from halfstep._watch.text import how_to_start, missing

    has_said = False
    while (found := _found(path)) is None:
        if not has_said:
            print(
                f"waiting for {missing(path)} ... {how_to_start(path)}", file=sys.stderr, flush=True
            )
            has_said = True
        time.sleep(REFRESH_SECONDS)
    return found


def _found(path: Path | None) -> tuple[Follower, RecordUpdate] | None:
    """Return a follower and the first update of a record, or of the newest in a folder."""
    from halfstep._record.read import Follower

    is_record = path is not None and files_in(path)
    folder = path if is_record else next(iter(records_in(path or RUNS)), path)
    if folder is None:
        return None
    follower = Follower(folder)
    update = follower.read()
    return None if update is None else (follower, update)


def _print_once(path: Path | None) -> None:
    require_rich()
    from rich.console import Console

    from halfstep._watch.screen import print_page
    from halfstep._watch.state import live_run
    from halfstep._watch.text import how_to_start, missing

    found = _found(path)
    if found is None:
        raise CommandError(f"there is not yet {missing(path)}; {how_to_start(path)}")
    print_page(Console(), live_run(None, found[1]))


def _screen() -> Screen:
    require_rich()
    from rich.console import Console

    from halfstep._watch.screen import Screen

    return Screen(Console())
