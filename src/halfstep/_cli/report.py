"""``halfstep report``: what happened in a recorded run, on one page and in sentences."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep._cli.exits import CommandError
from halfstep._cli.records import RUN_HELP, run_at
from halfstep._common.text import printable, tell

if TYPE_CHECKING:
    from halfstep._record.run import Run

EPILOG = """\
examples:
  halfstep report runs/a                  writes runs/a/report.html, prints what there is to know
  halfstep report                         the same for the newest record under runs/
  halfstep report runs/a --json           all numbers as JSON
  halfstep report runs/a --md             a short summary for the log of a CI job
  halfstep report runs/a --against runs/b     two runs side by side, in runs/a/comparison.html
"""


def add_parser(subcommands: Any) -> None:
    """Add ``report`` to the subparsers of the command line."""
    parser = subcommands.add_parser(
        "report",
        help="say what happened in a recorded run, on one page",
        description="Writes a page about a recorded run (one HTML file, no network) and prints "
        "what there is to know in sentences. The record may still be being written.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_path", type=Path, metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument(
        "--against", type=Path, metavar="RUN", help="another record to compare it with"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the numbers as JSON; no page")
    form.add_argument("--md", action="store_true", help="print a short Markdown text; no page")
    form.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="the page (default: report.html in the folder; comparison.html with --against)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Do what the arguments say and return the exit code."""
    run = run_at(arguments.run_path)
    if arguments.against is None:
        _report(run, arguments)
    else:
        _compare(run, run_at(arguments.against), arguments)
    return 0


def _report(run: Run, arguments: argparse.Namespace) -> None:
    from halfstep._report import text
    from halfstep._report.summarize import summarize
    from halfstep._report.text import sentences

    summary = summarize(run)
    if arguments.json:
        _print_json(text.summary_json(summary))
    elif arguments.md:
        tell(text.summary_markdown(summary))
    else:
        from halfstep._report.page import render

        for sentence in sentences(summary):
            print(printable(f"{sentence.severity}: {sentence.text}"))
        page = render(summary, run)
        print(_written(arguments.output or run.path / "report.html", page))


def _compare(first: Run, second: Run, arguments: argparse.Namespace) -> None:
    from halfstep._report import text
    from halfstep._report.compare_runs import compare_runs
    from halfstep._report.summarize import summarize

    comparison = compare_runs(summarize(first), summarize(second))
    if arguments.json:
        _print_json(text.comparison_json(comparison))
    elif arguments.md:
        tell(text.comparison_markdown(comparison))
    else:
        from halfstep._report.page import render_comparison

        page = render_comparison(comparison, first, second)
        path = _written(arguments.output or first.path / "comparison.html", page)
        tell(text.comparison_text(comparison) + f"\n\n{path}")


def _print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, allow_nan=False, indent=1))


def _written(path: Path, page: str) -> str:
    """Write a page in the place of what has its name; of a link, not of what it leads to."""
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_text(page, encoding="utf-8", errors="replace")
            return printable(str(path))
        new = path.with_name(f".{path.name}.{os.getpid()}")
        try:
            with new.open("x", encoding="utf-8", errors="replace") as file:
                file.write(page)
            new.replace(path)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}; see -o") from None
    return printable(str(path))
