"""The recorder, which collects the losses, norms and steps of a run and writes them."""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import wraps
from itertools import count, islice, pairwise
from typing import Any

import torch
from msgspec import structs
from torch import Tensor

from halfstep._common.formats import FORMATS_BY_DTYPE, dtype_name
from halfstep._common.machine import device_name
from halfstep._common.nested import tensors_in
from halfstep._common.numbers import power, things
from halfstep._common.text import names_text, warn
from halfstep._gradients.gradients import collect, norms_of, parameters
from halfstep._pytorch import autograd, distributed, modes, optim
from halfstep._pytorch.devices import to_device
from halfstep._scaler import GradScaler, Outcome, Reason
from halfstep._scaler.access import is_unscaled, watch_names
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.line import line_text
from halfstep._tools.record.files import Event, LateWriter, LineWriter
from halfstep._tools.record.models import Models
from halfstep._tools.record.pending import PendingStep, PendingSteps, step_scalars
from halfstep._tools.record.run import (
    CUSTOM,
    HIDDEN,
    HOOKS_AND_SCALE,
    PAST_THE_SCALER,
    TORCH_SCALER,
    Seen,
)
from halfstep._tools.record.sample import (
    MOST_ROWS,
    OTHERS,
    OUTERMOST,
    Sampler,
    UpdateCounter,
    bounded,
    sample_scalars,
)
from halfstep._tools.rounds import Rounds
from halfstep._tools.user_code import user_line
from halfstep.errors import CallOrderError
from halfstep.events import is_observing, is_stepping, observers
from halfstep.sinks import Sink

BEGAN_ELSEWHERE = (Reason.LOSS, Reason.AFTER_UNSCALE)
"""Reasons of skips that began neither in a module's backward pass nor by the scale."""

NUM_CULPRITS = 20  # maximum number of names of parameters or buffers written for a step
MOST_NORMS = 16  # maximum number of measured norms that wait for their step
MOST_IN_TURN = 4  # maximum number of consecutive sampled steps if several optimizers step in turn
MOST_BACKWARD = 256
"""Number of backward passes without an optimizer step after which a sample is discarded."""
MOST_WAITS = 4
"""Number of steps without a backward pass, as of a second optimizer, after which a sample ends."""
NO_MODEL = (
    "no model was found: none was called in the first step (model.forward() is not seen), or "
    "it was called inside compiled code. Name it: halfstep.record(path, model=model)"
)

RUINED = (
    "after step {step}, buffers of the model are inf or NaN: {names}. Evaluations may use them. "
    "GradScaler(module=model) and guard(optimizer, module=model) restore buffers when they skip a "
    "step; in this run, load a checkpoint, or reset these buffers"
)

MANY_TENSORS = (
    f"each sample measures {{num}} tensors, and has at most {MOST_ROWS} of a kind one by one: some "
    f"at equal distances in the model, and the worst; the rest is added up as {OTHERS}"
)

UNSEEN_SCALER = (
    f"{TORCH_SCALER}: they are recorded multiplied by its scale, and the steps that it skips are "
    "missing. Use halfstep.GradScaler, or `halfstep run`, which replaces it"
)


def _aside(method: Callable[..., None]) -> Callable[..., None]:
    """Hide the ops of a method from the user's modes, and keep its errors from ending the run."""

    @wraps(method)
    def aside(recorder: Recorder, /, *args: Any, **kwargs: Any) -> None:
        try:
            with modes.unseen_by_modes():
                method(recorder, *args, **kwargs)
        except Exception as error:
            recorder._discard_sample()
            recorder.say(f"a step could not be recorded: {type(error).__name__}: {error}")

    return aside


class Recorder:
    """A collector of the events of a run, which it writes to the record.

    Sync: none, except in sampled steps, after a skipped step, when a model is found, and in
    :meth:`close`.
    """

    is_diagnosing = False

    def __init__(
        self, writer: LineWriter | LateWriter, models: Models, every: int, sinks: Sequence[Sink]
    ) -> None:
        self.num_steps = self._num_ended = 0
        self._rounds = Rounds()
        self.skipped: set[int] = set()
        self.seen = Seen()
        self._last_written = 0
        self._writer, self._every, self._sinks = writer, every, list(sinks)
        self._lock = threading.RLock()  # several threads of a script may train
        self._models, self._waiting = models, PendingSteps()
        is_searching = not len(models)
        self._products: Counter[str] = Counter()  # of the sampled step
        self._sampler = Sampler(models, is_searching, self.say, self._is_listening)
        self._updates = UpdateCounter(self.say, self._is_listening)
        self._began, self._pid = time.monotonic(), os.getpid()
        self._said: set[str] = set()
        self._policies: dict[str, tuple[str, str]] = {}
        self._loss: Tensor | None = None
        self._scaled: list[Tensor] = []  # in the order of scaling
        self._places: dict[int, int] = {}  # there of losses, by the numbers of their nodes
        self._weighed: set[int] = set()  # the places of those that a pass has multiplied
        self._numbers = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._norms: list[tuple[frozenset[int], Tensor]] = []
        self._is_old = False
        self._loss_scaler: GradScaler | None = None  # which scaled the losses of this iteration
        self._num_scaled = self._num_losses = self._num_backward = self._num_waits = 0
        self._dropped: list[int] = []  # the steps before which gradients were dropped
        self._stepped: set[int] = set()
        self._by_hand: set[int] = set()  # that stepped unscaled gradients past their scaler
        self._first_in_turn = self._num_in_turn = 1
        self._begin_sample(is_measuring=every > 0)

    # --- events of the training -------------------------------------------------------------------

    @_aside
    def on_loss(self, scaler: GradScaler, outputs: Any) -> None:
        """Record a loss before it is scaled."""
        if self._is_here():
            losses = [*tensors_in([outputs])]
            if self._loss_scaler is None:
                self._loss = None
            elif self._num_backward:
                self._leave_out_what_was_dropped(losses)
            self._loss_scaler = scaler
            self._num_scaled += 1
            found = self._add_losses(losses)
            if found is not None and optim.optimizer_step_depth() == 0:
                self._scaled.append(found)  # only the last evaluation of a closure counts
                nodes = [autograd.sequence_number(each.grad_fn) for each in losses if each.grad_fn]
                self._places |= dict.fromkeys(nodes, len(self._scaled) - 1)

    @_aside
    def on_backward(self, roots: Any, gradients: Any = None) -> None:
        """Record the roots of a backward pass: the loss, if no scaler has seen it.

        Its ``gradients`` are factors of the losses, such as -1 for one that is maximised.
        """
        if not self._is_listening():
            return
        if self._sampler.is_open:
            for dtype, num in autograd.products_of(tensors_in([roots])).items():
                name = CUSTOM if dtype is False else HIDDEN if dtype is True else dtype_name(dtype)
                self._products[name] += num
        if autograd.backward_number() >= 0:
            return  # inside another pass, a checkpoint is being recomputed
        self._num_backward += 1
        if self._sampler.is_open and self._num_backward > MOST_BACKWARD:
            self._discard_sample()
            self.say(f"no step of an optimizer was seen in {MOST_BACKWARD} backward passes")
        found = [*tensors_in([roots])]
        factors = [] if gradients is None else [*tensors_in([gradients])]
        if not self._counts_plain_steps():
            for n, root in enumerate(found):
                self._weigh(root, factors[n] if len(factors) == len(found) else None)
            return
        self._leave_out_what_was_dropped(found)
        if factors and len(factors) == len(found):
            found = [loss.detach() * by for loss, by in zip(found, factors, strict=True)]
        self._add_losses(found)

    def _weigh(self, root: Tensor, factor: Tensor | None) -> None:
        """Count scaled losses as their passes multiply them, which add up: several as the last."""
        found = dict(_scalings(root, self._places))
        if not found or root.numel() != 1:
            return
        place, scaling = found.popitem()
        is_alone = scaling is root.grad_fn and [*self._places.values()].count(place) == 1
        if is_alone and factor is None:
            return
        if (scale := autograd.saved_by(scaling).get("other")) is None:
            return
        weighed = _scalar(root.detach() / scale * (1 if factor is None else factor.detach()))
        for at, loss in (*((at, weighed.new_zeros(())) for at in found), (place, weighed)):
            total = loss + (self._scaled[at] if at in self._weighed else 0)
            self._add_losses([total - self._scaled[at]])
            self._scaled[at] = total
            self._weighed.add(at)

    @_aside
    def on_norm(self, tensors: Iterable[Tensor], norm: Tensor) -> None:
        """Record an L2 norm measured by ``torch.nn.utils.clip_grad_norm_``.

        A norm that is distributed over ranks is ignored: adding it up takes a collective.
        """
        if self._is_listening() and not distributed.is_dtensor(norm):
            self._norms.append((frozenset(map(id, tensors)), norm.detach().clone()))
            del self._norms[:-MOST_NORMS]

    @_aside
    def on_iteration(
        self, scaler: GradScaler, outcomes: Sequence[Outcome], left_out: Sequence[Outcome]
    ) -> None:
        """Record the end of an iteration."""
        outcomes = [*outcomes, *left_out]
        if not outcomes or not self._is_here():
            return
        begins = [o.optimizer is None or self._rounds.add(o.optimizer) for o in outcomes]
        if self.num_steps == 0:
            for model in self._models:  # gives names to the scaler's own messages
                watch_names(scaler, model)
        self.num_steps += any(begins)
        for outcome, loss in zip(outcomes, self._losses_of(outcomes), strict=True):
            norm = self._norm_of(outcome.optimizer)
            if norm is None and self._sampler.is_open and not outcome.is_measured:
                # Unknown if the optimizer unscaled the gradients itself, or if they are gone.
                with suppress(CallOrderError):
                    norm = torch.tensor(outcome.norm, dtype=torch.float32)
            self._add_step(outcome.optimizer, outcome, loss, norm)
            # Without a wait: whether the newest state on the host ends with skips.
            if outcome.loss_scale.state.skipped_in_a_row > 0:
                self._write_culprits(outcome)
                self._write_buffers(self.num_steps)
        self._end_iteration(outcomes[-1].scale if self._sampler.is_open else 1.0)

    @_aside
    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Record a step of an optimizer, if it is made without a scaler."""
        if torch.compiler.is_compiling():
            return
        self._updates.after_step(optimizer)
        if optim.optimizer_step_depth() > 1 or is_stepping():
            return  # inside another optimizer, or reported by on_iteration()
        has_gradients = any(p.grad is not None for p in parameters(optimizer))
        if self.num_steps and not (self._num_backward or has_gradients):
            return  # a second optimizer of the same backward pass, which gave it nothing
        if not (self._counts_plain_steps() or self._warn_past_scaler(optimizer)):
            return
        norm = self._norm_of(optimizer)
        if norm is None and self._sampler.is_open:
            norm = _norm_of_gradients(optimizer)
        self.num_steps += self._rounds.add(optimizer)
        self._add_step(optimizer, None, self._loss, norm)
        self._stepped.add(id(optimizer))
        self._end_iteration(1.0)

    @property
    def current_step(self) -> int:
        """The number of the iteration that is running."""
        return self.num_steps + (not self._rounds.is_open)

    def _leave_out_what_was_dropped(self, losses: Sequence[Tensor]) -> None:
        """Forget the loss of backward passes whose gradients are gone, though no step was made."""
        if self._loss is None or self._is_old or optim.optimizer_step_depth() > 0:
            return
        tensors = [p for optimizer in self._numbers for p in parameters(optimizer)]
        if not tensors and self._sampler.has_gradients:  # before the first step
            tensors = [parameter for _, parameter in self._models.parameters()]
        if tensors and all(tensor.grad is None for tensor in tensors):
            leaves = autograd.leaves_of(losses)  # of which the loop may have master parameters
            own = {*map(id, tensors)}.intersection(map(id, leaves))
            if own or all(leaf.grad is None for leaf in leaves):
                self._loss = None
                self._dropped.append(self.num_steps + 1)

    def _warn_past_scaler(self, optimizer: torch.optim.Optimizer) -> bool:
        """Warn if an optimizer stepped with gradients of scaled losses; return whether it did.

        Gradients of another, unscaled loss are not told apart: then it is not claimed.
        """
        scaler = self._loss_scaler
        if scaler is None or not self._is_listening() or self._num_backward > self._num_scaled:
            return False
        if is_unscaled(scaler, optimizer):
            self._by_hand.add(id(optimizer))
            return False
        if not any(note.startswith(PAST_THE_SCALER) for note in self._said):
            line, name = user_line(), type(optimizer).__name__
            where = "" if line is None else f"{line_text(line)}: "
            text = (
                f"{PAST_THE_SCALER} (first at step {self.num_steps + 1}): {where}the gradients of "
                f"{name} were multiplied by the scale ({power(scaler.get_scale())}). Call "
                "scaler.step(optimizer) in place of optimizer.step(), then scaler.update()"
            )
            self.say(text)
            _warn(f"halfstep.record: {text}")
        return True

    @_aside
    def on_torch_scaler(self) -> None:
        """Say that decisions of PyTorch's scaler cannot be seen."""
        if self._is_listening() and UNSEEN_SCALER not in self._said:
            self.say(UNSEEN_SCALER)
            _warn(f"halfstep.record: {UNSEEN_SCALER}")

    def add_diagnosis(self, diagnosis: Diagnosis, step: int | None) -> int:
        """Write a diagnosis of a step, None for the current one; return the step. Sync: none."""
        if step is None:
            step = max(self.num_steps + (optim.optimizer_step_depth() > 0), 1)
        if self._is_here():
            self._write({"event": "diagnosis", "step": step, **asdict(diagnosis)})
        return step

    def say(self, text: str) -> None:
        """Write a note, but only once."""
        if text not in self._said:
            self._said.add(text)
            self._write({"event": "note", "step": self.num_steps + 1, "text": text})

    def close(self, error: str | None) -> None:
        """Write the remaining steps and the end. Sync: one or two."""
        if not self._is_here():
            return
        self._discard_sample()
        try:
            self._write_steps(self._waiting.take_all())
            self._write_buffers(self.num_steps + (error is not None))  # inside the next step
        except Exception as failure:  # a device error may have ended the run
            self.say(f"the last steps could not be read: {failure}")
        if self._dropped:
            num = things(len(self._dropped), "time")
            self.say(
                f"gradients were cleared {num} before step() of an optimizer (first before step "
                f"{self._dropped[0]}); their losses are not recorded"
            )
        self._write({"event": "end", "time": self._time(), "steps": self.num_steps, "error": error})
        self._writer.close()

    # --- the iteration ----------------------------------------------------------------------------

    def _is_here(self) -> bool:
        """Return whether this is the recording process, not a fork of it."""
        return os.getpid() == self._pid

    def _is_listening(self) -> bool:
        """Return whether events count: a diagnosis removes all observers during its replay."""
        return is_observing(self) and self._is_here()

    def _counts_plain_steps(self) -> bool:
        return self._loss_scaler is None and self._is_listening()

    def _add_losses(self, outputs: Any) -> Tensor | None:
        """Add losses to that of the iteration, and return their sum; None if there are none."""
        numbers = (each for each in outputs if each.numel() == 1 and not each.is_complex())
        found = [_scalar(x.detach()) for x in numbers if not modes.is_inside_functorch(x)]
        if not found:
            return None
        # The losses of micro-batches add up; a closure's evaluation replaces the last one.
        is_new = self._loss is None or self._is_old or optim.optimizer_step_depth() > 0
        self._num_losses = 1 if is_new else self._num_losses + 1
        new = _sum(found)
        self._loss = new if is_new or self._loss is None else _sum([self._loss, new])
        self._is_old = False
        return new

    def _losses_of(self, outcomes: Sequence[Outcome]) -> list[Tensor | None]:
        """Return the loss of each step of an iteration.

        It is the loss of the backward passes since the previous step. Without any, as when two
        optimizers share a backward pass, it is the loss of the previous step.
        """
        ends = [outcome.num_losses for outcome in outcomes]
        if len(outcomes) == 1 or ends != sorted(ends) or len(self._scaled) != ends[-1]:
            return [self._loss] * len(outcomes)
        parts = [self._scaled[begin:end] for begin, end in pairwise([0, *ends])]
        losses: list[Tensor | None] = []
        for part in parts:
            losses.append(_sum(part) if part else losses[-1] if losses else None)
        return losses

    def _number_of(self, optimizer: torch.optim.Optimizer | None) -> int | None:
        """Return an optimizer's number within its class; numbers of deleted ones are reused."""
        if optimizer is None:
            return None
        if optimizer not in self._numbers:
            taken = {n for each, n in self._numbers.items() if type(each) is type(optimizer)}
            self._numbers[optimizer] = next(n for n in count(1) if n not in taken)
        return self._numbers[optimizer]

    def _norm_of(self, optimizer: torch.optim.Optimizer | None) -> Tensor | None:
        """Return the measured norm of exactly the gradients of an optimizer."""
        if optimizer is None or not self._norms:
            return None
        own = {id(p.grad) for p in parameters(optimizer) if p.grad is not None}
        return next((norm for ids, norm in reversed(self._norms) if ids == own), None)

    def _add_step(
        self,
        optimizer: torch.optim.Optimizer | None,
        outcome: Outcome | None,
        loss: Tensor | None,
        norm: Tensor | None,
    ) -> None:
        name = type(optimizer).__name__ if outcome is None else outcome.optimizer_name
        number = self._number_of(optimizer)
        updates, lost = self._updates.counts(optimizer)
        numbers = self._time(), name, number, outcome, loss, norm, updates, lost
        by_hand = id(optimizer) in self._by_hand
        self._waiting.add(PendingStep(self.num_steps, *numbers, by_hand, self._num_losses))

    def _end_iteration(self, scale: float) -> None:
        self._num_ended += 1
        if self._num_ended == 1:
            self._write_device()
        # A second optimizer may use the same backward pass: keep the loss until the next pass.
        self._norms, self._scaled, self._places, self._is_old = [], [], {}, True
        self._weighed.clear()
        self._loss_scaler, self._num_scaled = None, 0
        self._by_hand.clear()
        if self._sampler.is_open and (self._num_backward or self._num_waits >= MOST_WAITS):
            if self._num_backward:  # else none may be seen later either, as by torch.func
                self._num_waits = 0
            self._end_sample(scale)
        else:
            self._num_waits += self._sampler.is_open
            self._write_steps(self._waiting.take())
        if self._choose_next() and not self._sampler.is_open:
            self._begin_sample(is_measuring=True)
        self._num_backward = 0

    def _choose_next(self) -> bool:
        """Choose whether to sample the next step; of optimizers in turn, one step each.

        A short run has few multiples of ``every``, and its first step often has a learning rate of
        0. So steps 1, 2, 4, 8 ... are sampled as well.
        """
        if not self._every:
            return False
        step = self._num_ended + 1
        is_multiple = step % self._every == 0
        if is_multiple or (step < self._every and step.bit_count() == 1):
            self._first_in_turn = step
            self._num_in_turn = min(max(len(self._stepped), 1), MOST_IN_TURN)
        if is_multiple:
            self._stepped.clear()
        return step - self._first_in_turn < self._num_in_turn

    def _begin_sample(self, *, is_measuring: bool) -> None:
        self._sampler.begin(is_measuring)
        if is_measuring:
            self._updates.begin()

    def _discard_sample(self) -> None:
        self._sampler.end()
        self._updates.end([], [])
        self._products.clear()

    def _end_sample(self, scale: float) -> None:
        self._write_steps(self._waiting.take_all())
        tensors = self._updates.end(self._sampler.end(), self._models.parameters())
        for event in self._models.events(self.num_steps):
            self._write(event)
        self._write_buffers(self.num_steps)
        if not len(self._models):
            self.say(NO_MODEL)
        for device, policy in self._sampler.policies.items():
            if self._policies.get(device) != policy:
                dtype, text = self._policies[device] = policy
                self._write_of_step("policy", device=device, dtype=dtype, text=text)
        if self._products:
            self._write_of_step("products", num=dict(self._products))
            self.seen.products += self._products
            self._products.clear()
        if tensors:
            weights = {each.dtype for each in tensors if each.kind == "parameter"}
            self.seen.has_low_weights |= not FORMATS_BY_DTYPE.keys().isdisjoint(weights)
            self.seen.has_float16 |= "float16" in weights
            scalars, num, tensors = sample_scalars(tensors), len(tensors), bounded(tensors)
            if len(tensors) < num:
                self.say(MANY_TENSORS.format(num=f"{num:,}"))
            first = dict.fromkeys(("kind", "name", "dtype"))
            rows = [first | structs.asdict(tensor) for tensor in tensors]
            self._write_of_step("sample", scale=scale, tensors=rows)
            self._log(self.num_steps, scalars)

    # --- writing ----------------------------------------------------------------------------------

    def _time(self) -> float:
        return round(time.monotonic() - self._began, 4)

    def _write_steps(self, events: list[Event]) -> None:
        for event in events:
            if not event["taken"]:
                self.skipped.add(event["step"])
            if self._write(event) and event["step"] != self._last_written:
                self._last_written = event["step"]
                self.seen.num_written += 1
            self.seen.take(event)
            self._log(event["step"], step_scalars(event))

    def _write_device(self) -> None:
        parameter = next((parameter for _, parameter in self._models.parameters()), None)
        tensor = parameter if self._loss is None else self._loss
        device = "cpu" if tensor is None else tensor.device.type
        machine = device_name(device)
        is_diagnosing = any(each.is_diagnosing for each in observers())
        event = {"event": "device", "step": 1, "device": device, "machine": machine}
        self._write(event | {"is_diagnosing": is_diagnosing})
        self._note_hooks()

    def _note_hooks(self) -> None:
        """Say which hooks on gradients see them multiplied by the scale of the losses."""
        if self._loss_scaler is None or not self._loss_scaler.is_enabled():
            return
        owners = [*self._models.parameters()]
        owners += [each for model in self._models for each in model.named_modules()]
        hooked = [name or OUTERMOST for name, owner in owners if autograd.hooks_of(owner)]
        if hooked:
            self.say(
                f"{HOOKS_AND_SCALE}: hooks of {names_text(hooked)}. One that "
                "clamps, adds, compares or stores has to divide by scaler.get_scale() before and "
                "multiply after; `halfstep run --amp fp16` does so in a script without a scaler"
            )

    def _write_culprits(self, outcome: Outcome) -> None:
        if outcome.taken or outcome.reason is Reason.LEFT_OUT:
            return
        try:
            found = outcome.culprit_parameters()
            names, began_in = self._models.culprits(found)
            names = names or outcome.culprits
        except CallOrderError:
            return  # too late: the gradients no longer exist
        if not names:
            return  # the culprits are on another rank
        norm = self._norm_of(outcome.optimizer)
        if norm is not None and norm.isnan():  # a clip by it has made all of them NaN
            began_in = None
        self._write_of_step(
            "culprits",
            optimizer=outcome.optimizer_name,
            began_in=None if outcome.reason in BEGAN_ELSEWHERE else began_in,
            parameters=names[:NUM_CULPRITS],
            num_parameters=len(found),
        )

    def _write_buffers(self, step: int) -> None:
        """Write which buffers are inf or NaN by a step, if others are than before. Sync: some."""
        bad = self._models.bad_buffers()
        if bad == self.seen.bad_buffers:
            return
        self.seen.bad_buffers = bad
        self._write_of_step("buffers", step=step, names=bad[:NUM_CULPRITS], num_buffers=len(bad))
        if bad and RUINED not in self._said:
            self._said.add(RUINED)
            text = RUINED.format(step=self.num_steps, names=names_text(bad))
            _warn(f"halfstep.record: {text}")

    def _write_of_step(self, kind: str, **values: Any) -> None:
        self._write({"event": kind, "step": self.num_steps} | values)

    def _write(self, event: Event) -> bool:
        """Write an event; return whether that was possible."""
        try:
            with self._lock:
                self._writer.write(event)
        except (OSError, ValueError) as error:
            # A full disk must not end a run; ValueError is raised by a closed file.
            if self.seen.problem is None:
                self.seen.problem = getattr(error, "strerror", None) or str(error)
                _warn(f"halfstep.record can no longer write: {error}")
            return False
        return True

    def _log(self, step: int, scalars: dict[str, float]) -> None:
        for sink in [*self._sinks]:
            try:
                sink.log(step, scalars)
            except Exception as error:
                self._sinks.remove(sink)
                _warn(
                    f"halfstep.record continues without {type(sink).__name__}, which failed: "
                    f"{type(error).__name__}: {error}"
                )


def _scalings(root: Tensor, places: Mapping[int, int]) -> Iterator[tuple[int, Any]]:
    """Yield places of the scaled losses that some ops compute a root of, and what scaled them."""
    nodes: list[tuple[Any, Any]] = [(root.grad_fn, None)]
    for node, scaling in islice(nodes, 64):
        place = None if node is None else places.get(autograd.sequence_number(node))
        if place is not None:
            yield place, scaling
        elif node is not None:
            scaling = node if type(node).__name__ == "MulBackward0" else scaling
            nodes += [(each, scaling) for each, _ in node.next_functions]


def _scalar(loss: Tensor) -> Tensor:
    """Return a copy without dimensions, in float32, or in float64 if it has that."""
    copied = loss.clone() if loss.dtype in (torch.float32, torch.float64) else loss.float()
    return copied.reshape(()) if copied.dim() else copied


def _sum(losses: Sequence[Tensor]) -> Tensor:
    """Return the sum on the device of the last one."""
    if len(losses) == 1:
        return losses[0]
    return torch.stack([to_device(loss, losses[-1].device) for loss in losses]).sum()


def _norm_of_gradients(optimizer: torch.optim.Optimizer) -> Tensor | None:
    found = collect(parameters(optimizer))
    if not found.grads or any(map(distributed.is_dtensor, found.grads)):
        return None  # a norm of this rank's part is not the norm of the whole
    device = found.values[0].device
    norm = norms_of(found, None, device).norm  # a float may be beyond float32
    return norm if isinstance(norm, Tensor) else torch.tensor(norm, dtype=torch.float64)


def _warn(text: str) -> None:
    # This warning must not end the run, even where warnings are errors.
    with suppress(Warning):
        warn(text)
