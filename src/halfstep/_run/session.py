"""One run of a script under halfstep, from before its first line until after its last one."""

from __future__ import annotations

import atexit
import hashlib
import itertools
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

import torch

from halfstep import Policy, record
from halfstep._common import machine
from halfstep._common.numbers import things
from halfstep._common.text import tell
from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._pytorch import distributed
from halfstep._record.files import RUNS, file_of
from halfstep._run import other_ranks
from halfstep._run.script import NotRunnable, execute, hide_our_frames
from halfstep._run.stand_ins import replaced
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from halfstep._diagnose.watch import Watch


@dataclass(frozen=True)
class Command:
    """The command to run: ``python [-m] target arguments...``."""

    target: str
    arguments: list[str]
    is_module: bool

    @property
    def stem(self) -> str:
        """A short name: ``train`` for ``scripts/train.py`` and ``mypackage.train``."""
        name = self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem
        return Path(name).name  # -m ../package is a mistake, which is found later

    @property
    def text(self) -> str:
        """What follows ``halfstep run`` and its options on a command line."""
        return shlex.join([*(["-m"] if self.is_module else []), self.target, *self.arguments])


@dataclass(frozen=True)
class Options:
    """The options of a run, as ``halfstep run --help`` describes them."""

    policy: Policy
    folder: Path | None  # None for a new one
    every: int
    is_quiet: bool
    amp: torch.dtype | None
    is_diagnosing: bool


class Session:
    """A run of a program, with its record and the replaced names.

    Both stay until this process ends: threads and ``atexit`` functions of the program may still
    train.
    """

    def __init__(self, command: Command, options: Options) -> None:
        self._command = command
        self._options = options
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        self._rank, self._num_ranks = machine.rank(), machine.num_ranks()
        self._watch: Watch | None = None
        self._stderr = sys.stderr  # the program may replace it
        self._stack = ExitStack()
        self._folder = options.folder or make_folder(command.stem, os.environ, os.getppid())
        self._file = file_of(self._folder.absolute(), self._rank)
        self._is_new = not self._file.exists()
        sys.argv = [command.target, *command.arguments]  # the record says what was run
        self._record = record(self._file.parent, every=options.every)
        self._record.__enter__()
        # Before the program registers its own functions, as the last one registered runs first.
        atexit.register(self._close)

    def run(self) -> None:
        """Run the program, once; its exceptions pass through."""
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
        # Imported before the names are replaced, as these modules need PyTorch's own scaler too.
        from halfstep._run.amp import mixed_precision

        if self._options.is_diagnosing:
            from halfstep._diagnose.watch import Watch

            self._watch = Watch(tell=self._tell)
        self._stack.enter_context(replaced(policy))
        self._stack.enter_context(other_ranks.refused(self._command.text))
        if amp is not None:
            self._stack.enter_context(mixed_precision(amp, self._say, policy=policy))
        if self._watch is not None:
            self._stack.enter_context(self._watch)

    def _tell(self, diagnosis: Diagnosis, _: int) -> None:
        """Record and print the diagnosis of a step, on the rank that made it."""
        assert self._watch is not None
        step = self._record.num_steps + (not self._watch.is_ending)
        self._record.add_diagnosis(diagnosis, step=step)
        self._say_of_rank(f"step {step} went bad:\n{diagnosis}")

    def _close(self) -> None:
        """Complete the record and print where it is."""
        if os.getpid() != self._pid:
            return  # a fork of the program; the record belongs to its parent
        failure = self._failure
        try:
            if self._watch is not None:
                self._watch.stop(type(failure) if failure else None)
            self._stack.close()
            for note in [] if self._watch is None else self._watch.notes:
                self._record.add_note(note)
                self._say_of_rank(note)
        finally:
            self._record.__exit__(type(failure) if failure else None, failure, None)
            if isinstance(failure, NotRunnable) and self._is_new:
                self._remove_record()
            elif not self._options.is_quiet:
                self._say(self._last_line())

    def _remove_record(self) -> None:
        self._file.unlink(missing_ok=True)
        with suppress(OSError):  # of other ranks, or other files
            self._file.parent.rmdir()

    def _last_line(self) -> str:
        steps, skipped = self._record.num_steps, self._record.num_skipped
        view = f"halfstep report {shlex.quote(str(self._folder))}"
        if not steps:
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
        """Print a message that is the same on all ranks, on one of them."""
        if self._rank == 0:
            self._print(text)

    def _say_of_rank(self, text: str) -> None:
        """Print a message that may differ between ranks, on this one."""
        if not self._options.is_quiet:
            self._print(f"rank {self._rank}, {text}" if self._num_ranks > 1 else text)

    def _print(self, text: str) -> None:
        if self._stderr is not None:
            try:
                tell(f"halfstep: {text}", self._stderr, flush=True)
            except (OSError, ValueError):  # stderr was closed, here or by its reader
                return


# --- errors that all ranks raise ------------------------------------------------------------------


def show_once(error: BaseException) -> None:
    """Show the error that ends the script with its traceback on one rank, as a line on others.

    The first rank to arrive shows it, not rank 0: a launcher stops the others after a failure.
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
    """Return whether no other rank has shown the same error."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return True
    digest = hashlib.sha256(str(error).encode()).hexdigest()[:16]
    try:
        return int(distributed.default_store().add(f"halfstep/error/{digest}", 1)) == 1
    except RuntimeError:  # the store is gone with its rank
        return True


# --- folders and launchers ------------------------------------------------------------------------


# Programs that start the processes of a run, by module or file name, and what their command line
# begins with. Their own options follow, then ours.
_LAUNCHERS = {
    **dict.fromkeys(("torchrun", "torch.distributed.run", "torch.distributed.launch"), "torchrun"),
    **dict.fromkeys(
        ("accelerate launch", "accelerate-launch", "accelerate.commands.launch"),
        "accelerate launch",
    ),
    **dict.fromkeys(("deepspeed", "deepspeed.launcher.runner"), "deepspeed"),
}


def make_folder(stem: str, environ: Mapping[str, str], parent_pid: int) -> Path:
    """Make and return a folder for a run, the same on all ranks without communication."""
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
    """Return the right command line if the target of ``halfstep run`` is a launcher, else None.

    A launcher starts the processes that train, and halfstep has to run inside those.
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
