"""One run of a script under halfstep, from before its first line until after its last."""

from __future__ import annotations

import atexit
import os
import shlex
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from halfstep import Policy, record
from halfstep._common import machine
from halfstep._common.numbers import things
from halfstep._common.text import tell
from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._run.script import execute, hide_our_frames
from halfstep._run.stand_ins import replaced
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from halfstep._diagnose.watch import Watch
import hashlib
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from types import TracebackType

from halfstep import _torch
from halfstep._common.machine import num_ranks
from halfstep._record.files import RUNS


@dataclass(frozen=True)
class Command:
    """What is to be run: ``python [-m] target arguments...``."""

    target: str
    arguments: list[str]
    is_module: bool

    @property
    def stem(self) -> str:
        """A word for it: ``train`` for ``scripts/train.py`` and ``mypackage.train``."""
        return self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem


@dataclass(frozen=True)
class Options:
    """How.

    Attributes:
        policy: What ``torch.autocast`` means where the script gives no policy.
        folder: For the record; None for one of its own.
        every: Tensors are measured every so many steps, 0 for never.
        is_quiet: Nothing is said at the end, and no diagnosis is printed.
        amp: The lower precision to train in, for a script that has no autocast of its own.
        is_diagnosing: Whether steps that go bad are replayed.
    """

    policy: Policy
    folder: Path | None
    every: int
    is_quiet: bool
    amp: torch.dtype | None
    is_diagnosing: bool


class Session:
    """What is around the program.

    The record and the replaced names stay until this process ends: threads and functions that the
    program leaves to be called at the end may still train.

    Raises:
        OSError: The folder cannot be written to.
    """

    def __init__(self, command: Command, options: Options) -> None:
        self._command = command
        self._options = options
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        self._rank, self._num_ranks = machine.rank(), machine.num_ranks()
        self._watch: Watch | None = None
        self._stderr = sys.stderr  # the program may put another there
        self._stack = ExitStack()
        self._folder = options.folder or make_folder(command.stem, os.environ, os.getppid())
        sys.argv = [command.target, *command.arguments]  # the record says what was run
        self._record = record(self._folder.absolute(), every=options.every)
        self._record.__enter__()
        # Before the program registers its own functions: those are called first.
        atexit.register(self._close)

    def run(self) -> None:
        """Run the program, once; everything that it raises passes through."""
        command = self._command
        try:
            self._put_in_place()
            execute(command.target, command.arguments, is_module=command.is_module)
        except BaseException as error:
            self._failure = error
            hide_our_frames()
            if isinstance(error, RanksError):
                show_once(error)
            raise

    def _put_in_place(self) -> None:
        amp, policy = self._options.amp, self._options.policy
        # They are imported before the names mean something else: they see PyTorch's scaler too.
        from halfstep._run.amp import mixed_precision

        if self._options.is_diagnosing:
            from halfstep._diagnose.watch import Watch

            self._watch = Watch(engine=None, model=None, tell=self._tell)
        self._stack.enter_context(replaced(policy))
        if amp is not None:
            self._stack.enter_context(mixed_precision(amp, self._say, policy=policy))
        if self._watch is not None:
            self._stack.enter_context(self._watch)

    def _tell(self, diagnosis: Diagnosis, _: int) -> None:
        """Record what is wrong with a step, and print it, on whichever rank it is."""
        step = self._record.add_diagnosis(diagnosis)  # its own number, as the record counts
        self._say_of_rank(f"step {step} went bad:\n{diagnosis}")

    def _close(self) -> None:
        """Complete the record and say where it is."""
        if os.getpid() != self._pid:
            return  # a child that the program forked; the record is its parent's
        failure = self._failure
        try:
            self._stack.close()
            for note in [] if self._watch is None else self._watch.notes:
                self._record.add_note(note)
                self._say_of_rank(note)
        finally:
            self._record.__exit__(type(failure) if failure else None, failure, None)
            if not self._options.is_quiet:
                self._say(self._last_line())

    def _last_line(self) -> str:
        steps, skipped = self._record.num_steps, self._record.num_skipped
        view = f"halfstep report {shlex.quote(str(self._folder))}"
        if steps == 0:
            return (
                "no optimizer step was seen: the program made none, or it trains in processes that "
                f"it starts itself, which are not recorded (torchrun ... -m halfstep run). {view}"
            )
        diagnosed = ""
        if self._watch is not None:
            num = len(self._watch.found)
            diagnosed = f", {'1 diagnosis' if num == 1 else f'{num} diagnoses'}"
        return f"{things(steps, 'step')} recorded, {skipped} skipped{diagnosed}: {view}"

    def _say(self, text: str) -> None:
        """Print what is the same on all ranks: on one."""
        if self._rank == 0:
            self._print(text)

    def _say_of_rank(self, text: str) -> None:
        """Print what may differ from rank to rank: on this one."""
        if not self._options.is_quiet:
            self._print(f"rank {self._rank}, {text}" if self._num_ranks > 1 else text)

    def _print(self, text: str) -> None:
        if self._stderr is not None:
            try:
                tell(f"halfstep: {text}", self._stderr, flush=True)
            except (OSError, ValueError):  # nobody reads it any more, or it was closed
                return


def show_once(error: BaseException) -> None:
    """Let one rank show the error that now ends the script, with its traceback; the others a line.

    It is the first to come here, not rank 0: a launcher ends the others as soon as one has failed.
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
    """Say whether no other rank has shown the same."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    digest = hashlib.sha256(str(error).encode()).hexdigest()[:16]
    try:
        return int(_torch.default_store().add(f"halfstep/error/{digest}", 1)) == 1
    except RuntimeError:  # the store is gone, with the rank that held it
        return True


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
