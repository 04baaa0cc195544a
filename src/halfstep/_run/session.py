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
from halfstep._run import launch
from halfstep._run.once import show_once
from halfstep._run.replacements import replaced
from halfstep._run.script import execute, hide_our_frames
from halfstep.errors import RanksError

if TYPE_CHECKING:
    from halfstep._diagnose.watch import Watch


@dataclass(frozen=True)
class Program:
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

    def __init__(self, program: Program, options: Options) -> None:
        self._program = program
        self._options = options
        self._failure: BaseException | None = None
        self._pid = os.getpid()
        self._rank, self._num_ranks = machine.rank(), machine.num_ranks()
        self._watch: Watch | None = None
        self._stderr = sys.stderr  # the program may put another there
        self._stack = ExitStack()
        self._folder = options.folder or launch.make_folder(program.stem, os.environ, os.getppid())
        sys.argv = [program.target, *program.arguments]  # the record says what was run
        self._record = record(self._folder.absolute(), every=options.every)
        self._record.__enter__()
        # Before the program registers its own functions: those are called first.
        atexit.register(self._close)

    def run(self) -> None:
        """Run the program, once; everything that it raises passes through."""
        program = self._program
        try:
            self._put_in_place()
            execute(program.target, program.arguments, is_module=program.is_module)
        except BaseException as error:
            self._failure = error
            hide_our_frames()
            if isinstance(error, RanksError):
                show_once(error)
            raise

    def _put_in_place(self) -> None:
        amp, policy = self._options.amp, self._options.policy
        # They are imported before the names mean something else: they see PyTorch's scaler too.
        from halfstep._run.mixed_precision import mixed_precision

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
