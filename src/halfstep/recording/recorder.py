"""What a recorder does at each loss, norm and step, from whoever tells it of them."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from halfstep import _torch
from halfstep.casting.casts import tensors_in
from halfstep.errors import CallOrderError
from halfstep.machine import device_name
from halfstep.recording.lines import Event, LineWriter
from halfstep.recording.models import Models
from halfstep.recording.sampling import Sampler
from halfstep.recording.steps import RawStep, Waiting
from halfstep.scaling.engine import Engine
from halfstep.scaling.gradients.collecting import collect, parameters
from halfstep.scaling.gradients.passes import measure
from halfstep.scaling.outcomes.outcome import Outcome
from halfstep.scaling.scalars import moved
from halfstep.scaling.scale.state import Reason
from halfstep.sinks import Sink, sample_scalars, step_scalars

NUM_CULPRITS = 20
"""So many names of parameters are written for a skipped step."""


class Recorder:
    """Puts together what happens in an iteration and writes it.

    Args:
        writer: The file.
        models: The models that are known from the start.
        engine: The scaler whose iterations count; None for those of all scalers, and for the steps
            that no scaler has a part in.
        every: Sample the first step and each whose number this divides; 0 for no sample.
        sinks: Are told the scalars too.

    Attributes:
        num_steps: Number of iterations that have ended.
        num_skipped: How many steps among them are known to be skipped.

    Sync: none, but in sampled steps, after a step that was skipped, and in :meth:`close`.
    """

    def __init__(
        self,
        writer: LineWriter,
        models: Models,
        engine: Engine | None,
        every: int,
        sinks: Sequence[Sink],
    ) -> None:
        self.num_steps = self.num_skipped = 0
        self._writer, self._engine, self._every, self._sinks = writer, engine, every, list(sinks)
        self._models, self._waiting = models, Waiting()
        self._sampler = Sampler(models, is_searching=not len(models), say=self.say)
        self._began, self._pid = time.monotonic(), os.getpid()
        self._said: set[str] = set()
        self._num_models_written = 0
        self._has_failed = False
        self._policies: dict[str, tuple[str, str]] = {}
        self._losses: list[Tensor] = []
        self._norm: Tensor | None = None
        self._is_scaled = False
        self._steps_open = 0
        self._sampler.begin(is_measuring=every > 0)

    # --- what it is told --------------------------------------------------------------------------

    def on_loss(self, engine: Engine, outputs: Any) -> None:
        """Take note of a loss before it is scaled."""
        if self._listens_to(engine):
            if not self._is_scaled:
                self._losses, self._is_scaled = [], True
            self._add_losses(tensors_in([outputs]))

    def on_backward(self, roots: Any) -> None:
        """Take note of what ``backward`` is called on: the loss, if no scaler has seen it."""
        if self._counts_plain_steps():
            self._add_losses(tensors_in([roots]))

    def on_norm(self, norm: Tensor, norm_type: float) -> None:
        """Take note of the norm that ``torch.nn.utils.clip_grad_norm_`` has measured."""
        if norm_type == 2.0 and self._is_here():
            self._norm = norm.detach()

    def on_iteration(self, engine: Engine, outcomes: Sequence[Outcome]) -> None:
        """Take note that ``update`` has ended an iteration."""
        if not self._listens_to(engine):
            return
        if self.num_steps == 0:
            for model in self._models:  # so that the scaler's own messages have names
                engine.names.watch(model)
        for outcome in outcomes:
            norm = self._norm
            if norm is None and self._sampler.is_open and not outcome.is_measured:
                norm = _norm_of_outcome(outcome)
            self._add_step(outcome.optimizer_name, outcome, norm)
            if _may_be_skipped(outcome):
                self._write_culprits(outcome)
        self._end_iteration(outcomes[-1].scale if self._sampler.is_open and outcomes else 1.0)

    def before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take note that ``optimizer.step`` begins; what it calls are evaluations of a closure."""
        self._steps_open += 1

    def after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Take note of a step that no scaler has a part in."""
        self._steps_open = max(self._steps_open - 1, 0)
        if self._counts_plain_steps():
            norm = self._norm
            if norm is None and self._sampler.is_open:
                norm = _norm_of_gradients(optimizer)
            self._add_step(type(optimizer).__name__, None, norm)
            self._end_iteration(1.0)

    def say(self, text: str) -> None:
        """Write a note, once."""
        if text not in self._said:
            self._said.add(text)
            self._write({"event": "note", "step": self.num_steps + 1, "text": text})

    def close(self, error: str | None) -> None:
        """Write what is left, and the end. Sync: one or two."""
        if not self._is_here():
            return
        self._sampler.end()
        self._write_steps(self._waiting.take_all())
        self._write({"event": "end", "time": self._time(), "steps": self.num_steps, "error": error})
        self._writer.close()

    # --- the iteration ----------------------------------------------------------------------------

    def _is_here(self) -> bool:
        """Whether this is the process that records, and not one that it has forked."""
        return os.getpid() == self._pid

    def _listens_to(self, engine: Engine) -> bool:
        return self._engine in (None, engine) and self._is_here()

    def _counts_plain_steps(self) -> bool:
        return self._engine is None and not self._is_scaled and self._is_here()

    def _add_losses(self, outputs: Any) -> None:
        found = [
            tensor.detach().float().reshape(())
            for tensor in outputs
            if tensor.numel() == 1
            and not tensor.is_complex()
            and not _torch.is_inside_functorch(tensor)
        ]
        if found:
            self._losses = found if self._steps_open else self._losses + found

    def _add_step(self, optimizer: str, outcome: Outcome | None, norm: Tensor | None) -> None:
        step, loss = self.num_steps + 1, _sum(self._losses)
        self._waiting.add(RawStep(step, self._time(), optimizer, outcome, loss, norm))

    def _end_iteration(self, scale: float) -> None:
        self.num_steps += 1
        if self.num_steps == 1:
            self._write_device()
        self._losses, self._norm, self._is_scaled = [], None, False
        if self._sampler.is_open:
            self._end_sample(scale)
        else:
            self._write_steps(self._waiting.take())
        if self._every and (self.num_steps + 1) % self._every == 0:
            self._sampler.begin(is_measuring=True)

    def _end_sample(self, scale: float) -> None:
        self._write_steps(self._waiting.take_all())
        tensors = self._sampler.end()
        for event in self._models.events(self.num_steps)[self._num_models_written :]:
            self._write(event)
        self._num_models_written = len(self._models)
        for device, policy in self._sampler.policies.items():
            if self._policies.get(device) != policy:
                dtype, text = self._policies[device] = policy
                event = {"event": "policy", "step": self.num_steps, "device": device}
                self._write(event | {"dtype": dtype, "text": text})
        if tensors:
            event = {"event": "sample", "step": self.num_steps, "scale": scale}
            self._write(event | {"tensors": tensors})
            self._log(self.num_steps, sample_scalars(tensors))

    # --- writing ----------------------------------------------------------------------------------

    def _time(self) -> float:
        return round(time.monotonic() - self._began, 4)

    def _write_steps(self, events: list[Event]) -> None:
        for event in events:
            self.num_skipped += not event["taken"]
            self._write(event)
            self._log(event["step"], step_scalars(event))

    def _write_device(self) -> None:
        tensors = self._losses or [parameter for _, parameter in self._models.parameters()]
        device = tensors[0].device.type if tensors else "cpu"
        event = {"event": "device", "step": 1, "device": device}
        self._write(event | {"machine": device_name(device)})

    def _write_culprits(self, outcome: Outcome) -> None:
        if outcome.taken or outcome.reason is Reason.NORM:
            return
        try:
            found = outcome.culprit_parameters()
            names, began_in = self._models.culprits(found)
            names = names or outcome.culprits
        except CallOrderError:
            return  # seen late, and the gradients are gone
        event: Event = {"event": "culprits", "step": self.num_steps + 1}
        self._write(
            event
            | {
                "optimizer": outcome.optimizer_name,
                "began_in": None if outcome.reason is Reason.LOSS else began_in,
                "parameters": names[:NUM_CULPRITS],
                "num_parameters": len(found),
            }
        )

    def _write(self, event: Event) -> None:
        try:
            self._writer.write(event)
        except (OSError, ValueError) as error:
            # A full disk must not end a run; ValueError is that of a closed file.
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(f"halfstep.record cannot write any more: {error}", stacklevel=2)

    def _log(self, step: int, scalars: dict[str, float]) -> None:
        for sink in [*self._sinks]:
            try:
                sink.log(step, scalars)
            except Exception as error:
                self._sinks.remove(sink)
                warnings.warn(
                    f"halfstep.record goes on without {type(sink).__name__}, which has failed: "
                    f"{type(error).__name__}: {error}",
                    stacklevel=2,
                )


def _may_be_skipped(outcome: Outcome) -> bool:
    """Say whether the newest state on the host ends with skips; on a CPU that is the present one.

    Sync: none.
    """
    state = outcome.loss_scale.arrived()
    return state is not None and state.skips()[0] > 0


def _norm_of_outcome(outcome: Outcome) -> Tensor | None:
    try:
        return torch.tensor(outcome.norm)
    except CallOrderError:
        return None  # its optimizer has divided the gradients by itself, or they are gone


def _norm_of_gradients(optimizer: torch.optim.Optimizer) -> Tensor | None:
    found = collect(parameters(optimizer))
    return measure(found, None).total(found.values[0].device) if found.grads else None


def _sum(losses: list[Tensor]) -> Tensor | None:
    if not losses:
        return None
    device = losses[-1].device
    return torch.stack([moved(loss, device) for loss in losses]).sum()
