"""Watch on a training loop that diagnoses bad steps."""

from __future__ import annotations

import math
import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.weak import WeakTensorKeyDictionary

from halfstep._common.module_names import without_wrappers
from halfstep._common.nested import tensors_in
from halfstep._common.numbers import power
from halfstep._common.text import names_text
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import Closure, split_closure, with_closure
from halfstep._pytorch import autograd, distributed, modes, optim
from halfstep._pytorch.listeners import listening_to_clipping
from halfstep._scaler import GradScaler, Outcome, Reason
from halfstep._tools.diagnose.diagnose import (
    INNOCENT,
    LEAVE_OUT,
    SECONDS,
    WAS_FINITE,
    diagnosis_of_calls,
    is_bad_at_scale_1,
    why_not_replayed,
)
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis, predicate
from halfstep._tools.diagnose.inspect_op import bad_entries
from halfstep._tools.diagnose.optimizer_step import (
    NOT_AGAIN,
    Numbers,
    diagnosis_of_taken_step,
    event_of,
    numbers_of,
)
from halfstep._tools.dtype_errors.dtype_error import add_explanation
from halfstep._tools.line import Line, line_text
from halfstep._tools.patches import Patches
from halfstep._tools.replay.blame import name_in_code, names_in
from halfstep._tools.replay.kept_calls import (
    KeptCall,
    Made,
    copied_from,
    is_model,
    may_learn_from,
    needed_for,
    step_of,
    trained_by,
    weights_of,
    why_not_again,
)
from halfstep._tools.rounds import Rounds
from halfstep._tools.user_code import user_line
from halfstep._tools.watch.bad_steps import (
    Skips,
    are_finite,
    has_nan,
    have_finite_values,
    values_of,
)
from halfstep._tools.watch.capture import Capture
from halfstep._tools.watch.carried import Carried
from halfstep._tools.watch.earlier import Earlier, is_of_the_model, of_buffers
from halfstep._tools.watch.growth import Growth
from halfstep._tools.watch.live import SEE_MORE, LiveSearch
from halfstep._tools.watch.optimizers import (
    Search,
    not_skipped,
    of_settings,
    scaled_again,
    search_of,
    still_scaled,
    with_bad_setting,
)
from halfstep._tools.watch.skips import Search as SkipSearch
from halfstep.errors import CallOrderError, DiagnosisWarning
from halfstep.events import is_observing, is_stepping, observe

WENT_BAD_LATE = (
    "the gradients were finite when they were unscaled, and the loop made them inf or NaN between "
    "unscale_() and step(): check what it divides by (a norm of 0, inf or NaN), its sums over "
    "ranks, and its clipping"
)
SPOILT = (
    "it has made {names} inf or NaN, also if its loss is left out; unless a scaler or guard "
    "restores them, what reads them is wrong: check the batch first, and reset the buffers"
)
LEFT_OUT = "the script left this batch out"
NOT_COUNTED = "; it is not counted: the next step is step {step}, too"
MOST_DIAGNOSES = 5  # the largest number of places that are diagnosed in a run
MOST_TRIED = 10
"""The largest number of steps that are diagnosed, including those that go bad at a known place."""
MOST_CHECKED = 16
"""The largest number of expected skips that are replayed to find NaNs that no scale can cure.

Also that of predictions which the script left out for their data; later ones are not diagnosed.
"""


@dataclass
class _WatchedStep:
    """What is known of the step that is running."""

    ends_before: list[KeptCall] = field(default_factory=list)  # for a further optimizer
    is_bad: bool = False  # and diagnosed, unless bad_ends are left
    num_calls: int = 0  # of its closure
    search: Search | None = None  # the line search that they are, in which a loss may be inf
    num_scaled: int = 0  # losses
    is_scaled_again: bool = False  # one of them, which was scaled already
    num_backward: int = 0  # passes
    losses: list[Tensor] = field(default_factory=list)  # noted by a scaler, before a backward pass
    # Of the last backward pass.
    roots: MutableMapping[Tensor, None] = field(default_factory=WeakTensorKeyDictionary)
    is_ahead = False  # whether that is of the round after an open one
    left_out: Made | None = None  # the first bad value that the loop has read
    bad_ends: list[KeptCall] = field(default_factory=list)  # calls of backward to replay at the end


@dataclass
class _Taken:
    """The step that an optimizer takes."""

    optimizer: Optimizer
    number: int
    numbers: Numbers
    # Its arguments with a closure in place of its own, if it has one.
    arguments: Callable[[Closure], tuple[tuple[Any, ...], dict[str, Any]]]
    # After a call of its closure, until a further one, or before the first one if the loop has
    # made them and the weights are finite: weights, gradients, and their versions.
    gradients: list[tuple[Tensor, Tensor, int]] = field(default_factory=list)

    def note_gradients(self) -> None:
        found = [(w, w.grad) for w in parameters(self.optimizer) if w.grad is not None]
        self.gradients = [(w, grad, autograd.version_of(grad)) for w, grad in found]

    @contextmanager
    def with_its_gradients(self) -> Iterator[None]:
        """Put back in the block the gradients that a further call of the closure has unset."""
        unset = [(weight, grad) for weight, grad, _ in self.gradients if weight.grad is None]
        try:
            for weight, grad in unset:
                weight.grad = grad
            yield
        finally:
            for weight, _ in unset:
                weight.grad = None


class _StepCount:
    """Number of the steps of a loop."""

    def __init__(self) -> None:
        self.num = self.num_by_hand = 0
        self.rounds = Rounds()  # of several optimizers, each one step
        self.is_leaving = False  # whether the loop drops the current step

    def count(self, *optimizers: Optimizer) -> None:
        """Count a round of several optimizers as one step, and discard steps counted by hand."""
        self.num, self.num_by_hand = self.num - self.num_by_hand, 0
        begins = [self.rounds.add(each) for each in optimizers]
        self.num -= bool(begins) and not any(begins)


class Watch:
    """Watch that diagnoses the bad steps of the training loop inside a block.

    A step is bad if its loss is not finite, if its gradients are not finite and no scaler would
    skip it, or if it is skipped for an overflow that is not part of dynamic scaling. Overflows at
    the start of a run, after the scale has grown, and of gradients that have become larger are part
    of it, unless a replay at scale 1 is not finite or the scale keeps falling. A bad loss that the
    loop reads and drops without a backward pass, as in
    ``if not math.isfinite(loss.item()): sys.exit(1)``, counts too.

    A bad step is replayed immediately, before its state changes, from the calls that the loop made.
    If that is impossible, the following steps are traced live, provided a scaler skips bad steps.

    Raises:
        TypeError: ``tell`` is not callable.

    Sync: three per step without a scaler, two with one; more in skipped steps and steps 1, 2, 4 ...
    """

    is_diagnosing = True

    def __init__(
        self,
        scaler: GradScaler | None = None,
        model: nn.Module | None = None,
        tell: Callable[[Diagnosis, int], object] | None = None,
        seconds: float = SECONDS,
        number: Callable[[bool], int] = lambda _: 0,
    ) -> None:
        if not (tell is None or callable(tell)):
            raise TypeError(
                f"diagnose(tell={type(tell).__name__}): pass a function that takes a diagnosis and "
                "a number"
            )
        self.found: list[Diagnosis] = []  # one for each place
        self.notes: list[str] = []  # for the next diagnosis
        self.misses_threads = False  # whether an optimizer stepped in another thread
        self._scaler, self._model, self._tell = scaler, model, tell or self.warn
        self._capture = Capture(
            self._is_here,
            self._conclude,
            self._before_backward,
            self._before_update,
            self._after_read,
        )
        self._skips: weakref.WeakKeyDictionary[GradScaler, Skips] = weakref.WeakKeyDictionary()
        self._live = LiveSearch(self.notes)
        log, last_model = self._capture.log, lambda: self._last_model
        self._earlier = Earlier(log, last_model, self._diagnosis_of, self._is_told)
        self._carried = Carried(log)
        self._growth = Growth(self._carried)
        self._steps = _StepCount()
        self._running = _WatchedStep()
        self._num_tried = self._num_checked = self._num_left_out = 0
        self._was_finite = False  # the step before
        self._is_spoiled = False  # a step was taken with bad gradients
        self._taken: _Taken | None = None  # the step that an optimizer takes
        self._went_bad: dict[str, int] = {}  # weights and buffers, with the step
        self._of_steps: set[int] = set()  # those of them that were reported
        self._last_model: nn.Module | None = None
        self._seconds = seconds
        # The number of the running step in a record, or of the last one if that counted it, or 0.
        self.number, self._is_counted = number, False
        self._loss_scaler: GradScaler | None = None
        self._max_norm: float | None = None  # to which the loop has clipped gradients
        self._stack = ExitStack()
        self.watch_here()

    def watch_here(self) -> None:
        """Watch this process and thread, as in a fork of the watched one."""
        self._pid, self._thread = os.getpid(), threading.get_ident()

    def __enter__(self) -> Self:
        if is_observing(self):
            raise CallOrderError("this watch is already on; make another one")
        patches = Patches()
        with ExitStack() as stack:
            stack.callback(patches.close)
            self._capture.install(patches)
            stack.enter_context(self._capture.keeping())
            stack.enter_context(observe(self))
            stack.enter_context(listening_to_clipping(self._note_clipping))
            stack.callback(register_optimizer_step_pre_hook(self._before_step).remove)
            stack.callback(register_optimizer_step_post_hook(self._after_step).remove)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, *_: object
    ) -> None:
        self.stop(kind)
        if error is not None:
            add_explanation(error)

    def stop(self, error: type[BaseException] | None = None) -> None:
        """Stop watching; ``error`` is the type of the error that ended the loop, if any."""
        try:
            self._end_live(None, is_last=True)
            if is_observing(self) and (error is None or not issubclass(error, KeyboardInterrupt)):
                has_failed = error is not None and not issubclass(error, SystemExit)
                if error is not None and self._running.left_out is None:
                    log = self._capture.log
                    self._running.left_out = log.bad_at_end() if has_failed else log.first_bad()
                self._conclude(is_last=True, has_failed=has_failed)
        finally:
            self._stack.close()

    @staticmethod
    def warn(found: Diagnosis, step: int) -> None:
        """Issue a :class:`halfstep.errors.DiagnosisWarning` at the user's current line.

        This is what happens without ``tell``, for a ``tell`` that does more than that.
        """
        line = user_line() or Line("<unknown>", 1, "", "")
        text = f"step {step} {predicate(found)}\n{found}"
        warnings.warn_explicit(text, DiagnosisWarning, line.file, line.number)

    # --- events -----------------------------------------------------------------------------------

    def on_loss(self, scaler: GradScaler, outputs: Any) -> None:
        """Note a loss before it is scaled."""
        if self._is_watching(scaler):
            self._loss_scaler, step = scaler, self._running
            # `halfstep run` scales inside of the backward pass, whose roots were checked.
            losses = [loss for loss in tensors_in([outputs]) if loss not in step.roots]
            if again := scaled_again(losses, self._capture.log.made_by):
                step.is_scaled_again = True
                self._report(again)
            step.losses = [loss.detach() for loss in losses]
            step.num_scaled += 1

    def on_iteration(
        self, scaler: GradScaler, outcomes: Sequence[Outcome], left_out: Sequence[Outcome]
    ) -> None:
        """Check the outcomes of an iteration, and diagnose the iteration if it went bad."""
        if not outcomes or not self._is_watching(scaler):
            return
        running = self._capture.take_running()  # as `--amp` may end an iteration in backward
        kind, bad = self._skips.setdefault(scaler, Skips()).judge(outcomes)
        skipped = [outcome for outcome in outcomes if not outcome.taken]
        step = self._running
        late = [outcome for outcome in skipped if outcome.reason is Reason.AFTER_UNSCALE]
        if late and self._may_look():  # a replay, which ends with the backward pass, is finite
            ends = tuple(culprit.name for each in late for culprit in each.find_culprits())
            weights = (weight for each in late for weight in each.culprit_parameters())
            found = self._earlier.of_gradients(weights)
            self._report(found or Diagnosis("unknown", ends=ends, notes=(WENT_BAD_LATE,)))
        if late:
            skipped, bad = [each for each in skipped if each not in late], []
        bad = skipped if step.bad_ends else [] if step.is_bad else bad
        scale = bad[0].scale if bad else None
        if skipped and not (bad or step.is_bad) and self._check_at_scale_1(kind):
            bad, scale = skipped, 1.0
            self.notes.append(f"replayed at scale 1; that of the step is {power(skipped[0].scale)}")
        if bad and any(outcome.taken for outcome in outcomes):
            self.notes.append("another optimizer has stepped before the replay")
        with self._about(is_counted=True):
            self._end_step(scale, is_bad=bool(bad), is_skipped=bool(skipped))
        self._capture.ends += running
        self._steps.count(*(each.optimizer for each in (*outcomes, *left_out) if each.optimizer))

    def _note_clipping(self, max_norm: float) -> None:
        self._max_norm = max_norm if self._is_here() else self._max_norm

    @contextmanager
    def _about(self, *, is_counted: bool, is_leaving: bool = False) -> Iterator[None]:
        """Number the step that the block is about: a record has counted it, the loop drops it."""
        self._is_counted, self._steps.is_leaving = is_counted, is_leaving
        try:
            yield
        finally:
            self._is_counted = self._steps.is_leaving = False

    def _before_backward(self, roots: Any) -> None:
        """Diagnose a step whose loss is not finite, before its backward pass."""
        step = self._running
        step.left_out = None
        if step.is_bad or self._live.is_on or not self._is_here():
            return
        step.num_backward += 1
        call = self._capture.ends[-1]
        self._growth.before_backward(adds=call.name == "backward")
        # With a scaler, check the unscaled losses that on_loss has noted.
        given = list(tensors_in([roots]))
        losses, step.losses = step.losses or given, []
        step.roots = WeakTensorKeyDictionary(dict.fromkeys(given))
        if step.num_backward == 1:  # later ones of the step find other gradients set
            step.is_ahead = self._steps.rounds.is_ahead(given)
        values, taken = values_of(losses), self._taken
        is_begun = taken is not None and bool(taken.gradients) and not step.num_calls
        if is_begun and self._check_weights():  # before its closure; a loss may hide it
            step.is_bad = True
            return
        is_inner = bool((call.kwargs or {}).get("create_graph"))
        # A loss is computed of an inner gradient, and its own backward pass comes later.
        if (is_inner and call.name != "backward") or all(map(math.isfinite, values)):
            if values and not is_inner:
                loss, owner = max(values, key=abs), None if taken is None else taken.optimizer
                self._growth.note_loss(loss, self._step, call.at and call.at.line, owner)
            if taken is not None:
                taken.gradients = []
            return
        if step.num_calls and self._check_weights():
            step.is_bad = True
            return
        if step.search == "own" or (step.search and not any(map(math.isnan, values))):
            return  # a trial that went too far
        if step.num_calls:
            self.notes.append(f"call {step.num_calls + 1} of its closure in this step")
            self._is_spoiled = True
        step.is_bad = True
        ends = self._capture.ends[-1:]
        if any(isinstance(call.function, DistributedDataParallel) for call in needed_for(ends)):
            # Not replayed before this backward pass, whose gradients DDP's hooks count.
            step.bad_ends = ends
        else:
            self._look(ends, self._scale)

    def _after_read(self, made: Made) -> None:
        if self._running.left_out is None and not self._running.is_bad:
            self._running.left_out = copied_from(made)

    def _conclude(
        self, is_again: bool = True, *, is_last: bool = False, has_failed: bool = False
    ) -> None:
        """Diagnose a step that the loop dropped: it read a bad value and continued, or ended.

        If no model of the step is called again (``is_again``), the loop may add up their losses.
        """
        made = self._running.left_out
        if made is not None and not is_again and not self._capture.log.is_old(made.call):
            return
        self._running.left_out = None
        calls = [] if made is None else needed_for([made.call])
        num_ends = len(self._capture.ends)
        is_end = made is not None and made.call in self._capture.ends  # by torch.func.grad
        is_training = is_end or any(call.has_grad and is_model(call.function) for call in calls)
        if made is None or not is_training:
            return
        if not (is_end or has_failed or may_learn_from(made.call)):
            return  # a metric
        was_taken = self._capture.log.is_old(made.call)  # the loop read the value after the step
        if was_taken and not self._was_finite:
            return  # that step was already diagnosed
        there = made.call.still_there() or []
        is_checked = not is_last and is_model(made.call.function)  # features and predictions
        is_checked &= any(each.dim() > 1 for each in there[made.position :][:1])  # but no loss
        self._steps.num -= was_taken
        self._running.is_ahead = self._steps.rounds.is_ahead(there)
        if not is_checked or self._num_left_out < MOST_CHECKED:
            with self._about(is_counted=was_taken, is_leaving=not is_end):
                self._look([made.call], None, made, is_last=is_last, is_checked=is_checked)
        self._was_finite = False
        self._is_spoiled |= is_end  # nothing keeps the loop from stepping with these gradients
        self._steps.num += num_ends if is_end else 1
        if not was_taken:
            self._capture.begin()

    def _before_update(self) -> None:
        """End a step that the loop makes by hand, before the first weight changes."""
        if not self._steps.rounds and self._counts_plain_steps():
            self._steps.num_by_hand += 1
            self._end_plain_step(weights_of(needed_for(self._capture.ends)))

    def _before_step(
        self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Diagnose a step without a scaler, before it is taken or after its closure has run."""
        self.misses_threads |= threading.get_ident() != self._thread
        if not self._is_outermost_step():
            return None
        self._pause(is_stepping=True)
        closure, others, kwargs = split_closure(args[1:], kwargs)
        given = others, kwargs
        with_its = partial(with_closure, args=others, kwargs=kwargs)
        arguments = (lambda _: given) if closure is None else with_its
        taken = self._taken = _Taken(optimizer, self._step, numbers_of(optimizer), arguments)
        ends = self._capture.ends or self._running.ends_before
        calls = partial(needed_for, ends)
        model = lambda: self._model_of(calls())  # noqa: E731
        if closure is None:
            self._growth.note_step(optimizer)
        state = self._growth.before_step(optimizer, taken.number, model, self._earlier.said, calls)
        setting = with_bad_setting(optimizer) or state
        if setting is not None:
            self._is_spoiled = self._running.is_bad = True
            self._report(setting)
        elif not is_stepping() and self._running.num_backward <= self._running.num_scaled:
            is_pending = self._running.num_backward > 0
            scaled = still_scaled(optimizer, self._loss_scaler) if is_pending else None
            if scaled is not None:
                self._growth.mislead(optimizer)
            elif self._loss_scaler is not None:
                scaled = not_skipped(optimizer)
            if scaled is not None:
                self._is_spoiled = True
                self._report(scaled)
        if self._running.is_scaled_again:
            self._growth.mislead(optimizer)
        if is_stepping() or not self._counts_plain_steps():
            return None
        # With gradients in place, an optimizer may never evaluate its closure.
        if closure is None or self._running.is_bad:
            self._end_plain_step(parameters(optimizer), optimizer)
            return None
        if self._capture.ends and have_finite_values(parameters(optimizer)):
            taken.note_gradients()  # of the loop's own backward pass, as for a SAM
        others, kwargs = with_closure(self._watched(closure, taken), others, kwargs)
        return (args[0], *others), kwargs

    def _watched(self, closure: Callable[[], Any], taken: _Taken) -> Callable[[], Any]:
        """Wrap a closure so that its first evaluation ends the step for the watch."""
        optimizer = taken.optimizer

        def watched() -> Any:
            self._pause(is_stepping=False)
            try:
                result = closure()
            finally:
                self._pause(is_stepping=True)
            if not self._running.num_calls:
                self._end_plain_step(parameters(optimizer), optimizer)
                self._running.search = search_of(optimizer)
            self._running.num_calls += 1
            taken.note_gradients()
            return result

        return watched

    def _pause(self, *, is_stepping: bool) -> None:
        self._capture.pause(is_paused=is_stepping)
        self._live.pause(is_paused=is_stepping)

    def _end_plain_step(
        self, weights: Iterable[Tensor], optimizer: Optimizer | None = None
    ) -> None:
        step = self._running
        ends, bad_ends, step.bad_ends = self._capture.ends or step.ends_before, step.bad_ends, []
        if bad_ends:
            self._look(bad_ends, None)
        gradients = (weight.grad for weight in weights if weight.grad is not None)
        if ends and not step.is_bad and not have_finite_values(gradients):
            step.is_bad = True
            self._look(ends, None)
        # A SAM moves weights by hand before its first optimizer steps.
        if self._capture.ends or (optimizer is not None and self._steps.num_by_hand):
            if optimizer is not None:
                self._steps.count(optimizer)
            self._is_spoiled |= step.is_bad
            self._end_step(None, is_bad=False)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_outermost_step():
            return
        self._pause(is_stepping=False)
        self._check_weights()
        self._taken = None
        self._running.num_calls, self._running.search = 0, None
        if self._counts_plain_steps() and not is_stepping() and self._capture.ends:
            self._capture.begin()  # drops trials of a line search, or of an unknown closure

    def _check_weights(self) -> bool:
        """Diagnose a step that made weights bad of finite gradients; return whether it did."""
        taken, num_calls = self._taken, self._running.num_calls
        if taken is None or self._is_spoiled or self._running.is_bad:
            return False
        optimizer, step = taken.optimizer, taken.number
        ends = self._capture.ends or self._running.ends_before
        model = self._model or self._last_model or self._model_of(needed_for(ends))
        named = [] if model is None else model.named_buffers()
        buffers = [each for name, each in named if without_wrappers(name) not in self._went_bad]
        if have_finite_values([*parameters(optimizer), *buffers]):
            return False
        with taken.with_its_gradients():
            with modes.unseen_by_modes():
                written, known = partial(self._earlier.said, is_new=True), frozenset(self._went_bad)
                event = event_of(optimizer, names_in(model), known, written)
            if event is None:
                self._check_buffers(step)
                return False
            names = [event.tensor or "", *_bad_names(model, parameters=True)]
            self._went_bad = dict.fromkeys(names, step) | self._went_bad
            self._of_steps.add(step)
            self._running.is_bad = not self._counts_plain_steps()
            self._was_finite, self._is_spoiled = False, True
            if self._may_look():
                is_same = all(autograd.version_of(g) == v for _, g, v in taken.gradients)
                if num_calls > 1:
                    why = NOT_AGAIN.format(f"its gradients are those of call {num_calls}")
                    event = replace(event, notes=(*event.notes, why))
                elif is_same:
                    calls = needed_for(ends)
                    can_repeat = why_not_replayed(calls, model) is None
                    again = step_of(calls, None, None) if can_repeat else None
                    given = optimizer, taken.numbers, event, model, self._seconds, taken.arguments
                    explained = self._growth.explain(event, step)
                    event = explained or diagnosis_of_taken_step(*given, again)
                self._report(event, step)
        return True

    def _check_buffers(self, step: int, *, is_bad: bool = False) -> bool:
        """Diagnose a call that made buffers bad, also in a step that is bad; return if it did."""
        names = [name for name in _bad_names(self._last_model) if name not in self._went_bad]
        self._went_bad |= dict.fromkeys(names, step)
        if not names or not self._may_look():
            return False
        found = None
        if (given := self._capture.log.given_bad()) is not None:
            call, tensor = given
            name, where = name_in_code(tensor), "" if call.at is None else line_text(call.at.line)
            text = f"check {name} before the call: it is not finite{bad_entries(tensor)}"
            cure = Cure("data", text, remarks=(SPOILT.format(names=names_text(names)),))
            notes = (f"{'' if is_bad else 'the loss of this step is finite; '}the call: {where}",)
            found = Diagnosis("data", tensor=name, cure=cure, notes=notes)
        elif not is_bad:
            ends, scale = self._capture.ends or self._running.ends_before, self._scale
            found = of_buffers(names, ends, self._last_model, scale, self._seconds)
        if found is not None:
            self._of_steps.add(step)
            self._report(found, step)
        return found is not None

    def _may_look(self) -> bool:
        """Count a step to diagnose; return whether the limits of a run allow it."""
        if len(self.found) >= MOST_DIAGNOSES or self._num_tried >= MOST_TRIED:
            return False
        self._num_tried += 1
        return True

    def _is_outermost_step(self) -> bool:
        is_here = not torch.compiler.is_compiling() and self._is_here()
        return is_here and optim.optimizer_step_depth() <= 1

    def _is_watching(self, scaler: GradScaler) -> bool:
        self.misses_threads |= threading.get_ident() != self._thread
        return (self._scaler is None or self._scaler is scaler) and self._is_here()

    def _counts_plain_steps(self) -> bool:
        return self._scaler is None and self._loss_scaler is None and self._is_here()

    def _is_here(self) -> bool:
        """Return whether this is the watched process and thread, outside of replays."""
        is_mine = os.getpid() == self._pid and threading.get_ident() == self._thread
        return is_mine and is_observing(self)

    # --- the step ---------------------------------------------------------------------------------

    def _end_step(self, scale: float | None, *, is_bad: bool, is_skipped: bool = False) -> None:
        try:
            may_be_bad = is_bad or self._running.is_bad or self._live.is_on
            if self._live.is_on:
                self._end_live(scale)
            elif is_bad:
                self._look(self._capture.ends, scale)
            if is_skipped:  # its buffers are not those of the next step
                self._check_buffers(self._step, is_bad=may_be_bad)
            self._was_finite = not (is_bad or self._running.is_bad)
            self._is_spoiled &= not self._was_finite
            self._carried.measure(self._step)
        finally:
            self._steps.num += 1
            self._running = _WatchedStep(ends_before=self._capture.ends)
            self._capture.begin()
            self._live.begin()

    def _end_live(self, scale: float | None, *, is_last: bool = False) -> None:
        """End the live trace of a step, if there is one, and report what it found."""
        for found, step in self._live.end(scale, self._step, is_last=is_last):
            if found.verdict != "unknown" or not self.found:
                self._report(found, step)

    def _look(
        self,
        ends: Sequence[KeptCall],
        scale: float | None,
        root: Made | None = None,
        *,
        is_last: bool = False,
        is_checked: bool = False,
    ) -> None:
        """Diagnose a step, up to the limits of a run.

        ``ends`` are the calls of ``backward``. For a bad value without a backward pass, ``root`` is
        that value and ``ends`` is the call that made it. If the script checks it by itself
        (``is_checked``) and its data is the cause, as it may expect, nothing is reported.
        """
        if not self._may_look():
            return
        is_left_out = root is not None
        calls, before = needed_for(ends), needed_for(self._running.ends_before)
        model, seconds = self._model_of(calls), self._seconds
        is_other = bool(known := trained_by(calls)) and known.isdisjoint(trained_by(before))
        can_repeat = why_not_again(before) is None and self._was_finite and not is_other
        again = step_of(before, None, scale) if can_repeat else None
        line = ends[-1].at.line if ends and ends[-1].at and not is_left_out else None
        usual = self._growth.usual(self._step, line, calls, before)
        usual = replace(usual, max_norm=self._max_norm, step=again, is_known=self._is_known)
        usual = replace(usual, loss=None, size=None) if is_other else usual
        calls = self._capture.log.with_keepers(calls)
        try:
            found, why_not = diagnosis_of_calls(calls, root, scale, model, usual, seconds)
        finally:
            self._capture.log.put_back()
        if found is None and not is_left_out:
            root = self._capture.log.first_bad()
            found = None if root is None else self._diagnosis_of(root, scale)
            found = found or self._earlier.of_gradients(weights_of(calls))
        if found is not None:
            if found.verdict == "data":
                if is_checked and not is_of_the_model(found):
                    self._num_tried -= 1
                    self._num_left_out += 1
                    return
                if found.cure and is_left_out and not is_last and not is_of_the_model(found):
                    is_counted = not self.number(self._is_counted)
                    more = "" if is_counted else NOT_COUNTED.format(step=self._step)
                    self.notes.append(f"{LEFT_OUT}{more}")
                    text = "\n".join(s for s in found.cure.text.splitlines() if LEAVE_OUT not in s)
                    found = replace(found, cure=replace(found.cure, text=text))
                grown = self._growth.of_carried(found, self._step, calls)
                found = grown or self._earlier.of_written(found, calls)
            elif found.verdict == "maths" and self._taken is not None:  # in a closure
                settings = filter(None, [of_settings(self._taken.optimizer)])
                self.notes += [f"not tried: {text}" for text in settings]
            is_new = found.verdict in ("maths", "range", "scale") and not self._is_known(found)
            if is_new and found.bad is not None:
                text, change = usual.standardise() if found.bad.is_overflow else ("", None)
                text = text if change is None else ""
                hints = [*filter(None, [self._growth.of_collapse(calls, line), text])]
                if hints and (found.cure is None or found.cure.kind == "look"):
                    found = replace(found, cure=Cure("code", "\nor ".join(hints)))
                else:
                    self.notes += [f"not tried: {hint}" for hint in hints]
            self._report(found)
            return
        if why_not == WAS_FINITE and distributed.has_ranks():  # as of gradients they have summed
            self._report(Diagnosis("none", happened=INNOCENT))
            return
        was = "went bad;" if why_not == WAS_FINITE else "was not replayed:"
        self.notes.append(f"step {self._step} {was} {why_not}")
        if self._check_buffers(self._step, is_bad=True):
            return
        # With a scaler, later bad steps are skipped and can be traced.
        if (self._scaler or self._loss_scaler) is not None and not is_last:
            self._live.ask(model, self._step, is_sure=why_not != WAS_FINITE)
        elif not is_left_out:
            self._report(self._seen_only(root))

    def _diagnosis_of(self, value: Made, scale: float | None = None) -> Diagnosis | None:
        """Return the diagnosis of a value that the loop computed, apart from a loss."""
        calls = needed_for([value.call])
        return diagnosis_of_calls(calls, value, scale, self._model_of(calls))[0]

    def _model_of(self, calls: Sequence[KeptCall]) -> nn.Module | None:
        self._last_model = self._model or self._capture.log.model_of(calls) or self._last_model
        return self._last_model

    def _check_at_scale_1(self, kind: SkipSearch | None) -> bool:
        """Replay a skipped step at scale 1, up to the limit of a run; return whether it is bad.

        At the start and after growth, an overflow without a NaN is not replayed to see that.
        """
        calls = needed_for(self._capture.ends)
        model = self._model_of(calls)
        if self._num_checked >= MOST_CHECKED or why_not_replayed(calls, model) is not None:
            return False
        if kind != "fall" and (model is None or not has_nan(model)):
            return False
        self._num_checked += 1
        return is_bad_at_scale_1(calls, model)

    @property
    def _scale(self) -> float | None:
        """The scale of the losses, if a scaler multiplies them."""
        return None if self._loss_scaler is None else self._loss_scaler.get_scale()

    @property
    def _step(self) -> int:
        """The number of the current step, from 1: that of the record, if it has one."""
        steps, known = self._steps, self.number(self._is_counted)
        is_ahead, num_calls = self._running.is_ahead, self._running.num_calls
        if known or num_calls:  # the step ended with the first call of its closure
            return (known or steps.num) + (is_ahead and not (self._is_counted or num_calls))
        if optim.optimizer_step_depth() and not steps.rounds:
            return steps.num - steps.num_by_hand + 1
        if self._loss_scaler or steps.rounds or steps.num_by_hand:
            return steps.num + (is_ahead or not steps.rounds.is_open)
        ends = self._capture.ends  # some may return gradients that a loss is computed of
        inner = ("create_graph", "retain_graph")
        outer = [end for end in ends if not any(map((end.kwargs or {}).get, inner))]
        num = sum(end.name == "backward" for end in outer) or len(outer) or len(ends[:1])
        return steps.num + num + steps.is_leaving

    def _seen_only(self, first: Made | None) -> Diagnosis:
        """Return the diagnosis of a step that cannot be replayed."""
        notes = [SEE_MORE]
        if first is not None:
            where = "" if first.call.at is None else f" at {line_text(first.call.at.line)}"
            name = getattr(first.call.function, "__name__", type(first.call.function).__name__)
            notes.insert(0, f"the first value seen that is not finite: what {name} returned{where}")
        return Diagnosis("unknown", notes=tuple(notes))

    def _report(self, found: Diagnosis, step: int | None = None) -> None:
        if found.verdict != "data" and self._growth.has_thrown():
            return
        if found.verdict == "growth":
            if self._growth.was_explained:  # it follows from the same explosion
                return
            self._growth.was_explained = True
        notes = tuple(self.notes)
        number = self._step if step is None else step
        if found.verdict == "data" and self._was_finite:
            notes = (*notes, "the loss of the optimizer step before it was finite")
        before = self._went_bad.get(found.tensor or "")
        if found.verdict == "data" and self._is_told(found.tensor):
            return  # an earlier step made it so, and was reported
        if found.verdict == "data" and before is not None:
            notes = (*notes, f"{found.tensor} went bad in step {before}")
        left = [n for n in _bad_names(self._last_model) if n not in self._went_bad]
        self._went_bad |= dict.fromkeys(left, number)
        is_older = any(name in found.happened for name in left)  # what made it, before the loop
        if left and found.tensor not in left and not is_older:
            notes = (*notes, SPOILT.format(names=names_text(left)))
            self._of_steps.add(number)
        found = replace(found, notes=(*found.notes, *notes))
        if (bad := found.bad) is not None:
            name = self._capture.log.full_name(bad.module, self._last_model)
            found = replace(found, bad=replace(bad, module=name))
        self.notes.clear()
        is_left = self._is_spoiled or (not self._was_finite and is_of_the_model(found))
        if self.found and is_left and found.verdict in ("data", "unknown"):
            return  # left over from a bad step whose diagnosis was reported
        if not self._is_known(found):
            self.found.append(found)
            self._tell(found, number)

    def _is_told(self, name: str | None) -> bool:
        """Return whether a reported step made a weight or buffer bad."""
        return self._went_bad.get(name or "") in self._of_steps

    def _is_known(self, found: Diagnosis) -> bool:
        return any(_place(found) == _place(known) for known in self.found)


def _bad_names(model: nn.Module | None, *, parameters: bool = False) -> list[str]:
    """Return the names of the buffers of a model, or of its parameters, that are not finite."""
    if model is None:
        return []
    named = model.named_parameters() if parameters else model.named_buffers()
    return [without_wrappers(name) for name, tensor in named if not are_finite([tensor])]


def _place(found: Diagnosis) -> tuple[object, ...]:
    bad = found.bad
    return (found.verdict, found.tensor, bad and (bad.op, bad.module, bad.phase, bad.line))
