"""Scripts that start the other ranks of their job themselves.

Lightning's ``strategy="ddp"`` runs ``python train.py`` again for each further rank. Those would
train with plain PyTorch beside a first rank with halfstep: with ``--amp fp16`` the gradients of a
scaled loss would be averaged with those of a plain one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from halfstep._common import machine
from halfstep._common.patches import Around, Patches
from halfstep.errors import RanksError


@contextmanager
def refused(command: str) -> Iterator[None]:
    """Raise ``RanksError`` where a script that was started alone starts another rank of itself.

    Args:
        command: The script and its arguments, as they follow ``halfstep run``.
    """
    patches = Patches()
    if machine.num_ranks() == 1:  # else a launcher has started all of them
        patches.wrap(subprocess.Popen, "__init__", _refusing(command))
    try:
        yield
    finally:
        patches.undo()


def _refusing(command: str) -> Around:
    def start(original: Any, process: Any, args: Any, *rest: Any, **kwargs: Any) -> None:
        environ = kwargs.get("env") or os.environ
        ranks = machine.num_ranks(environ)
        if ranks > 1 and _is_of_another_rank(environ) and _is_this_script(args):
            raise RanksError(
                f"{sys.argv[0]} starts its other ranks itself, by Python alone: of {ranks} ranks "
                "only the first would have halfstep, and they would compute different things. "
                "Start all of them with it, and the same options: "
                f"torchrun --nproc-per-node {ranks} -m halfstep run {command}"
            )
        original(process, args, *rest, **kwargs)

    return start


def _is_of_another_rank(environ: Mapping[str, str]) -> bool:
    """Return whether a process will have another rank than this one."""
    return any(environ.get(name) != os.environ.get(name) for name in ("RANK", "LOCAL_RANK"))


def _is_this_script(command: Any) -> bool:
    """Return whether a command line runs Python with the script, or module, that runs here."""
    if not isinstance(command, list | tuple) or len(command) < 2 or command[0] != sys.executable:
        return False
    words = iter(map(str, command[1:]))
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    for word in words:
        if word == "-m":
            return spec is not None and next(words, None) == spec.name
        if word == "-c":
            return False
        if word in _OPTIONS_WITH_VALUE:
            next(words, None)
        elif not word.startswith("-"):
            return spec is None and os.path.abspath(word) == os.path.abspath(sys.argv[0])
    return False


_OPTIONS_WITH_VALUE = ("-W", "-X", "--check-hash-based-pycs")
"""Of Python."""
