"""``halfstep check``: a check of a recorded run against limits, for CI."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from halfstep._common.text import printable
from halfstep._tools.cli.report import RUN_HELP, run_at

HELP = "exit with 1 if a recorded run exceeds limits, for CI"
DESCRIPTION = "Checks a recorded run against limits, for CI."
EPILOG = """\
A SHARE is written 1% or 0.01. If you give no limit, the limits are
  --max-skipped 1% --max-underflow 5% --max-overflow 0%
and, if weights are stored in bfloat16 or float16, --max-lost-updates 50%. If
you give some limits, only these are checked.

Whatever the limits, a run fails if
  its loss was inf or NaN, or buffers of its model stayed so,
  a step was diagnosed (halfstep run --diagnose), unless the only cause was a
  scale that is too large,
  it ended with an error or has no end, or
  its ranks disagree on a step.

Exit code: 0 and one line if the run passes; 1 and a line for each failure;
2 if there is no record to read.

examples:
  halfstep check runs/a
  halfstep check runs/a --max-skipped 1% --max-underflow 5%
  halfstep check runs/a --allow-unfinished       during the run
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    parser.add_argument("run_path", type=Path, metavar="RUN", nargs="?", help=RUN_HELP)
    for name, text in (
        ("skipped", "of skipped steps, without the normal skips of dynamic scaling"),
        ("underflow", "of gradient entries lost to underflow, in any one parameter"),
        ("overflow", "of inf, NaN or too large entries, in any one output or weight"),
        ("lost-updates", "of updates lost to rounding, in any one weight"),
    ):
        parser.add_argument(
            f"--max-{name}", type=_share, metavar="SHARE", help=f"largest share {text}"
        )
    parser.add_argument(
        "--allow-nan",
        action="store_true",
        help="allow a loss or buffers of inf or NaN, and diagnosed steps",
    )
    parser.add_argument(
        "--allow-unfinished",
        action="store_true",
        help="allow a run that still goes on, was killed, or ended with an error",
    )


def run(arguments: argparse.Namespace) -> int:
    """Run the command and return the exit code."""
    run = run_at(arguments.run_path)
    from halfstep._tools.report.limits import Limits, defaults, pass_line, violations
    from halfstep._tools.report.summarize import summarize

    summary = summarize(run)
    limits = Limits(
        arguments.max_skipped,
        arguments.max_underflow,
        arguments.max_overflow,
        arguments.max_lost_updates,
    )
    limits = replace(
        defaults(summary) if limits == Limits() else limits,
        allow_nan=arguments.allow_nan,
        allow_unfinished=arguments.allow_unfinished,
    )
    found = violations(summary, limits)
    for note in run.left_out:
        print(printable(f"{run.path}: {note.text}"), file=sys.stderr)
    for line in found:
        print(printable(f"{run.path}: {line}"))
    if not found:
        print(printable(f"{run.path}: good: {pass_line(summary, limits)}"))
    return 1 if found else 0


def _share(text: str) -> float:
    number = text.strip().removesuffix("%")
    try:
        of_100 = float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a valid share: write 1% or 0.01"
        ) from None
    value = of_100 if number == text.strip() else of_100 / 100
    if not 0 <= value <= 1:
        is_percent = 1 < value == of_100 <= 100  # the percent sign is missing
        cure = f"write {number}% or {of_100 / 100:g}" if is_percent else "write 1% or 0.01"
        raise argparse.ArgumentTypeError(f"{text!r} is not between 0% and 100%: {cure}")
    return value
