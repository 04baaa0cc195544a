"""The execution of a script or a module, as Python itself does it.

The script runs in a new module, which stays ``__main__`` until the process ends: code that runs at
the end (``atexit``, threads, ``__del__``) may pickle objects of it.
"""

from __future__ import annotations

import builtins
import errno
import importlib.util
import os
import sys
from importlib.machinery import ModuleSpec, SourceFileLoader
from types import CodeType, ModuleType, TracebackType

from halfstep._pytorch import listeners


class NotRunnable(SystemExit):
    """The target is no module that can be run; nothing of it has run."""


def require_file(path: str) -> None:
    """Raise ``OSError`` if a script cannot be read."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    with open(path, "rb"):
        pass


def execute(target: str, arguments: list[str], *, is_module: bool) -> None:
    """Run ``python target arguments...``, or with ``is_module`` ``python -m target arguments...``.

    Exceptions of the script pass through; :func:`hide_our_frames` shortens their traceback.
    """
    sys.argv = [target, *arguments]
    if is_module:
        _set_first_path(os.getcwd())
        spec, code = _find(target)
        assert spec.origin is not None
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
    """Return the part of a traceback inside the script, without the recorder's frames."""
    frame = traceback
    while frame is not None and frame.tb_frame.f_code is not execute.__code__:
        frame = frame.tb_next
    if frame is None:
        return traceback
    own = frame.tb_next
    while frame.tb_next is not None:
        # Listeners stand between the script and torch.autograd.backward.
        if frame.tb_next.tb_frame.f_code.co_filename == listeners.__file__:
            frame.tb_next = frame.tb_next.tb_next
        else:
            frame = frame.tb_next
    return own


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:  # python -P adds no folder
        sys.path[0] = folder


def _find(name: str) -> tuple[ModuleSpec, CodeType]:
    """Find what ``python -m name`` runs; raise ``SystemExit`` if there is no such thing."""
    if name.startswith("."):
        raise NotRunnable("halfstep run: Relative module names not supported")
    try:
        spec = importlib.util.find_spec(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise  # raised by an import inside the package
        spec = None
    except ValueError as error:  # a module without a spec, such as __main__
        raise NotRunnable(f"halfstep run: {error}") from None
    if spec is None:
        raise NotRunnable(f"halfstep run: No module named {name}")
    if spec.submodule_search_locations is not None:
        if name.endswith(".__main__"):
            raise NotRunnable(f"halfstep run: Cannot use package as __main__ module: {name}")
        return _find(f"{name}.__main__")
    get_code = getattr(spec.loader, "get_code", None)
    code = get_code(spec.name) if get_code is not None else None
    if code is None:
        raise NotRunnable(f"halfstep run: No code object available for {name}")
    return spec, code
