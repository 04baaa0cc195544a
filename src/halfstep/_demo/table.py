"""The table at the end: a column for each run, a row for each number."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rich import box
from rich.table import Table

from halfstep._demo.results import Results
from halfstep._demo.train import Run

NOTES = (
    "Losses in nats per character; the training loss is the mean over the last tenth of the steps, "
    "the held-out loss is computed in fp32 for all. Time: the median step after warm-up. "
    "Zero gradients: the share of the entries of all parameters' gradients that are exactly 0, "
    "mean over about 20 steps; what fp32 has of them is no underflow."
)


def build_table(results: Results) -> Table:
    """Make the table of the results, for rich to print."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for run in results.runs:
        table.add_column(_heading(run), justify="right", vertical="bottom")
    summaries = [results.summary(run) for run in results.runs]
    for label, key, show in ROWS:
        table.add_row(label, *(_cell(summary[key], show) for summary in summaries))
    return table


def _heading(run: Run) -> str:
    heading = run.precision.title.replace(", ", "\n").replace(" + ", "\n+ ")
    return heading if run.is_finished else f"{heading}\nstopped at {len(run.losses)}"


def _cell(value: Any, show: Callable[[Any], str]) -> str:
    return "-" if value is None else show(value)


def _share(value: float) -> str:
    """Three digits, so that a small share does not read as none."""
    return "0 %" if value == 0 else f"{100 * value:.3g} %"


def format_scale(value: float) -> str:
    """As a power of two, which it is unless somebody chose another first scale."""
    exponent = math.log2(value)
    return f"2^{exponent:.0f}" if exponent.is_integer() else f"{value:g}"


ROWS: tuple[tuple[str, str, Callable[[Any], str]], ...] = (
    ("training loss", "training_loss", "{:.4f}".format),
    ("  minus fp32", "training_loss_minus_fp32", "{:+z.4f}".format),
    ("held-out loss", "held_out_loss", "{:.4f}".format),
    ("  minus fp32", "held_out_loss_minus_fp32", "{:+z.4f}".format),
    ("time per step", "step_ms", "{:.1f} ms".format),
    ("  ratio to fp32", "step_time_ratio_to_fp32", "{:.2f}".format),
    ("peak memory", "peak_memory_bytes", lambda size: f"{size / 2**20:.1f} MiB"),
    ("steps skipped", "steps_skipped", "{}".format),
    ("final scale", "final_scale", format_scale),
    ("zero gradients", "zero_gradient_share", _share),
)
"""Label, key of :meth:`Results.summary`, and how its value is written."""
