"""``halfstep check``: whether the report of a recorded run has a bad finding, for CI."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep._common.numbers import things
from halfstep._common.text import printable
from halfstep._tools.cli.exits import ending_at_interrupts
from halfstep._tools.cli.report import RUN_HELP, runs_at

if TYPE_CHECKING:
    from halfstep._tools.record.run import Run


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_path", type=Path, metavar="RUN", nargs="?", help=RUN_HELP)


def run(arguments: argparse.Namespace) -> int:
    runs = runs_at(arguments.run_path)
    with ending_at_interrupts(by_signal=False):  # checking a cure may import PyTorch
        return max(map(_check, runs))


def _check(run: Run) -> int:
    """Print what is bad about one record, or a line; return the exit code."""
    from halfstep._tools.record.run import dtypes_text
    from halfstep._tools.report.summarize import summarize
    from halfstep._tools.report.text import sentences

    summary = summarize(run)
    said = [each for each in sentences(summary) if not each.follows]
    for note in run.left_out:
        print(printable(f"{run.path}: {note.text}"), file=sys.stderr)
    bad = [each.text for each in said if each.severity == "bad"]
    for text in bad:
        print(printable(f"{run.path}: bad: {text}"))
    if not bad:
        num_warnings = sum(each.severity == "warning" for each in said)
        more = f", {things(num_warnings, 'warning')} in the report" if num_warnings else ""
        ran = dtypes_text(summary.products)
        print(printable(f"{run.path}: good: {things(summary.steps.num, 'step')}{more}; {ran}"))
    return 1 if bad else 0
