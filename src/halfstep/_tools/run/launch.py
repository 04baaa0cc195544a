"""The start of a script: its folder, its code, and the traceback of its error."""

from __future__ import annotations

import builtins
import importlib.util
import os
import re
import runpy
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from importlib.machinery import SourceFileLoader
from itertools import chain, count, zip_longest
from pathlib import Path
from types import ModuleType, TracebackType

from halfstep._common import machine
from halfstep._tools.record.files import RUNS
from halfstep._tools.user_code import OURS
from halfstep.errors import RecordError


def make_folder(stem: str, environ: Mapping[str, str], parent_pid: int) -> Path:
    """Create a folder for a run and return it; all ranks get the same one without communication."""
    if machine.num_ranks(environ) > 1:
        launch = re.sub(r"[^\w.-]", "-", environ.get("TORCHELASTIC_RUN_ID", "none"))
        if launch == "none":
            launch = f"{environ.get('MASTER_PORT', 'ranks')}-{parent_pid}"
        folder = RUNS / f"{stem}-{launch}"
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


# --- execution of the script ----------------------------------------------------------------------


# The script runs in a new module that stays `__main__` until the process exits: code that runs at
# exit (`atexit`, threads, `__del__`) may pickle its objects.


class NotRunnable(SystemExit):
    """The target is not a runnable module, or a policy names a module of no model."""


def execute(target: str, arguments: list[str], *, is_module: bool) -> None:
    """Run ``python target arguments...``, or ``python -m target arguments...`` if ``is_module``.

    Exceptions of the script propagate; :func:`hide_our_frames` shortens their traceback.
    """
    sys.argv = [target, *arguments]
    if is_module:
        _set_first_path(os.getcwd())
        try:
            _, spec, code = runpy._get_module_details(target, NotRunnable)  # type: ignore[attr-defined]
        except NotRunnable as error:
            raise NotRunnable(f"halfstep run: {error}") from None
        sys.argv[0] = spec.origin
        main = importlib.util.module_from_spec(spec)
        main.__name__ = "__main__"
    else:
        _set_first_path(os.path.dirname(os.path.realpath(target)))
        path = os.path.abspath(target)
        main = ModuleType("__main__")
        main.__file__ = path
        main.__loader__ = SourceFileLoader("__main__", path)
        vars(main)["__cached__"] = None
        with open(path, "rb") as file:
            code = compile(file.read(), path, "exec", dont_inherit=True)
    vars(main)["__builtins__"] = builtins
    sys.modules["__main__"] = main
    exec(code, vars(main))


def hide_our_frames() -> None:
    """Remove our frames from the traceback that Python is about to show."""
    shown = sys.excepthook  # the script may have set its own

    def excepthook(
        kind: type[BaseException], error: BaseException, traceback: TracebackType | None
    ) -> None:
        own = _within_script(traceback)
        shown(kind, error.with_traceback(own), own)

    sys.excepthook = excepthook


def _within_script(traceback: TracebackType | None) -> TracebackType | None:
    """Return the part of a traceback inside the script, without halfstep's frames in between.

    Its last ones stay: the error may be halfstep's own.
    """
    frames = []
    while traceback is not None:
        frames.append(traceback)
        traceback = traceback.tb_next
    codes = [frame.tb_frame.f_code for frame in frames]
    begin = codes.index(execute.__code__) + 1 if execute.__code__ in codes else 0
    are_ours = [code.co_filename.startswith(OURS) for code in codes]
    end = max((n for n, is_ours in enumerate(are_ours) if not is_ours), default=-1)
    kept = [frames[n] for n in range(begin, len(frames)) if n > end or not are_ours[n]]
    for frame, following in zip_longest(kept, kept[1:]):
        frame.tb_next = following
    return kept[0] if kept else None


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:  # `python -P` adds no folder
        sys.path[0] = folder
