"""The files of a record: JSON Lines, one event per line, one file per rank.

JSON has no NaN and no inf: they are written as the strings "nan", "inf" and "-inf". The format is
described in docs/record.md.
"""

from __future__ import annotations

import json
import os
import re
import weakref
from collections.abc import Callable
from contextlib import suppress
from io import SEEK_END
from pathlib import Path
from reprlib import repr as shown
from typing import IO, Any

from halfstep._tools.json import to_plain
from halfstep.errors import RecordError

SCHEMA = 1  # version of the events; the first line of each segment contains it

RUNS = Path("runs")  # the default folder for records

Event = dict[str, Any]


def file_of(folder: Path, rank: int) -> Path:
    return folder / f"rank{rank}.jsonl"


def files_in(folder: Path) -> dict[int, Path]:
    numbers = {path: _rank_of(path) for path in folder.glob("rank*.jsonl")}
    found = {number: path for path, number in numbers.items() if number is not None}
    return dict(sorted(found.items()))


def records_in(folder: Path) -> list[Path]:
    """Return the folders of the records in a folder, at any depth, most recently changed first."""
    changed = {
        file.parent: file.stat().st_mtime
        for file in folder.rglob("rank*.jsonl")
        if _rank_of(file) is not None
    }
    return sorted(changed, key=changed.__getitem__, reverse=True)


def _rank_of(path: Path) -> int | None:
    """Return the rank of a file; None for anything else, such as ``rank01.jsonl`` and folders."""
    found = re.fullmatch(r"rank(0|[1-9][0-9]*)\.jsonl", path.name)
    return int(found[1]) if found and path.is_file() else None


class LineWriter:
    """A writer that appends events to a file and flushes each: they survive a killed process.

    A truncated last line remains a separate line. A file that another record writes, or that is no
    record, raises ``RecordError``.
    """

    def __init__(self, path: Path) -> None:
        self._key = path.resolve(), os.getpid()
        if self._key in _WRITERS:
            raise RecordError(
                f"{path}: this process is writing it already. Give each record a folder of its own"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        self._is_cut = path.exists() and path.stat().st_size > 0 and _ends_cut(path)
        self._file = path.open("ab", buffering=0)
        if _is_taken(self._file, for_writing=True):
            self._file.close()
            raise RecordError(
                f"{path}: another process is writing it. Give each run a folder of its own; the "
                "processes of one run are told apart by the environment variable RANK, which "
                "torchrun sets"
            )
        _WRITERS[self._key] = self

    def write(self, event: Event) -> None:
        """Write one event; after an ``OSError`` (a full disk) the next line stays readable."""
        line = memoryview(b"\n" * self._is_cut + line_of(event))
        self._is_cut = True
        while line:  # the system may write only a part
            line = line[self._file.write(line) :]
        self._is_cut = False

    def close(self) -> None:
        self._file.close()
        _WRITERS.pop(self._key, None)


class LateWriter:
    """A writer whose file begins with the first step or diagnosis; until then events are kept.

    ``begin`` opens the file, and returns its writer.
    """

    def __init__(self, begin: Callable[[], LineWriter | LateWriter]) -> None:
        self._begin = begin
        self._kept: list[Event] = []
        self._writer: LineWriter | LateWriter | None = None

    def write(self, event: Event) -> None:
        """Write or keep one event."""
        if self._writer is not None:
            self._writer.write(event)
            return
        self._kept.append(event)
        if event["event"] in ("step", "diagnosis"):
            self.begin()

    def begin(self) -> None:
        """Open the file, and write what was kept, if that has not happened."""
        if self._writer is None:
            self._writer = self._begin()
            for event in self._kept:
                self._writer.write(event)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


# A file lock belongs to a process: it does not exclude a second writer in that process, and is
# released when any of them is closed.
_WRITERS: weakref.WeakValueDictionary[tuple[Path, int], LineWriter] = weakref.WeakValueDictionary()


def _is_taken(file: IO[bytes], *, for_writing: bool) -> bool:
    """Return whether another process has locked a file; lock it if not, where that is supported."""
    try:
        import fcntl

        # Not flock: forked processes, such as workers, would keep that lock after this one ends.
        kind = fcntl.LOCK_EX if for_writing else fcntl.LOCK_SH
        fcntl.lockf(file, kind | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return True
    except (ImportError, OSError):  # not supported by this system or file system
        return False
    return False


def is_being_written(path: Path) -> bool:
    """Return whether a process writes a record, where the system shows that."""
    if (path.resolve(), os.getpid()) in _WRITERS:
        return True
    with path.open("rb") as file:
        return _is_taken(file, for_writing=False)


def _ends_cut(path: Path) -> bool:
    """Return whether the last line of a record is truncated."""
    with path.open("rb") as file:
        try:
            first = json.loads(file.readline())
        except (ValueError, RecursionError):
            first = None
        if not isinstance(first, dict) or first.get("event") != "run":
            raise RecordError(f"{path} is not the record of a run: give another folder")
        require_schema(path, first.get("schema"), first.get("halfstep"))
        file.seek(-1, SEEK_END)
        return file.read(1) != b"\n"


def program_in(path: Path) -> str | None:
    """Return the program of a record, as in the command of its first segment; None if unknown."""
    with path.open("rb") as file, suppress(ValueError, LookupError, TypeError):  # a damaged line
        return str(json.loads(file.readline())["command"][0])
    return None


def is_same_program(one: str, other: str) -> bool:
    """Return whether two commands may be of one program, in one folder or in two.

    Folders are compared as far as both are written, since the second may run from another one.
    """
    both = zip(*(reversed(Path(each).parts) for each in (one, other)), strict=False)
    return all(".." in pair or pair[0] == pair[1] for pair in both)


def require_schema(path: Path, schema: object, version: object) -> None:
    """Raise ``RecordError`` for another schema; it names the halfstep that can read it."""
    if schema != SCHEMA:
        which = version if isinstance(version, str) else "of the same version"
        raise RecordError(
            f"{path}: it has schema {shown(schema)}, but this halfstep reads schema {SCHEMA}: read "
            f"it with halfstep {which}"
        )


_ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def line_of(event: Event) -> bytes:
    """Return an event as a line."""
    text = _ENCODER.encode(to_plain(event))
    return text.encode(errors="replace") + b"\n"  # a file name may not be Unicode
