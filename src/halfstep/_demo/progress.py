"""What is seen while the demo trains: bars on a terminal, a few plain lines elsewhere."""

from __future__ import annotations

import time
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from halfstep._demo.table import format_scale
from halfstep._demo.train import Run

REFRESH_SECONDS = 0.1
LINES_PER_RUN = 5


class Watcher(Protocol):
    """Shows runs as they go: a context manager with three calls."""

    def begin(self, run: Run) -> None:
        """A run is about to start; its memory is measured before its first step."""

    def step(self, run: Run) -> None:
        """A step was done."""

    def end(self, run: Run) -> None:
        """The run is over."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...


def watcher_for(console: Console) -> Watcher:
    """Choose what suits the console."""
    return Bars(console) if console.is_terminal else Lines(console)


def describe(run: Run) -> str:
    """Say how the run goes: loss, scale and time of its last step."""
    if not run.losses:
        return "starting"
    scale = f"  scale {format_scale(run.scales[-1])}" if run.scales else ""
    return f"loss {run.losses[-1]:.3f}{scale}  {run.seconds[-1] * 1e3:.0f} ms/step"


class Lines:
    """A few lines for each run."""

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, run: Run) -> None:
        """Name the run."""
        self._console.print(f"{run.precision.title}: {run.steps} steps", highlight=False)

    def step(self, run: Run) -> None:
        """Print every fifth of the run."""
        done = len(run.losses)
        if done % max(1, run.steps // LINES_PER_RUN) == 0 or done == run.steps:
            line = f"  step {done}/{run.steps}  {describe(run)}"
            self._console.print(line, highlight=False)

    def end(self, run: Run) -> None:
        """Nothing is left to say: the last step was printed."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Nothing is open."""


class Bars:
    """One bar for each run, drawn between the steps and never by a thread beside them.

    A thread would take time from the steps that are being measured.
    """

    def __init__(self, console: Console) -> None:
        self._progress = Progress(
            TextColumn("{task.description:<26}"),
            BarColumn(bar_width=8),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            TextColumn("{task.fields[state]}", style="dim"),
            console=console,
            auto_refresh=False,
        )
        self._task = TaskID(0)
        self._drawn = 0.0

    def begin(self, run: Run) -> None:
        """Add a bar."""
        self._task = self._progress.add_task(
            run.precision.title, total=run.steps, state=describe(run)
        )
        self._draw()

    def step(self, run: Run) -> None:
        """Move the bar, ten times a second at most."""
        self._progress.update(self._task, completed=len(run.losses), state=describe(run))
        if time.perf_counter() - self._drawn > REFRESH_SECONDS:
            self._draw()

    def end(self, run: Run) -> None:
        """Draw the bar as it stays."""
        self._draw()

    def _draw(self) -> None:
        self._progress.refresh()
        self._drawn = time.perf_counter()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()
