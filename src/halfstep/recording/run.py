"""A recorded run as values: what the report, the checks and the live view are made from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from halfstep.diagnosing.diagnosis import Diagnosis
from halfstep.numerics.statistics import Statistics
from halfstep.tracing.recording import Recording

Kind: TypeAlias = Literal["parameter", "parameter_gradient", "output", "output_gradient"]
KINDS: tuple[Kind, ...] = ("parameter", "parameter_gradient", "output", "output_gradient")


class Step(NamedTuple):
    """One step of one optimizer.

    Attributes:
        step: Number of the iteration in the record, from 1.
        time: Seconds since the record (its first segment) began.
        optimizer: Class name of the optimizer.
        taken: Whether the step was taken.
        reason: Why not, None if taken.
        scale: What the loss was multiplied by, None without a scaler.
        scale_after: The scale of the next iteration.
        norm: L2 norm of the unscaled gradients before clipping, None where nobody measured it.
        loss: The loss before scaling, None where it was not seen. Of several ranks the mean over
            those that have one.
        rank: The first rank whose gradients were inf or NaN; None if none were, or unknown.
        bad_losses: The ranks whose loss was inf or NaN.
    """

    step: int
    time: float
    optimizer: str
    taken: bool
    reason: str | None
    scale: float | None
    scale_after: float | None
    norm: float | None
    loss: float | None
    rank: int | None = None
    bad_losses: tuple[int, ...] = ()


class Measured(NamedTuple):
    """The statistics of one tensor of one sampled step, of all ranks together.

    Attributes:
        kind: What it is.
        name: Of the parameter or of the module.
        dtype: Its dtype, e.g. ``"float16"``.
        statistics: What is in it. Gradients are as in memory: multiplied by the scale.
    """

    kind: Kind
    name: str
    dtype: str
    statistics: Statistics


class Sample(NamedTuple):
    """A sampled step.

    Attributes:
        step: Number of the iteration in the record.
        scale: What its gradients are multiplied by; 1.0 without a scaler.
        tensors: Its tensors, in the order of the model.
    """

    step: int
    scale: float
    tensors: tuple[Measured, ...]


class Culprits(NamedTuple):
    """Whose gradients were inf or NaN in a skipped step.

    Attributes:
        step: Number of the iteration in the record.
        optimizer: Class name of the optimizer.
        began_in: Path of the module where the backward pass first left the range, as far as the
            gradients tell; None if they do not.
        parameters: Their names, at most 20 of them.
        num_parameters: How many there are.
        rank: Who saw it.
    """

    step: int
    optimizer: str
    began_in: str | None
    parameters: tuple[str, ...]
    num_parameters: int
    rank: int


class Diagnosed(NamedTuple):
    """A step that went bad and was replayed.

    Attributes:
        rank: Who saw it.
        step: Number of the iteration in the record.
        diagnosis: What was found.
    """

    rank: int
    step: int
    diagnosis: Diagnosis


class Note(NamedTuple):
    """Something that the recorder has to say.

    Attributes:
        step: When.
        text: What.
    """

    step: int
    text: str


@dataclass(frozen=True)
class Run:
    """Everything that a record holds, ranks and segments put together.

    Attributes:
        path: The folder.
        header: The first line of rank 0, of the last segment: versions, machine, command, every.
        num_segments: How often the run was started.
        ranks: Which ranks have written.
        models: The ``model`` events: name, parameters, modules in the order in which they ran. Of
            ranks with other models than the first, such as stages of a pipeline, with ``rank``.
        policies: The ``policy`` events: step, device, dtype, text.
        steps: Those of the first rank, in order, with the losses of all.
        samples: The sampled steps, of all ranks together.
        culprits: Of all ranks.
        diagnoses: Of all ranks, by step.
        notes: What the recorders had to say, and what the reader has: lines that are cut, ranks
            that disagree.
        error: What ended the last segment, on the rank that ended first; None if it ended well.
        error_rank: Which rank that is.
        without_end: The ranks whose last segment has no end: it runs, or was ended by kill -9.
        trace: The trace in ``trace.json``, None if there is none.
    """

    path: Path
    header: Mapping[str, Any]
    num_segments: int
    ranks: tuple[int, ...]
    models: tuple[Mapping[str, Any], ...]
    policies: tuple[Mapping[str, Any], ...]
    steps: tuple[Step, ...]
    samples: tuple[Sample, ...]
    culprits: tuple[Culprits, ...]
    diagnoses: tuple[Diagnosed, ...]
    notes: tuple[Note, ...]
    error: str | None
    error_rank: int | None
    without_end: tuple[int, ...]
    trace: Recording | None

    @property
    def has_ended(self) -> bool:
        """Whether the last segment has an end on all ranks."""
        return not self.without_end

    @property
    def num_steps(self) -> int:
        """How many steps were recorded."""
        return len(self.steps)

    @property
    def skipped(self) -> tuple[Step, ...]:
        """The steps that were skipped."""
        return tuple(step for step in self.steps if not step.taken)
