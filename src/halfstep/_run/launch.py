"""What a run has to know of how it was started: rank, launcher, folder."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from halfstep._common.machine import num_ranks
from halfstep._record.lines import RUNS

# What starts the processes of a run: modules and, by the name of the file, scripts, with the words
# of the right command line. After these stand its own options, then ours.
_LAUNCHERS = {
    "torch.distributed.run": ("torchrun",),
    "torch.distributed.launch": ("torchrun",),
    "torchrun": ("torchrun",),
    "accelerate.commands.launch": ("accelerate", "launch"),
    "accelerate-launch": ("accelerate", "launch"),
    "accelerate launch": ("accelerate", "launch"),
    "deepspeed": ("deepspeed",),
    "deepspeed.launcher.runner": ("deepspeed",),
}
_MODULE_OPTION = {"deepspeed": "--module"}


def make_folder(stem: str, environ: Mapping[str, str], parent_pid: int) -> Path:
    """Make and return the folder for a run that was given none.

    All ranks come to the same one without a word between them.
    """
    if num_ranks(environ) > 1:
        folder = RUNS / f"{stem}-{_name_of_launch(environ, parent_pid)}"
        folder.mkdir(parents=True, exist_ok=True)
        return folder
    first = folder = RUNS / f"{stem}-{datetime.now():%Y%m%d-%H%M%S}"
    number = 1
    while True:
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            number += 1
            folder = first.with_name(f"{first.name}-{number}")
        else:
            return folder


def _name_of_launch(environ: Mapping[str, str], parent_pid: int) -> str:
    given = environ.get("TORCHELASTIC_RUN_ID", "none")
    if given != "none":
        return re.sub(r"[^\w.-]", "-", given)
    return f"{environ.get('MASTER_PORT', 'ranks')}-{parent_pid}"


def command_inside_launcher(
    target: str, arguments: Sequence[str], options: Sequence[str]
) -> str | None:
    """Return the right command line if the target is a launcher, None if it is none.

    A launcher starts the processes that train, and halfstep has to be in these.

    Args:
        target: Of ``halfstep run``.
        arguments: Those of the target.
        options: Those of ``halfstep run``.
    """
    name = Path(target).name
    if name in ("accelerate", "accelerate.commands.accelerate_cli") and arguments[:1] == ["launch"]:
        name, arguments = "accelerate launch", arguments[1:]
    words = _LAUNCHERS.get(name)
    if words is None:
        return None
    module = _MODULE_OPTION.get(words[0], "-m")
    own, script = _split(arguments)
    return shlex.join([*words, *own, module, "halfstep", "run", *options, *script])


def _split(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split what a launcher is given into its own options and what it starts, as we take it."""
    for index, argument in enumerate(arguments):
        if argument in ("-m", "--module"):
            return list(arguments[:index]), ["-m", *arguments[index + 1 :]]
        if argument.endswith(".py"):
            return list(arguments[:index]), list(arguments[index:])
    return list(arguments), ["train.py"]
