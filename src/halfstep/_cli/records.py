"""The record that a command is about."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep._cli.exits import CommandError
from halfstep._common.text import printable
from halfstep._record.files import RUNS, files_in, newest_in

if TYPE_CHECKING:
    from halfstep._record.run import Run

RUN_HELP = f"folder of the record; left out, the newest under {RUNS}/"


def run_at(path: Path | None) -> Run:
    """Read the record in a folder, or the newest under ``runs/``, whose path goes to stderr.

    Raises:
        CommandError: There is no record, it cannot be read, or it holds no steps.
    """
    from halfstep._record.read import read_run
    from halfstep.errors import RecordError

    if path is None:
        path = newest_in(RUNS)
        if path is None:
            raise CommandError(f"there is no record under {RUNS}/: name the folder of one")
        print(printable(f"{path}: the newest record under {RUNS}/"), file=sys.stderr)
    if path.is_file() and path not in files_in(path.parent).values():
        raise CommandError(f"{path} is a file: give the folder of a record")
    try:
        run = read_run(path)
    except RecordError as error:
        raise CommandError(str(error)) from None
    if not run.num_steps:
        raise CommandError(
            f"{path}: the record holds no step: the run ended before the first step of an "
            "optimizer, or has not come so far"
        )
    return run
