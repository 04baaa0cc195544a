"""Exit codes, errors for the user, files, and Ctrl-C."""

from __future__ import annotations

import argparse
import os
import re
import secrets
import shutil
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from halfstep._common.text import near_names, suggestion

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as a shell reports it


class CommandError(Exception):
    """An error for the user, printed without a traceback: what is wrong and what to do."""


def options_of(parser: argparse.ArgumentParser) -> list[str]:
    """Return the long options of a command, as listed in its help."""
    return re.findall(r"^  (?:-\w[^,\n]*, )?(--[\w-]+)", parser.format_help(), re.MULTILINE)


def near(path: Path, suffix: str = "") -> str:
    """Return ``"; did you mean 'train.py'?"``, the most similar path; without suffix, a folder."""
    if not path.parent.is_dir():
        return near(path.parent)
    try:
        paths = (each for each in path.parent.iterdir() if suffix or each.is_dir())
        names = [each.name for each in paths if each.name.endswith(suffix)]
    except PermissionError:
        return ""
    longer = [name for name in names if name.startswith(path.name)]  # e.g. without the date
    meant = [max(longer)] if longer else near_names(path.name, names)
    return suggestion(path.parent / name for name in meant)


def reason(error: OSError, path: Path, suffix: str = ".py") -> str:
    """Return why a file cannot be read, with similar names if it does not exist."""
    if str(path) == "-":
        return "standard input is not read; save the script as a file"
    if isinstance(error, IsADirectoryError):
        inside = next(iter(sorted(path.glob(f"*{suffix}"))), path / f"NAME{suffix}")
        return f"is a folder: name a file in it, such as {inside}"
    return f"{error.strerror}{near(path, suffix) if isinstance(error, FileNotFoundError) else ''}"


def replace_file(path: Path, content: bytes) -> None:
    """Replace a file by new content at once; its mode stays. A link is replaced, not its target."""
    # Containers that share a folder may have equal process ids. A file of tempfile could be read by
    # nobody else.
    new = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    try:
        with new.open("xb") as file:
            file.write(content)
        if path.exists():
            shutil.copymode(path, new)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


@contextmanager
def ending_at_interrupts(*, by_signal: bool) -> Iterator[None]:
    """Make Ctrl-C end this process in the block, at once and without a traceback.

    Importing PyTorch takes seconds, and its dependencies turn a KeyboardInterrupt into errors. The
    process exits with 130; ``by_signal`` it ends as without a handler: shells say 130 then too.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL if by_signal else _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    os.write(2, b"\nInterrupted.\n")
    os._exit(EXIT_INTERRUPTED)
