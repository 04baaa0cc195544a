"""The file of a record: JSON Lines, one event a line, one file a rank.

JSON has no NaN and no inf: they are written as the strings "nan", "inf" and "-inf". The format is
described in docs/record.md.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from io import SEEK_END, FileIO
from pathlib import Path
from typing import Any

from halfstep.errors import RecordError

SCHEMA = 1
"""Version of the events; it stands in the first line of each segment."""

RUNS = Path("runs")
"""Where the records of runs are that were given no folder."""

Event = dict[str, Any]


def file_of(folder: Path, rank: int) -> Path:
    """Return the file that a rank writes."""
    return folder / f"rank{rank}.jsonl"


def files_in(folder: Path) -> dict[int, Path]:
    """Return the files in a folder by rank."""
    found = {}
    for path in folder.glob("rank*.jsonl"):
        number = path.stem.removeprefix("rank")
        if number.isdigit():
            found[int(number)] = path
    return dict(sorted(found.items()))


def newest_in(folder: Path) -> Path | None:
    """Return the record, at any depth, that was written to last; None if there is none."""
    files = [file for file in folder.rglob("rank*.jsonl") if file.stem[4:].isdigit()]
    return max(files, key=lambda file: file.stat().st_mtime).parent if files else None


class LineWriter:
    """Appends events to a file, each flushed: what was written survives the process.

    Args:
        path: The file; its folder is made. An earlier last line that was cut stays one of its own.

    Raises:
        RecordError: Another process writes it, or it is another program's file.
        OSError: It cannot be written.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._is_cut = path.exists() and path.stat().st_size > 0 and _ends_cut(path)
        self._file = path.open("ab", buffering=0)
        _lock(self._file, path)

    def write(self, event: Event) -> None:
        """Write one event.

        Raises:
            OSError: The disk is full, or worse. The next line does not suffer from it.
        """
        text = json.dumps(to_plain(event), allow_nan=False, separators=(",", ":"))
        line = memoryview(b"\n" * self._is_cut + text.encode() + b"\n")
        self._is_cut = True
        while line:  # the system may take a part only
            line = line[self._file.write(line) :]
        self._is_cut = False

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lock(file: FileIO, path: Path) -> None:
    """Let no other process write the file, where the system can tell."""
    try:
        import fcntl

        # Not flock, which processes that this one forks, such as workers, would hold after it.
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        file.close()
        raise RecordError(
            f"{path}: another process is writing it. Give each run a folder of its own; the "
            "processes of one run are told apart by the environment variable RANK, which torchrun "
            "sets"
        ) from None
    except (ImportError, OSError):
        return  # not on this system, or not on this file system


def _ends_cut(path: Path) -> bool:
    """Say whether the last line of a record was cut."""
    with path.open("rb") as file:
        first = parse_line(path, file.readline())
        if first is None or first["event"] != "run":
            raise RecordError(f"{path} is no record of a run: give another folder")
        file.seek(-1, SEEK_END)
        return file.read(1) != b"\n"


def read_lines(path: Path) -> Iterator[tuple[int, Event | None]]:
    """Yield number and event of every line; None for a line that is no event, such as a cut one.

    Raises:
        RecordError: The file cannot be read, or a segment has another schema.
    """
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, parse_line(path, line)
    except OSError as error:
        raise RecordError(f"{path}: cannot be read: {error.strerror}") from None


def parse_line(path: Path, line: bytes) -> Event | None:
    """Return the event of a line; None for a line that is no event, such as a cut one.

    Raises:
        RecordError: It begins a segment of another schema.
    """
    try:
        event = json.loads(line)
    except ValueError:  # UnicodeDecodeError is one too
        return None
    if not isinstance(event, dict) or not isinstance(event.get("event"), str):
        return None
    if event["event"] == "run":
        _require_schema(path, event)
    return event


def _require_schema(path: Path, event: Event) -> None:
    if event.get("schema") != SCHEMA:
        raise RecordError(
            f"{path}: it has schema {event.get('schema')!r}, and this halfstep reads schema "
            f"{SCHEMA}: look at it with halfstep {event.get('halfstep', 'of the same version')}"
        )


def to_plain(value: Any) -> Any:
    """Return a value with its non-finite numbers as strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def to_float(value: Any) -> float | None:
    """Return a number that was written by :func:`to_plain`; None stays None."""
    return None if value is None else float(value)
