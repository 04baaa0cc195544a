"""What is seen while measurements are made: one line on a terminal, nothing elsewhere."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Watcher(Protocol):
    """Told of each measurement."""

    def measured(self, what: str, num_done: int) -> None:
        """A measurement was made; ``what`` comes next or was done."""


class Nobody:
    """Does not look."""

    def measured(self, what: str, num_done: int) -> None:
        """Do nothing."""


@contextmanager
def watcher() -> Iterator[Watcher]:
    """Show a line on a terminal while the block runs, if rich is there to draw it."""
    if not sys.stderr.isatty():
        yield Nobody()
        return
    try:
        from rich.console import Console
        from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
    except ModuleNotFoundError:
        yield Nobody()
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Drawn between measurements only: a thread beside them would take their time.
    console = Console(stderr=True)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        task = progress.add_task("measuring", total=None)

        class Line:
            def measured(self, what: str, num_done: int) -> None:
                progress.update(task, description=f"{num_done} measured: {what}", refresh=True)

        yield Line()
