"""The page in the terminal, drawn with rich, and the screen that shows it."""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, OverflowMethod, RenderResult
from rich.live import Live
from rich.text import Text

from halfstep._common.numbers import number, percent, power
from halfstep._common.text import printable
from halfstep._record.read import RecordUpdate
from halfstep._record.run import Kind
from halfstep._watch.state import Column, LiveRun, WorstTensor
from halfstep._watch.text import (
    how_far,
    report_command,
    run_state,
    what_is_wrong,
    what_runs,
    where_it_runs,
    why_skipped,
)

BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.,-~=+#"
MARK = "!"
"""The character for a value that was NaN or inf."""

MOST_SKIPS = 5
MOST_LAYERS = 12
MOST_NOTES = 3
SKIP = "x"
LABEL, VALUE, RANGE = 6, 10, 22
KINDS: Mapping[Kind, str] = {
    "parameter": "parameter",
    "parameter_gradient": "gradient",
    "output": "output",
    "output_gradient": "output gradient",
}
GAP, SHORTEST_NAME = 2, 12
WIDE = 80
"""Minimum width at which the curves show their range."""


class Signs(NamedTuple):
    """The characters that the page is drawn with."""

    blocks: str
    dot: str
    arrow: str
    overflow: OverflowMethod


UNICODE = Signs(BLOCKS, " · ", "→", "ellipsis")
ASCII = Signs(ASCII_BLOCKS, " - ", "->", "crop")


@dataclass(frozen=True)
class Page:
    """The state of a run, as wide as the console and at most ``height`` lines high.

    ``now`` is in seconds since the epoch.
    """

    live: LiveRun
    now: float
    height: int | None = None

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the parts."""
        width, signs = options.max_width, ASCII if options.ascii_only else UNICODE
        top = [*_heading(self.live, self.now, width, signs), Text()]
        top += _curves(self.live, width, signs)
        left = sys.maxsize if self.height is None else self.height - len(top)
        for line in [*top, *_below(self.live, width, left, signs)]:
            line.no_wrap, line.overflow = True, signs.overflow
            yield line


def _heading(live: LiveRun, now: float, width: int, signs: Signs) -> list[Text]:
    state = run_state(live, now)
    is_bad = live.run.error is not None
    colour = "red" if is_bad else "yellow" if state.startswith("silent") else "green"
    name = Text(printable(os.fspath(live.run.path)), "bold")
    # The path is cut to make room for the state; for a long error it keeps a minimum.
    word, _, _ = state.partition(" ")
    shortest = min(SHORTEST_NAME, width - GAP - cell_len(word) - 1)
    room = max(shortest, width - GAP - cell_len(state))
    name.truncate(max(room, 1), overflow=signs.overflow)
    return [
        Text.assemble(name if room > 0 else "", " " * GAP if room > 0 else "", (state, colour)),
        Text(signs.dot.join(how_far(live))),
        Text(signs.dot.join(what_runs(live)), "dim"),
        Text(signs.dot.join(where_it_runs(live)), "dim"),
    ]


# --- curves ---------------------------------------------------------------------------------------


def _curves(live: LiveRun, width: int, signs: Signs) -> list[Text]:
    room = max(width - LABEL - VALUE - 2 - (RANGE if width >= WIDE else 0), 1)
    last = live.last
    lines = []
    losses = [(name, trail, step.loss) for name, (trail, step) in live.losses.items()]
    if not live.has_own_losses:
        losses = [("", live.loss, last.loss if last else None)]
    for name, label, trail, value, text, missing in (
        *((name, "loss", trail, loss, number, "not seen") for name, trail, loss in losses),
        ("", "scale", live.scale, last.scale_after if last else None, power, "no scaler"),
        ("", "norm", live.norm, last.norm if last else None, number, "not measured"),
        ("", "lost", live.lost_updates, live.last_share_lost_updates, percent, "no update counted"),
    ):
        columns = trail.columns(room)
        is_missing = last is not None and all(column is None for column in columns)
        drawn = missing if is_missing else sparkline(columns, signs.blocks)
        line = Text(f"{label:<{LABEL}}{text(value):>{VALUE}}  ")
        line.append(f"{drawn:<{room}}", "dim" if is_missing else "cyan")
        line.highlight_regex(f"{MARK}+", "bold red")
        if width >= WIDE:
            extent = "" if trail.low is None else f"{text(trail.low)} to {text(trail.high)}"
            line.append(f"  {printable(name) or extent}", "dim")
        lines.append(line)
    marks = "".join(" " if column is None else SKIP for column in live.skipped.columns(room))
    label = f"{'skips':<{LABEL}}{live.num_skipped:>{VALUE},}  "
    return [*lines, Text.assemble(label, (marks, "yellow"))]


def sparkline(columns: Sequence[Column], blocks: str = BLOCKS) -> str:
    """Draw columns as one line: blocks, :data:`MARK` for NaN, a space for no value.

    The heights are logarithmic if all values are above zero.
    """
    values = [column for column in columns if column is not None and not math.isnan(column)]
    if not values:
        return "".join(" " if column is None else MARK for column in columns)
    height = math.log if min(values) > 0 else float
    low, high = height(min(values)), height(max(values))

    def block(column: Column) -> str:
        if column is None:
            return " "
        if math.isnan(column):
            return MARK
        if low == high:
            return blocks[len(blocks) // 2]
        return blocks[round((height(column) - low) / (high - low) * (len(blocks) - 1))]

    return "".join(block(column) for column in columns)


# --- tables ---------------------------------------------------------------------------------------


def _below(live: LiveRun, width: int, left: int, signs: Signs) -> list[Text]:
    """Return the diagnosis, skips, layers and notes that fit: layers are cut first, then skips."""
    diagnosed = live.diagnosed if left > 0 else None
    left -= diagnosed is not None
    notes = min(len(live.notes), MOST_NOTES, max(0, left // 4))
    left -= notes + 2 if notes else 0
    skips = min(len(live.skips), MOST_SKIPS, max(0, left // 2 - 3))
    left -= skips + 3 if skips else 0
    worst = live.worst()
    layers = min(len(worst), MOST_LAYERS, max(0, left - 3))
    lines: list[Text] = []
    if diagnosed is not None:
        what = what_is_wrong(diagnosed)
        lines.append(Text(f"step {diagnosed.step:,} went bad: {what}", "red"))
    if skips:
        lines += [Text(), *_skips(live, skips, width, signs)]
    if layers:
        lines += [Text(), *_layers(live, worst[:layers], width, signs)]
    if notes:
        lines += [Text(), Text("notes", "bold")]
        lines += [
            Text(f"step {note.step:,}: {printable(note.text)}")
            for note in list(live.notes)[-notes:]
        ]
    return lines


def _skips(live: LiveRun, num: int, width: int, signs: Signs) -> list[Text]:
    share = percent(live.num_skipped / live.num_steps)
    were = "was" if live.num_skipped == 1 else "were"
    title = f"{live.num_skipped:,} of {live.num_steps:,} steps {were} skipped ({share})"
    rows = [
        [
            Text(f"{step.step:,}", justify="right"),
            Text(why_skipped(step)),
            Text(f"{power(step.scale)} {signs.arrow} {power(step.scale_after)}"),
            Text(printable(live.began_in.get(step.step, "-"))),
        ]
        for step in reversed(list(live.skips)[-num:])
    ]
    titles = ("step", "reason", "scale", "began in")
    return [Text(title, "bold"), *_table(titles, rows, width, 3, signs)]


def _layers(live: LiveRun, worst: list[WorstTensor], width: int, signs: Signs) -> list[Text]:
    assert live.sample is not None
    title = f"worst layers in step {live.sample.step:,} (headroom in bits)"
    titles = ["layer", "", "headroom", worst[0].fit.verb]
    rows = []
    for measured, fit in worst:
        headroom, lost = fit.headroom, fit.share_lost
        bits = "-" if headroom is None else f"{headroom:.1f}"
        rows.append(
            [
                Text(printable(measured.name)),
                Text(KINDS[measured.kind], "dim"),
                Text(bits, _colour(headroom, bad=1.0, poor=3.0), justify="right"),
                Text(percent(lost), _colour(-lost, bad=-0.1, poor=-0.01), justify="right"),
            ]
        )
    if any(each.num_non_finite for each in worst):
        titles.append("NaN, inf")
        for row, each in zip(rows, worst, strict=True):
            colour = "red" if each.num_non_finite else ""
            row.append(Text(f"{each.num_non_finite:,}", colour, justify="right"))
    return [Text(title, "bold"), *_table(titles, rows, width, 0, signs)]


def _colour(value: float | None, bad: float, poor: float) -> str:
    if value is None:
        return ""
    return "red" if value < bad else "yellow" if value < poor else ""


def _table(
    titles: Sequence[str], rows: Sequence[Sequence[Text]], width: int, gives_way: int, signs: Signs
) -> list[Text]:
    """Lay out cells in columns; if the width is too small, truncate the column ``gives_way``."""
    cells = zip(titles, rows[0], strict=True)
    table = [[Text(title, "dim", justify=cell.justify) for title, cell in cells], *rows]
    widths = [max(cell.cell_len for cell in column) for column in zip(*table, strict=True)]
    too_wide = sum(widths) + GAP * (len(widths) - 1) - width
    widths[gives_way] -= min(max(0, too_wide), max(0, widths[gives_way] - SHORTEST_NAME))
    lines = []
    for row in table:
        line = Text()
        for cell, room in zip(row, widths, strict=True):
            padded = cell.copy()
            padded.truncate(room, overflow=signs.overflow)
            padded.align("right" if cell.justify == "right" else "left", room)
            line.append_text(padded).append(" " * GAP)
        line.rstrip()
        lines.append(line)
    return lines


# --- the screen -----------------------------------------------------------------------------------


class Screen:
    """The page on the terminal's alternate screen, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._live = Live(console=console, screen=True, auto_refresh=False)
        self._last: LiveRun | None = None

    def show(self, live: LiveRun, update: RecordUpdate) -> None:
        """Draw the page."""
        self._last = live
        page = Page(live, time.time(), self._console.height)
        self._live.update(page, refresh=True)

    def __enter__(self) -> Self:
        # A killed process would leave the terminal on the alternate screen, without a cursor.
        self._handler = signal.signal(signal.SIGTERM, _exit)
        self._live.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the alternate screen and print the final state."""
        self._live.stop()
        signal.signal(signal.SIGTERM, self._handler)
        if self._last is not None:
            print_page(self._console, self._last)


def print_page(console: Console, live: LiveRun) -> None:
    """Print the page once, with the command that creates the report."""
    console.print(Page(live, time.time()))
    command = report_command(live.run.path)
    console.print(Text(f"\nreport: {command}"), soft_wrap=True)


def _exit(number: int, frame: Any) -> None:
    sys.exit(128 + number)
