"""The loop of ``halfstep watch``: read what is new, show it, wait, until the run has ended."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Protocol, Self, TextIO

from halfstep._record.files import RUNS, newest_in
from halfstep._record.read import Follower, RecordUpdate
from halfstep._watch.state import LiveRun, live_run
from halfstep._watch.text import end_line, heading, how_to_start, missing, new_lines, run_state

REFRESH_SECONDS = 0.5


class View(Protocol):
    """A view of a run: a context manager that leaves the final state on the screen."""

    def show(self, live: LiveRun, update: RecordUpdate) -> None:
        """Show the current state."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def watch(path: Path | None, view: View, say: TextIO) -> None:
    """Show a run until it has ended, or Ctrl-C is pressed.

    Args:
        path: Its folder, which need not exist yet; None for the newest record.
        view: Shows the run.
        say: The stream for the message that it waits for a record.

    Raises:
        RecordError: The folder contains something else than a record.
    """
    try:
        follower, update = _wait_for_record(path, say)
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


def _wait_for_record(path: Path | None, say: TextIO) -> tuple[Follower, RecordUpdate]:
    has_said = False
    while True:
        folder = path or newest_in(RUNS)
        if folder is not None:
            follower = Follower(folder)
            update = follower.read()
            if update is not None:
                return follower, update
        if not has_said:
            print(f"waiting for {missing(path)} ... {how_to_start(path)}", file=say, flush=True)
            has_said = True
        time.sleep(REFRESH_SECONDS)


class PlainLines:
    """Prints what is new as plain lines, see :func:`halfstep._watch.text.new_lines`."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._last: LiveRun | None = None
        self._has_said_silent = False

    def show(self, live: LiveRun, update: RecordUpdate) -> None:
        """Print what is new."""
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
