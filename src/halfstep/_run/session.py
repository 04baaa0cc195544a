"""A run of a script under halfstep, from before its first line to process exit."""

from __future__ import annotations

import atexit
import builtins
import errno
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING

import torch

from halfstep import Policy, record
from halfstep._common import machine
from halfstep._common.numbers import things
from halfstep._common.text import tell
from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._pytorch import listeners
from halfstep._record.files import file_of, is_same_program, programs_in
from halfstep._run.launch import make_folder, other_ranks_refused, show_once
from halfstep._run.stand_ins import replaced
from halfstep.errors import RanksError, RecordError
from halfstep.sinks import MLflow, Sink, TensorBoard, WandB

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
        """The short name: ``train`` for ``scripts/train.py`` and ``mypackage.train``."""
        name = self.target.rpartition(".")[2] if self.is_module else Path(self.target).stem
        return Path(name).name  # `-m ../package` is an error that is reported later

    @property
    def text(self) -> str:
        """The part of the command line after ``halfstep run`` and its options."""
        return shlex.join([*(["-m"] if self.is_module else []), self.target, *self.arguments])


@dataclass(frozen=True)
class Options:
    """The options of a run, as ``halfstep run --help`` describes them."""

    policy: Policy
    folder: Path | None  # None: create a new one
    every: int
    is_quiet: bool
    amp: torch.dtype | None
    is_diagnosing: bool
    sinks: tuple[str, ...] = ()
    is_appending: bool = False


class RunSink:
    """A sink that is made at the first step, when the program has started its W&B or MLflow run."""

    def __init__(self, name: str, folder: Path) -> None:
        made: dict[str, Callable[[], Sink]] = {
            "tensorboard": partial(TensorBoard, folder),
            "wandb": WandB,
            "mlflow": MLflow,
        }
        self._make = made[name]
        self._sink: Sink | None = None

    def log(self, step: int, scalars: Mapping[str, float]) -> None:
        """Pass the scalars on."""
        self._sink = self._sink or self._make()
        self._sink.log(step, scalars)


class Session:
    """A run of a program, with its record and the replaced names.

    Both stay active until the process exits, because threads and ``atexit`` functions of the
    program may still train.
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
        if not (self._is_new or options.is_appending):
            _require_same_program(self._file, command.target)
        sys.argv = [command.target, *command.arguments]  # stored in the record
        # Scalars are those of the run, not of a rank.
        sinks = [RunSink(name, self._folder) for name in options.sinks] if self._rank == 0 else []
        self._record = record(self._file.parent, every=options.every, sinks=sinks)
        self._record.__enter__()
        # atexit functions run in reverse order. Registering before the program does means that
        # this one runs last.
        atexit.register(self._close)

    def run(self) -> None:
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
        # Import these before the names are replaced: they also need PyTorch's own scaler.
        from halfstep._run.amp import mixed_precision

        if self._options.is_diagnosing:
            from halfstep._diagnose.watch import Watch

            self._watch = Watch(tell=self._tell)
        self._stack.enter_context(replaced(policy))
        self._stack.enter_context(other_ranks_refused(self._command.text))
        if amp is not None:
            self._stack.enter_context(mixed_precision(amp, self._say, policy=policy))
        if self._watch is not None:
            self._stack.enter_context(self._watch)

    def _tell(self, diagnosis: Diagnosis, step: int) -> None:
        """Record and print the diagnosis of a step on the rank that made it."""
        assert self._watch is not None
        if self._record.num_steps:  # zero in the first step, and if the loop steps by hand
            step = self._record.num_steps + (not self._watch.is_ending)
        self._record.add_diagnosis(diagnosis, step=step)
        self._say_of_rank(f"step {step} went bad:\n{diagnosis}")

    def _close(self) -> None:
        """Complete the record and print its location."""
        if os.getpid() != self._pid:
            return  # a fork of the program; its parent completes the record
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
            # Nothing ran if the target was not found or has a syntax error. Python reports that.
            has_run = self._record.num_steps or not isinstance(failure, NotRunnable | SyntaxError)
            if not has_run and self._is_new:
                self._remove_record()
            elif not self._options.is_quiet:
                self._say(self._last_line())

    def _remove_record(self) -> None:
        self._file.unlink(missing_ok=True)
        with suppress(OSError):  # a folder with files of other ranks or runs is not empty
            self._file.parent.rmdir()
            if self._options.folder is None:
                self._folder.parent.rmdir()

    def _last_line(self) -> str:
        steps, skipped = self._record.num_steps, self._record.num_skipped
        if not steps:
            return (
                "no optimizer step was seen: the program made none, steps by hand, or trains in "
                "processes that it starts itself, which are not recorded (torchrun ... -m halfstep "
                "run)"
            )
        diagnosed = ""
        if self._watch is not None:
            num = len(self._watch.found)
            diagnosed = f", {things(num, 'diagnosis', 'diagnoses')}"
        view = f"halfstep report {shlex.quote(str(self._folder))}"
        return f"{things(steps, 'step')} recorded, {skipped} skipped{diagnosed}: {view}"

    def _say(self, text: str) -> None:
        """Print a message that is the same on all ranks, once."""
        if self._rank == 0:
            self._print(text)

    def _say_of_rank(self, text: str) -> None:
        """Print a message that may differ between ranks on this rank."""
        if not self._options.is_quiet:
            self._print(f"rank {self._rank}, {text}" if self._num_ranks > 1 else text)

    def _print(self, text: str) -> None:
        if self._stderr is not None:
            try:
                tell(f"halfstep: {text}", self._stderr, flush=True)
            except (OSError, ValueError):  # stderr was closed by the script or its reader
                return


def _require_same_program(file: Path, target: str) -> None:
    """Raise ``RecordError`` if a record is another program's; one that is resumed goes on."""
    programs = programs_in(file)
    if programs and not any(is_same_program(each, target) for each in programs):
        raise RecordError(
            f"{file.parent} has the record of another program, {programs[-1]}: give each its own "
            "folder with -o, or add this run to that record with --append"
        )


# --- execution of the script ----------------------------------------------------------------------


# The script runs in a new module that stays `__main__` until the process exits: code that runs at
# exit (`atexit`, threads, `__del__`) may pickle its objects.


class NotRunnable(SystemExit):
    """The target is not a runnable module; none of its code has run."""


def require_file(path: str) -> None:
    """Raise ``OSError`` if a script cannot be read."""
    if os.path.isdir(path):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), path)
    with open(path, "rb"):
        pass


def execute(target: str, arguments: list[str], *, is_module: bool) -> None:
    """Run ``python target arguments...``, or ``python -m target arguments...`` if ``is_module``.

    Exceptions of the script propagate; :func:`hide_our_frames` shortens their traceback.
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
    """Return the part of a traceback inside the script, without frames of halfstep's listeners."""
    frame = traceback
    while frame is not None and frame.tb_frame.f_code is not execute.__code__:
        frame = frame.tb_next
    if frame is None:
        return traceback
    while frame.tb_next is not None and frame.tb_next.tb_frame.f_code is _find.__code__:
        frame = frame.tb_next  # an error in the __init__ of a package
    own = frame.tb_next
    while frame.tb_next is not None:
        # Listeners stand between the script and torch.autograd.backward.
        if frame.tb_next.tb_frame.f_code.co_filename == listeners.__file__:
            frame.tb_next = frame.tb_next.tb_next
        else:
            frame = frame.tb_next
    return own


def _set_first_path(folder: str) -> None:
    if not sys.flags.safe_path:  # `python -P` adds no folder
        sys.path[0] = folder


def _find(name: str) -> tuple[ModuleSpec, CodeType]:
    """Return the spec and code that ``python -m name`` runs.

    Raises:
        NotRunnable: There is no such module, or it cannot be run.
    """
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
