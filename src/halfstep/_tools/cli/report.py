"""``halfstep report``: the findings about a recorded run, as sentences and on one page."""

from __future__ import annotations

import argparse
import json
import sys
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep._common.text import aligned, printable, tell
from halfstep._tools.cli.exits import CommandError, ending_at_interrupts, near, replace_file
from halfstep._tools.record.files import RUNS, files_in, records_in
from halfstep.errors import RecordError

if TYPE_CHECKING:
    from halfstep._tools.record.run import Run

RUN_HELP = f"folder of the record (default: the newest with a step under {RUNS}/)"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run_path", type=Path, metavar="RUN", nargs="?", help=RUN_HELP)
    parser.add_argument(
        "--against",
        type=Path,
        action="append",
        metavar="RUN",
        help="record to compare with; may be repeated",
    )
    parser.add_argument("--open", action="store_true", help="open the page in a browser")
    form = parser.add_mutually_exclusive_group()
    form.add_argument(
        "--json", action="store_true", help="print all numbers as JSON, write no page"
    )
    form.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="file of the page (default: report.html in the folder of the record, comparison.html "
        "with --against)",
    )


def run(arguments: argparse.Namespace) -> int:
    if arguments.open and arguments.json:
        raise CommandError("--open opens the page, which --json does not write")
    run, *processes = runs_at(arguments.run_path)
    others = [runs_at(path)[0] for path in arguments.against or ()]
    with ending_at_interrupts(by_signal=False):  # checking a cure may import PyTorch
        text, page = (
            _against([run, *others], arguments) if others else _about(run, processes, arguments)
        )
    if arguments.json:
        print(text)  # unchanged: escaping or wrapping would break the JSON
    else:
        tell(text)
    if page is not None:
        name = "comparison.html" if others else "report.html"
        path = arguments.output or run.path / name
        print(_written(path, page))
        if arguments.open and not webbrowser.open(path.absolute().as_uri()):
            tell(f"there is no browser to open it here: the page is {path.absolute()}", sys.stderr)
    return 0


def _about(
    run: Run, processes: Sequence[Run], arguments: argparse.Namespace
) -> tuple[str, str | None]:
    """Return the text to print on a run, and its page, None with ``--json``."""
    from halfstep._tools.report import text
    from halfstep._tools.report.summarize import summarize

    summary, *others = map(summarize, (run, *processes))
    if arguments.json:
        return _json(text.summary_json(summary, *others)), None
    from halfstep._tools.report.page import render

    told = text.summary_text(summary)
    if others:
        rows = ("record", "steps", "skipped", "finding"), *map(text.summary_row, (summary, *others))
        told = "\n".join([*aligned(rows, right=("steps", "skipped")), "", f"{run.path}:", told])
    return told, render(summary, run)


def _against(runs: Sequence[Run], arguments: argparse.Namespace) -> tuple[str, str | None]:
    """Return the text to print on several runs, and the page, None with ``--json``."""
    from halfstep._tools.report import text
    from halfstep._tools.report.compare_runs import compare_runs
    from halfstep._tools.report.summarize import summarize

    comparison = compare_runs(*map(summarize, runs))
    if arguments.json:
        return _json(text.comparison_json(comparison)), None
    from halfstep._tools.report.page import render_comparison

    printed = text.comparison_text(comparison) + "\n"
    return printed, render_comparison(comparison, runs)


def _json(values: dict[str, Any]) -> str:
    return json.dumps(values, allow_nan=False, indent=1)


def _written(path: Path, page: str) -> str:
    """Write a page and return its path to print."""
    content = page.encode("utf-8", errors="replace")
    try:
        if path.exists() and not path.is_file():  # /dev/stdout, a pipe
            path.write_bytes(content)
        else:
            replace_file(path, content)
    except OSError as error:
        raise CommandError(f"{path}: cannot be written: {error.strerror}; see -o") from None
    return printable(str(path))


# --- records on the command line ------------------------------------------------------------------


def folders_of_run(path: Path) -> list[Path]:
    """Return the folders of the records of a run: its own, and one for each of its processes.

    A process that the program started has one if it is none of the ranks.
    """
    found = {each.relative_to(path).parts: each for each in records_in(path)}
    own = [parts for parts in found if all(part.startswith("process-") for part in parts)]
    return [found[parts] for parts in sorted(own, key=lambda each: [(len(p), p) for p in each])]


def runs_at(path: Path | None) -> list[Run]:
    """Read the records of the run in a folder, or of the newest under ``runs/``, told on stderr."""
    if path is None:
        return _newest()
    if path.is_file() and path not in files_in(path.parent).values():
        raise CommandError(f"{path} is a file: give the folder of a record")
    if not path.exists():
        raise CommandError(
            f"{path} does not exist: give the folder that `halfstep run` or `halfstep.record` has "
            f"written{near(path)}"
        )
    path = path.parent if path.is_file() else path
    inside = records_in(path)
    if inside and not folders_of_run(path):
        if len(inside) > 1:
            shown = ", ".join(map(str, inside[:3])) + (", ..." if len(inside) > 3 else "")
            raise CommandError(f"{path} contains {len(inside)} records: name one of them, {shown}")
        path = inside[0]
    runs = _with_steps(path)
    if not runs:
        raise CommandError(f"{path}: the record contains no step of an optimizer")
    return runs


def _with_steps(path: Path) -> list[Run]:
    from halfstep._tools.record.read import read_run

    runs, folders = [], folders_of_run(path) or [path]
    for folder in folders:
        try:
            runs.append(read_run(folder))
        except RecordError as error:
            if len(folders) == 1:
                raise
            tell(str(error), sys.stderr)
    return [run for run in runs if run.num_steps]


def _newest() -> list[Run]:
    for path in records_in(RUNS):
        while path.name.startswith("process-"):  # of a process of a run
            path = path.parent
        try:
            runs = _with_steps(path)
        except RecordError as error:
            tell(str(error), sys.stderr)
            continue
        if runs:
            tell(f"{path}: the newest record under {RUNS}/", sys.stderr)
            return runs
    raise CommandError(f"there is no record with a step under {RUNS}/: name the folder of one")
