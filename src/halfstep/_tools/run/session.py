"""A run of a script under halfstep, from before its first line to process exit."""

from __future__ import annotations

import atexit
import json
import os
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.util import Finalize, register_after_fork
from pathlib import Path
from textwrap import shorten
from typing import TYPE_CHECKING, Any

import msgspec
import torch

from halfstep import Policy, record
from halfstep._common import machine
from halfstep._common.formats import FORMATS_BY_DTYPE
from halfstep._common.numbers import at_steps, count, percent, power, things
from halfstep._common.text import names_text, outside, tell
from halfstep._pytorch import listeners
from halfstep._tools.diagnose.diagnosis import Diagnosis, predicate
from halfstep._tools.dtype_errors.dtype_error import DtypeError, explain
from halfstep._tools.record.files import (
    LateWriter,
    LineWriter,
    file_of,
    is_same_program,
    program_in,
)
from halfstep._tools.record.run import (
    CLIPPED_EARLY,
    NO_STEP,
    OWN_PRECISION,
    WRONG_STEP,
    Seen,
    dtypes_text,
    with_options,
)
from halfstep._tools.run.launch import (
    NotRunnable,
    execute,
    folder_of_process,
    hide_our_frames,
    lock_folder,
    make_folder,
)
from halfstep._tools.run.masters import NO_ADDITIONS, Additions, added
from halfstep._tools.run.stand_ins import PolicyUse, replaced
from halfstep._tools.user_code import OURS
from halfstep.errors import HalfstepWarning, RecordError

if TYPE_CHECKING:
    from halfstep._tools.watch.watch import Watch


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


@dataclass(frozen=True)
class Options:
    """The options of a run, as ``halfstep run --help`` describes them."""

    policy: Policy
    folder: Path | None  # None: create a new one
    every: int
    is_quiet: bool
    amp: torch.dtype | None
    diagnose_seconds: float | None = None  # None: replay no step
    has_children: bool = True  # whether the processes that the program starts are recorded too
    additions: Additions = NO_ADDITIONS
    run_as: tuple[str, ...] = ("halfstep", "run")  # the command, without the folder, for advice


class RecordOfProcess(record):
    """The record of one process of a run. Its file begins with its first step.

    Only then is the rank known of a process that the program has started. A file of that rank which
    another process writes is of another group of ranks; so this one gets a folder of its own, as
    does a process that has no rank.
    """

    def __init__(
        self, options: Options, folder: Path, begun: Callable[[], None], *, is_child: bool
    ) -> None:
        super().__init__(folder, every=options.every)
        self._is_child, self._run_as, self._begun = is_child, options.run_as, begun
        self.file: Path | None = None  # before the first step

    @property
    def seen(self) -> Seen:
        """What is known of the run without reading the record."""
        return Seen() if self._recorder is None else self._recorder.seen

    def leave(self) -> None:
        """Stop to observe without writing anything more: the file is another process's."""
        self._stack.close()

    def _writer(self) -> LateWriter:
        self.late = LateWriter(self._begin)
        return self.late

    def _opened(self) -> LineWriter | LateWriter:
        writer = super()._writer()
        self.file = file_of(self.path, machine.rank())
        self._begun()
        return writer

    def _begin(self) -> LineWriter | LateWriter:
        if not self._is_child:
            return self._opened()
        if machine.num_ranks() > 1:
            with suppress(RecordError):
                return self._opened()
        self.path = folder_of_process(self.path)
        return self._opened()


class Session:
    """A run of a program, or of a process that it has started, with record and replaced names.

    Both stay active until the process exits, because threads and ``atexit`` functions of the
    program may still train. A process that the program has started has no command.
    """

    def __init__(self, command: Command | None, options: Options) -> None:
        self._command = command
        self._failure: BaseException | None = None
        self._inherited: BaseException | None = None  # that the parent handled when it forked
        self._began, self._is_closed = time.time(), False
        self._is_launched = machine.num_ranks() > 1
        self._watch: Watch | None = None
        self._policy_use: PolicyUse | None = None
        self._is_policy_checked = False
        self._keeps_own = False  # --amp lowers nothing, since the script does
        self._rules: dict[str, None] = {}  # of the cures so far: one command has them all
        self._explanation: DtypeError | None = None
        self._stderr = sys.stderr  # the program may replace it
        self._unsaid: list[str] = []  # until the name of this process is known
        self._stack = ExitStack()
        stem = "" if command is None else command.stem  # other processes are given the folder
        self._shown_folder = options.folder or make_folder(stem, os.environ, os.getppid())
        self._has_made_folder = options.folder is None
        self._lock: int | None = None
        self._folder = self._shown_folder.absolute()
        if command is not None:
            options = replace(options, folder=self._folder)
            file = file_of(self._shown_folder, machine.rank())
            require_writable(file)
            if file.exists():
                _require_same_program(file, command.target)
            if not self._has_made_folder and not self._is_launched:
                self._lock = lock_folder(self._folder)
            sys.argv = [command.target, *command.arguments]  # stored in the record
        self._options = options
        self._record = self._begin_record()
        # atexit functions run in reverse order. Registering before the program does means that
        # this one runs last.
        atexit.register(self._close)
        os.register_at_fork(after_in_child=self._begin_in_fork)
        if command is None:
            self._close_with_multiprocessing()

    def _begin_record(self) -> RecordOfProcess:
        begun, is_child = self._print_unsaid, self._command is None
        made = RecordOfProcess(self._options, self._folder, begun, is_child=is_child)
        return made.__enter__()

    def _begin_in_fork(self) -> None:
        """Let go of the parent's record in a fork of this process, and begin another one."""
        self._command, self._is_closed = None, not self._options.has_children
        self._unsaid, self._inherited = [], sys.exc_info()[1]
        self._unlock()
        self._record.leave()
        if self._options.has_children:
            self._record = self._begin_record()
            if self._watch is not None:
                self._watch.watch_here()
            self._close_with_multiprocessing()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _close_with_multiprocessing(self) -> None:
        """Also close where multiprocessing ends a process without ``atexit`` functions.

        A process forgets all such functions when it begins, but for those that are made then.
        """
        Finalize(None, self._close, exitpriority=0)
        register_after_fork(self, lambda _: Finalize(None, self._close, exitpriority=0))

    def run(self) -> None:
        command = self._command
        assert command is not None
        try:
            self.put_in_place()
            execute(command.target, command.arguments, is_module=command.is_module)
        except BaseException as error:
            self._failure = error
            self._explanation = explain(error)
            hide_our_frames()
            raise

    def put_in_place(self) -> None:
        """Put halfstep's classes in the place of PyTorch's."""
        amp, policy = self._options.amp, self._options.policy
        # Import these before the names are replaced: they also need PyTorch's own scaler.
        from halfstep._tools.run.amp import mixed_precision

        if self._options.diagnose_seconds is not None:
            from halfstep._tools.watch.watch import Watch

            seconds = self._options.diagnose_seconds
            self._watch = Watch(tell=self._tell, seconds=seconds, number=self._number)
        additions = self._options.additions
        self._policy_use = self._stack.enter_context(
            replaced(policy, is_guarding=additions.is_guarding)
        )
        if self._command is not None and self._options.has_children:
            self._stack.enter_context(reaching_children(self._options))
        if policy.module_rules:
            self._stack.enter_context(listeners.listening_to_backward(self._require_modules))
        if amp is not None:
            amp_context = mixed_precision(
                amp,
                self._say_of_amp,
                policy=policy,
                products=lambda: self._record.seen.products,
                is_explained=lambda: self._has_failed or bool(self._records_of_others()),
            )
            self._stack.enter_context(amp_context)
        if additions != NO_ADDITIONS:
            self._stack.enter_context(added(additions, self._say_and_note))
        if self._watch is not None:
            self._stack.enter_context(self._watch)
        self._stack.enter_context(noting_warnings(lambda text: self._record.add_note(text)))

    def _require_modules(self, *_: object) -> None:
        """End the program at its first backward pass if the policy names a module of no model."""
        self._is_policy_checked, was_checked = True, self._is_policy_checked
        why = None if was_checked or self._policy_use is None else self._policy_use.named_nowhere()
        if why is not None:
            raise NotRunnable(f"halfstep run: {why}")

    def _number(self, is_counted: bool) -> int:  # zero in the first step, or if steps are by hand
        num = self._record.num_steps
        return num if is_counted or not num else self._record.current_step

    def _tell(self, diagnosis: Diagnosis, step: int) -> None:
        """Record and print the diagnosis of a step on the rank that made it."""
        options = replace(self._options, amp=None) if self._keeps_own else self._options
        diagnosis = replace(_by_option(diagnosis, options, self._rules), rank=machine.rank())
        self._record.add_diagnosis(diagnosis, step=step)
        self._say_of_process(f"step {step} {predicate(diagnosis)}:\n{diagnosis}")

    def _close(self) -> None:
        """Complete the record and print its location."""
        if self._is_closed:
            return
        self._is_closed = True
        failure = self._failure
        if self._command is None and failure is None:
            # multiprocessing closes in a `finally` of its error, atexit after Python has shown it.
            error = sys.exc_info()[1] or getattr(sys, "last_value", None)
            failure = None if error is self._inherited else error
        try:
            if self._watch is not None:
                self._watch.stop(type(failure) if failure else None)
            self._stack.close()
            for note in self._notes():
                self._record.add_note(note)
                self._say_of_process(note)
        finally:
            # Nothing ran if the target was not found or has a syntax error. Python reports that.
            has_run = self._record.num_steps or not isinstance(failure, NotRunnable | SyntaxError)
            of_others = self._records_of_others()
            if self._command is not None and has_run and not of_others:
                self._record.late.begin()  # says that no step was made, and why the program ended
            self._record.__exit__(type(failure) if failure else None, failure, None)
            if self._command is not None and not has_run:
                with suppress(OSError):  # a folder with files of other ranks or runs is not empty
                    self._shown_folder.rmdir()
                    if self._has_made_folder:
                        self._shown_folder.parent.rmdir()
            elif not self._options.is_quiet:
                if self._explanation is not None:
                    self._say_of_process(str(self._explanation))
                for text in self._findings():
                    self._say_of_process(text)
                if self._command is not None:
                    self._say(self._last_line(of_others))
            self._unlock()

    def _notes(self) -> Iterator[str]:
        if self._watch is not None:
            yield from self._watch.notes
        use, is_needed = self._policy_use, self._options.amp is None  # --amp enters its own
        if use is not None and self._record.num_steps and (is_needed or use.has_autocast):
            yield from use.problems()
        if use is not None and use.wrong_step is not None:
            yield f"{WRONG_STEP}: {use.wrong_step}"

    def _findings(self) -> Iterator[str]:
        options, added = self._options, self._options.additions
        is_scaling = options.amp is torch.float16  # neither option goes with that
        guard, masters = (with_options(options.run_as, each) for each in ("--guard", "--masters"))
        return findings(
            self._record.seen,
            guard="" if is_scaling or added.is_guarding else guard,
            masters="" if is_scaling or added.has_masters else masters,
            num_skipped=self._record.num_skipped,
        )

    @property
    def _has_failed(self) -> bool:
        return isinstance(self._failure, Exception | KeyboardInterrupt)

    def _records_of_others(self) -> list[Path]:
        """Return the files that other processes of the program have written."""
        pattern = "process-*/rank*.jsonl" if self._is_launched else "**/rank*.jsonl"
        files = (file for file in self._folder.glob(pattern) if file != self._record.file)
        return [file for file in files if file.stat().st_mtime >= self._began]

    def _last_line(self, of_others: Sequence[Path]) -> str:
        steps = self._record.num_steps
        view = f"halfstep report {shlex.quote(str(self._shown_folder))}"
        others = things(len(of_others), "process", "processes")
        if not steps and of_others:
            return f"{others} of the program recorded: {view}"
        if not steps and self._has_failed:
            what = "error" if isinstance(self._failure, Exception) else "interrupt"
            return f"no step of an optimizer was completed before the {what}"
        if not steps:
            return NO_STEP
        seen, watch = self._record.seen, self._watch
        found = "" if watch is None else f", {things(len(watch.found), 'diagnosis', 'diagnoses')}"
        is_missing = watch is not None and watch.misses_threads
        found += " (steps of other threads are not diagnosed)" * is_missing
        ran = f"; {dtypes_text(seen.products)}" if seen.products else ""
        what = f"{recorded(steps, self._record.num_skipped, seen)}{found}{ran}"
        if of_others:
            what = f"main process: {what}; {others} that it started recorded too"
        return f"{what}: {view}"

    def _say(self, text: str) -> None:
        """Print a message that is the same on all ranks, once."""
        if machine.rank() == 0:
            self._print(text)

    def _say_and_note(self, text: str) -> None:
        self._record.add_note(text)
        self._say(text)

    def _say_of_amp(self, text: str) -> None:
        self._keeps_own |= OWN_PRECISION in text
        self._say_and_note(text)

    def _say_of_process(self, text: str) -> None:
        """Print a message that may differ between ranks, with the rank."""
        if not self._options.is_quiet:
            self._print(f"rank {machine.rank()}, {text}" if machine.num_ranks() > 1 else text)

    def _print(self, text: str) -> None:
        self._unsaid.append(text)
        if self._command or self._record.file or self._is_closed:
            self._print_unsaid()

    def _print_unsaid(self) -> None:
        texts, self._unsaid = self._unsaid, []
        name = f"{self._record.path.name}, " if self._record.path != self._folder else ""
        # A process of the program that made no step, such as a loader's worker, says nothing.
        is_bystander = self._command is None and self._is_closed and not self._record.num_steps
        if self._stderr is not None and not is_bystander:
            for text in texts:
                with suppress(OSError, ValueError):  # stderr was closed by the script or its reader
                    tell(f"halfstep: {name}{text}", self._stderr, flush=True)


def _require_same_program(file: Path, target: str) -> None:
    """Raise ``RecordError`` if a record is another program's; one that is resumed goes on."""
    program = program_in(file)
    if program is not None and not is_same_program(program, target):
        raise RecordError(
            f"{file.parent} has the record of another program, {program}: give each its own "
            "folder with -o"
        )


def require_writable(file: Path) -> None:
    """Raise as a record would if its file cannot be written."""
    is_new = not file.exists()
    LineWriter(file).close()
    if is_new:
        file.unlink()


MOST_WARNINGS = 10
_OF_OTHER_VERSIONS = DeprecationWarning, PendingDeprecationWarning, FutureWarning


@contextmanager
def noting_warnings(note: Callable[[str], None]) -> Iterator[None]:
    """Note the first warnings that the program prints about this run; they are printed as ever.

    Where a function of halfstep's stands between, the place is the program's line, as ever.
    """
    show, seen = warnings.showwarning, set[str]()

    def showwarning(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        frame, _ = outside(sys._getframe(1))
        if frame is not None and filename.startswith(OURS):
            filename, lineno = frame.f_code.co_filename, frame.f_lineno
        text = shorten(str(message), 200, placeholder=" ...")
        is_new = text not in seen and len(seen) < MOST_WARNINGS
        if is_new and not issubclass(category, (HalfstepWarning, *_OF_OTHER_VERSIONS)):
            seen.add(text)
            where = f"{Path(filename).name}:{lineno}"
            note(f"the program printed a {category.__name__} ({where}): {text}")
        elif CLIPPED_EARLY in str(message):
            note(str(message))
        show(message, category, filename, lineno, *args, **kwargs)

    warnings.showwarning = showwarning
    try:
        yield
    finally:
        if warnings.showwarning is showwarning:  # else the program has set its own
            warnings.showwarning = show


def _by_option(found: Diagnosis, options: Options, rules: dict[str, None]) -> Diagnosis:
    """Return a diagnosis whose cure is options of the run, if these do what was replayed.

    ``rules``: those of cures before it, which the command has too; its own are added.
    """
    cure = found.cure
    if cure is None:
        return found
    policy, own = cure.policy, str(cure.policy).removeprefix(f"{options.policy}; ")
    is_added = own != str(policy)
    *before, last = cure.text.splitlines()
    note = "".join(last.partition("  #")[1:]) if cure.kind == "policy" else ""
    remarks = cure.remarks
    if is_added:
        if not rules.keys() <= {*own.split("; ")}:
            remarks = (*remarks, "its command has the rules of the cures before it too")
        rules |= dict.fromkeys(own.split("; "))
        policy = "; ".join((str(options.policy), *rules))
    words = [] if policy is None else [f"--policy={policy}"]
    can_switch = options.additions == NO_ADDITIONS and (before or options.amp)
    if cure.dtype not in (None, "float32") and can_switch:
        words.insert(0, f"--amp={FORMATS_BY_DTYPE[cure.dtype].name}")
    elif cure.kind != "policy" or not is_added:
        return found
    text = "\n".join((*before, with_options(options.run_as, *words) + note))
    return replace(found, cure=replace(cure, text=text, policy=policy, remarks=remarks))


# --- the last lines -------------------------------------------------------------------------------

HARMFUL = 0.05  # the share of lost updates from which on it is said


def findings(seen: Seen, *, guard: str, masters: str, num_skipped: int = 0) -> Iterator[str]:
    """Yield what went wrong, with the commands that prevent it; empty where they are of no use."""
    share = seen.lost_updates / max(seen.updates, 1)
    if seen.has_low_weights and share >= HARMFUL:
        yield f"{percent(share)} of the measured updates were lost to rounding{_prevents(masters)}"
    if seen.bad_buffers:
        num = things(len(seen.bad_buffers), "buffer")
        # Skipped steps restore buffers; those that a script leaves out do not.
        restores = guard if num_skipped or seen.has_bad_gradients else ""
        does = _prevents(restores, "restores buffers at skipped steps")
        yield f"{num} of the model ended with inf or NaN: {names_text(seen.bad_buffers)}{does}"
    if seen.bad_taken:
        when = f"{things(len(seen.bad_taken), 'step')} (first: {at_steps([min(seen.bad_taken)])})"
        skips = guard if seen.has_bad_gradients and not seen.has_float16 else ""
        does = _prevents(skips, "skips steps with inf or NaN gradients")
        yield f"an optimizer stepped although the loss was inf or NaN, in {when}{does}"
    if seen.scale is not None and seen.scale < 1 <= seen.first_scale:
        began = f"the scale began at {power(seen.first_scale)} and ended at {power(seen.scale)}"
        # Gradients that are finite at no scale, as of the last steps, bring none back.
        returns = guard if seen.is_last_taken else ""
        does = _prevents(returns, "brings it back once gradients are finite at a larger one")
        yield f"{began}{does}"


def _prevents(command: str, does: str = "prevents that") -> str:
    return f"; `{command}` {does}" if command else ""


def recorded(num_steps: int, num_skipped: int, seen: Seen) -> str:
    """Return how many steps a run had, and the record has."""
    if seen.problem is None:
        return f"{things(num_steps, 'step')} recorded, {count(num_skipped)} skipped"
    return (
        f"{things(num_steps, 'step')}, {count(num_skipped)} skipped, of which the record has "
        f"{count(seen.num_written)}, because it could not be written ({seen.problem})"
    )


# --- processes that the program starts ------------------------------------------------------------


# As coverage.py and opentelemetry-instrument do it. A .pth file in site-packages would reach these
# processes too, and every other Python process of the environment.

VARIABLE = "HALFSTEP_RUN"
"""The environment variable with the options of a run, for the processes that its program starts."""

HOOK = str(Path(__file__).parent / "children")  # the folder of the hook, `sitecustomize.py`


@contextmanager
def reaching_children(options: Options) -> Iterator[None]:
    """Let every Python process that is started inside the block record itself, as a fork does."""
    # msgspec's JSON would turn the inf of --guard=inf into null.
    values = json.dumps(msgspec.to_builtins(options, enc_hook=str))
    paths = [HOOK, *filter(None, [os.environ.get("PYTHONPATH")])]
    before = dict(os.environ)
    os.environ |= {VARIABLE: values, "PYTHONPATH": os.pathsep.join(paths)}
    try:
        yield
    finally:
        for name in (VARIABLE, "PYTHONPATH"):
            del os.environ[name]
            os.environ |= {name: before[name]} if name in before else {}


def begin_in_child() -> None:
    """Record this process, which the program of a run has started; see ``children/``."""
    try:
        options = msgspec.convert(json.loads(os.environ[VARIABLE]), Options, dec_hook=_read)
        Session(None, options).put_in_place()
    except Exception as error:  # the process is the script's, and goes on
        tell(f"halfstep: process {os.getpid()} is not recorded: {error}", sys.stderr)


def _read(kind: type, text: str) -> object:
    if kind is torch.dtype:
        return getattr(torch, text.removeprefix("torch."))
    return Policy.parse(text) if kind is Policy else kind(text)
