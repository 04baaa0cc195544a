"""Scripts and records that are named on the command line."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

from halfstep._cli.exits import CommandError
from halfstep._common.text import near_names, suggestion, tell
from halfstep._record.files import RUNS, files_in, records_in
from halfstep.errors import RecordError

if TYPE_CHECKING:
    from halfstep._record.run import Run

RUN_HELP = f"folder of the record; left out, the newest with a step under {RUNS}/"


def near(path: Path, suffix: str = "") -> str:
    """Return ``"; did you mean 'train.py'?"`` for what is most like a path that does not exist."""
    if not path.parent.is_dir():
        return near(path.parent)
    try:
        names = [each.name for each in path.parent.iterdir() if each.name.endswith(suffix)]
    except PermissionError:
        return ""
    longer = [name for name in names if name.startswith(path.name)]  # without its date, say
    meant = [max(longer)] if longer else near_names(path.name, names)
    return suggestion(path.parent / name for name in meant)


def reason(error: OSError, path: Path, suffix: str = ".py") -> str:
    """Return why a file cannot be read, with the nearest names if it does not exist."""
    return f"{error.strerror}{near(path, suffix) if isinstance(error, FileNotFoundError) else ''}"


def records_inside(path: Path) -> list[Path]:
    """Return the records in a folder that is none itself, the latest change first."""
    return [] if files_in(path) else records_in(path)


def run_at(path: Path | None) -> Run:
    """Read the record in a folder, or the newest under ``runs/``, whose path goes to stderr."""
    from halfstep._record.read import read_run

    if path is None:
        return _newest()
    if path.is_file() and path not in files_in(path.parent).values():
        raise CommandError(f"{path} is a file: give the folder of a record")
    if not path.exists():
        raise CommandError(
            f"{path} does not exist: give the folder that `halfstep run` or `halfstep.record` has "
            f"written{near(path)}"
        )
    inside = records_inside(path)
    if inside:
        shown = ", ".join(map(str, inside[:3])) + (", ..." if len(inside) > 3 else "")
        raise CommandError(f"{path} holds {len(inside)} records: name one of them, {shown}")
    run = read_run(path)
    if not run.num_steps:
        raise CommandError(
            f"{path}: the record holds no step: the run ended before the first step of an "
            "optimizer, or has not come so far"
        )
    return run


def _newest() -> Run:
    from halfstep._record.read import read_run

    for path in records_in(RUNS):
        try:
            run = read_run(path)
        except RecordError as error:
            tell(str(error), sys.stderr)
            continue
        if run.num_steps:
            tell(f"{path}: the newest record under {RUNS}/", sys.stderr)
            return run
    raise CommandError(f"there is no record with a step under {RUNS}/: name the folder of one")
