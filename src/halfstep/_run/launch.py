"""The start of a run: launchers, folders shared by all ranks, and scripts that start ranks."""

from __future__ import annotations

import hashlib
import itertools
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from halfstep._common import machine
from halfstep._common.patches import Patches
from halfstep._pytorch import distributed
from halfstep._record.files import RUNS
from halfstep.errors import RanksError

# Launchers by module or file name, and the start of their command line. The launcher's own options
# follow, then ours.
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(
        ("accelerate launch", "accelerate-launch", "accelerate.commands.launch"),
        "accelerate launch",
    ),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), "deepspeed"),
}


def make_folder(stem: str, environ: Mapping[str, str], parent_pid: int) -> Path:
    """Create a folder for a run and return it; all ranks get the same one without communication."""
    if machine.num_ranks(environ) > 1:
        folder = RUNS / f"{stem}-{_name_of_launch(environ, parent_pid)}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    name = f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    for number in itertools.count(1):
        folder = RUNS / (name if number == 1 else f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return folder


def _name_of_launch(environ: Mapping[str, str], parent_pid: int) -> str:
    given = environ.get("TORCHELASTIC_RUN_ID", "none")
    if given != "none":
        return re.sub(r"[^\w.-]", "-", given)
    return f"{environ.get('MASTER_PORT', 'ranks')}-{parent_pid}"


def command_inside_launcher(
    target: str, arguments: Sequence[str], options: Sequence[str]
) -> str | None:
    """Return the corrected command line if the target of ``halfstep run`` is a launcher, else None.

    halfstep has to run inside the training processes that the launcher starts.
    """
    name = Path(target).name
    if name in ("accelerate", "accelerate.commands.accelerate_cli") and arguments[:1] == ["launch"]:
        name, arguments = "accelerate launch", arguments[1:]
    launcher = _LAUNCHERS.get(name)
    if launcher is None:
        return None
    module = "--module" if launcher == "deepspeed" else "-m"
    own, script = _split(arguments)
    return shlex.join([*launcher.split(), *own, module, "halfstep", "run", *options, *script])


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Split the arguments of a launcher into its own options and the script that it starts."""
    for index, argument in enumerate(arguments):
        if argument in ("-m", "--module"):
            return arguments[:index], ["-m", *arguments[index + 1 :]]
        if argument.endswith(".py"):
            return arguments[:index], arguments[index:]
    return arguments, ["train.py"]


# --- scripts that start their other ranks themselves ----------------------------------------------


# Lightning's strategy="ddp" runs `python train.py` again for each further rank. Those ranks would
# run plain PyTorch while the first one runs halfstep. With --amp fp16, gradients of a scaled loss
# would be averaged with unscaled gradients.


@contextmanager
def other_ranks_refused(command: str) -> Iterator[None]:
    """Raise ``RanksError`` if a script that runs as one process starts another rank of itself.

    Args:
        command: The script and its arguments, as given to ``halfstep run``.
    """

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

    patches = Patches()
    if machine.num_ranks() == 1:  # otherwise a launcher has started all ranks
        patches.wrap(subprocess.Popen, "__init__", start)
    try:
        yield
    finally:
        patches.undo()


def _is_of_another_rank(environ: Mapping[str, str]) -> bool:
    """Return whether an environment is that of a different rank than this process."""
    return any(environ.get(name) != os.environ.get(name) for name in ("RANK", "LOCAL_RANK"))


def _is_this_script(command: Any) -> bool:
    """Return whether a command line runs Python with the current script or module."""
    if not isinstance(command, list | tuple) or len(command) < 2 or command[0] != sys.executable:
        return False
    words = iter(map(str, command[1:]))
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    for word in words:
        if word == "-m":
            return spec is not None and next(words, None) == spec.name
        if word == "-c":
            return False
        if word in ("-W", "-X", "--check-hash-based-pycs"):  # options that take a value
            next(words, None)
        elif not word.startswith("-"):
            return spec is None and os.path.abspath(word) == os.path.abspath(sys.argv[0])
    return False


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
