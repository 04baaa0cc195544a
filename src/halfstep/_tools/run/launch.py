"""What several ranks of a run share: its folder, and the errors that all of them raise."""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from itertools import chain, count
from pathlib import Path
from types import TracebackType

import torch

from halfstep._common import machine
from halfstep._pytorch import distributed
from halfstep._tools.record.files import RUNS
from halfstep.errors import RecordError


def make_folder(stem: str, environ: Mapping[str, str], parent_pid: int) -> Path:
    """Create a folder for a run and return it; all ranks get the same one without communication."""
    if machine.num_ranks(environ) > 1:
        folder = RUNS / f"{stem}-{_name_of_launch(environ, parent_pid)}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    folder = RUNS / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    others = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return _first_new(chain([folder], others))


def lock_folder(folder: Path) -> int | None:
    """Let no other run begin in a folder while this process lives; None if that is not possible.

    Its file begins with its first step, so a lock of that would come too late.
    """
    try:
        import fcntl

        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise RecordError(
            f"{folder}: another run records there. Give each run a folder of its own with -o"
        ) from None
    except (ImportError, OSError):  # not supported by this system or file system
        return None
    return descriptor


def folder_of_process(folder: Path) -> Path:
    """Create a folder in that of a run, for a process that is none of its ranks."""
    return _first_new(folder / f"process-{number}" for number in count(1))


def _first_new(folders: Iterable[Path]) -> Path:
    for folder in folders:
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError


def _name_of_launch(environ: Mapping[str, str], parent_pid: int) -> str:
    given = environ.get("TORCHELASTIC_RUN_ID", "none")
    if given != "none":
        return re.sub(r"[^\w.-]", "-", given)
    return f"{environ.get('MASTER_PORT', 'ranks')}-{parent_pid}"


# --- errors that all ranks raise ------------------------------------------------------------------


def show_once(error: BaseException) -> None:
    """Show the traceback of a fatal error on one rank, and a single line on the others.

    The first rank to get here shows it, since a launcher may stop rank 0 before it can.
    """
    if _is_first(error):
        return
    rank = torch.distributed.get_rank()

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        print(f"[rank{rank}]: {kind.__name__}, shown by another rank", file=sys.stderr)

    sys.excepthook = excepthook


def _is_first(error: BaseException) -> bool:
    """Return whether this rank is the first to report an error."""
    if not distributed.has_process_group():
        return True
    digest = hashlib.sha256(str(error).encode()).hexdigest()[:16]
    try:
        return int(distributed.default_store().add(f"halfstep/error/{digest}", 1)) == 1
    except RuntimeError:  # the rank that hosts the store has exited
        return True
