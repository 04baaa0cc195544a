"""The page on the alternate screen of a terminal; its last state stays on the usual one."""

from __future__ import annotations

import signal
import sys
import time
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from halfstep._record.following import Update
from halfstep._watch import words
from halfstep._watch.page import Page
from halfstep._watch.state import Watched


class Screen:
    """Shows the page and draws it anew, in place and only when told to."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._last: Watched | None = None

    def show(self, watched: Watched, update: Update) -> None:
        """Draw the page."""
        self._last = watched
        page = Page(watched, time.time(), self._console.height)
        self._live.update(page, refresh=True)

    def __enter__(self) -> Self:
        # A killed process would leave the terminal on the alternate screen, without a cursor.
        self._handler = signal.signal(signal.SIGTERM, _exit)
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the alternate screen and print how it stands."""
        self._live.stop()
        signal.signal(signal.SIGTERM, self._handler)
        if self._last is not None:
            print_page(self._console, self._last)


def print_page(console: Console, watched: Watched) -> None:
    """Print the page once, with the command that makes the report."""
    console.print(Page(watched, time.time()))
    command = words.report_command(watched.run.path)
    console.print(Text(f"\nreport: {command}"), soft_wrap=True)


def _exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)
