"""A recorded run as values, for the report, the checks and the live view."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias

from msgspec import Struct
from msgspec.structs import asdict

from halfstep._common.json import LARGEST, Count, Scale, Seconds
from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._numerics.formats import FORMATS
from halfstep._numerics.statistics import Statistics
from halfstep._trace.recording import Recording

Kind: TypeAlias = Literal["parameter", "parameter_gradient", "output", "output_gradient"]
KINDS: tuple[Kind, ...] = ("parameter", "parameter_gradient", "output", "output_gradient")


LARGEST_EXPONENT = 1023
"""Beyond this exponent, twice the next power of two is not a float."""


class _Event(Struct, frozen=True, gc=False, tag_field="event"):
    """A line of a record."""


class Header(_Event, tag="run", frozen=True):
    """The first line of a segment; missing values are "unknown" or None."""

    started: str = "unknown"  # ISO 8601
    halfstep: str = "unknown"
    torch: str = "unknown"
    python: str = "unknown"
    device: str | None = None
    machine: str | None = None
    cores: Count | None = None
    command: tuple[str, ...] = ()
    world_size: Count | None = None
    every: Count | None = None
    crc: str | None = None  # records of the first versions have no checksums


class Device(_Event, tag="device", frozen=True):
    """The device of the first step: its type, and the name of the processor or the GPU."""

    device: str
    machine: str


class Model(_Event, tag="model", frozen=True):
    """A model that is trained.

    Attributes:
        step: When it was first seen to run.
        name: Of its class.
        parameters: Number of their entries.
        modules: In the order in which they ran.
        note: A note for the reader.
        rank: The rank that has it, if the first rank has another model, as in a pipeline.
    """

    step: Count
    name: str
    parameters: Count
    modules: tuple[str, ...]
    note: str | None = None
    rank: int | None = None


class PolicySeen(_Event, tag="policy", frozen=True):
    """The policy on a device from a step on, and its lower precision, such as ``"float16"``."""

    step: Count
    device: str
    dtype: str
    text: str


class Step(_Event, tag="step", frozen=True):
    """One step of one optimizer.

    Attributes:
        step: Number of the iteration in the record, from 1.
        time: Seconds since the record (its first segment) began.
        optimizer: Class name of the optimizer.
        taken: Whether the step was taken.
        reason: Why it was skipped, None if taken.
        scale: What the loss was multiplied by, None without a scaler.
        scale_after: The scale of the next iteration.
        norm: L2 norm of the unscaled gradients before clipping, None where it was not measured.
        loss: The loss before scaling, None where it was not seen. Of several ranks the mean over
            those that have one.
        rank: The first rank whose gradients were inf or NaN; None if none were, or unknown.
        bad_losses: The ranks whose loss was inf or NaN.
    """

    step: Count
    time: Seconds
    optimizer: str
    taken: bool
    reason: str | None
    scale: Scale | None
    scale_after: Scale | None
    norm: float | None
    loss: float | None
    rank: Count | None = None
    bad_losses: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Raise ``ValueError`` for a finite number that is too large for the float32 it was."""
        for value in (self.norm, self.loss):
            if value is not None and LARGEST < abs(value) < math.inf:
                raise ValueError(f"{value} is not a float32")


class Measured(Statistics, frozen=True, gc=False, kw_only=True):
    """The statistics of one tensor in one sampled step, over all ranks.

    Gradients are as in memory: multiplied by the scale.

    Attributes:
        kind: What it is.
        name: Of the parameter or of the module.
        dtype: Such as ``"float16"``.
    """

    kind: Kind
    name: str
    dtype: str

    @classmethod
    def of(cls, kind: Kind, name: str, dtype: str, statistics: Statistics) -> Measured:
        """Return statistics with the name of their tensor."""
        return cls(kind=kind, name=name, dtype=dtype, **asdict(statistics))

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if counts of a format are missing or bins exceed floats."""
        if not (FORMATS.keys() <= self.underflow.keys() and FORMATS.keys() <= self.overflow.keys()):
            raise ValueError(f"underflow and overflow must have {', '.join(FORMATS)}")
        last = self.first + len(self.histogram) - 1
        if not -LARGEST_EXPONENT <= self.first <= last + 1 <= LARGEST_EXPONENT:
            raise ValueError(f"bins from 2^{self.first} to 2^{last} exceed the range of floats")


class Sample(_Event, tag="sample", frozen=True):
    """A sampled step.

    Attributes:
        step: Number of the iteration in the record.
        scale: What its gradients are multiplied by; 1.0 without a scaler.
        tensors: Its tensors, in the order of the model.
    """

    step: Count
    scale: Scale
    tensors: tuple[Measured, ...]


class Culprits(_Event, tag="culprits", frozen=True):
    """The parameters whose gradients were inf or NaN in a skipped step.

    Attributes:
        step: Number of the iteration in the record.
        optimizer: Class name of the optimizer.
        began_in: Path of the module where the backward pass first left the range; None if the
            gradients do not show it.
        parameters: Their names, at most 20 of them.
        num_parameters: How many there are.
        rank: The rank that saw it.
    """

    step: Count
    optimizer: str
    began_in: str | None
    parameters: tuple[str, ...]
    num_parameters: Count
    rank: int = 0


class Diagnosed(Struct, frozen=True):
    """A step that went bad on a rank and was replayed there."""

    rank: int
    step: int
    diagnosis: Diagnosis


class Note(_Event, tag="note", frozen=True):
    """A note by the recorder."""

    step: Count
    text: str


class End(_Event, tag="end", frozen=True):
    """The end of a segment.

    Attributes:
        error: The error that ended it; None if it ended well.
        time: Seconds since the record (its first segment) began; None if unknown.
    """

    error: str | None
    time: Seconds | None = None


@dataclass(frozen=True)
class Run:
    """The contents of a record, with ranks and segments joined.

    Attributes:
        path: The folder.
        header: The first line of rank 0, of the last segment: versions, machine, command, every.
        starts: The number of the first step of each segment: one for each start of the run.
        ranks: The ranks that have written.
        models: Those of the first rank, and those that only others have.
        policies: Those of the first rank.
        steps: Those of the first rank, in order, with the losses of all.
        samples: The sampled steps, of all ranks together.
        culprits: Of all ranks.
        diagnoses: Of all ranks, by step.
        notes: Notes of the recorders and of the reader: ranks that disagree, and all of
            ``left_out``.
        left_out: The lines that are cut or damaged and were left out.
        error: The error that ended the last segment, on the first rank that failed; None if it
            ended well.
        error_rank: The rank of that error.
        without_end: The ranks whose last segment has no end: still running, or killed.
        trace: The trace in ``trace.json``, None if there is none.
    """

    path: Path
    header: Header
    starts: tuple[int, ...]
    ranks: tuple[int, ...]
    models: tuple[Model, ...]
    policies: tuple[PolicySeen, ...]
    steps: tuple[Step, ...]
    samples: tuple[Sample, ...]
    culprits: tuple[Culprits, ...]
    diagnoses: tuple[Diagnosed, ...]
    notes: tuple[Note, ...]
    left_out: tuple[Note, ...]
    error: str | None
    error_rank: int | None
    without_end: tuple[int, ...]
    trace: Recording | None

    @property
    def num_segments(self) -> int:
        """How often the run was started."""
        return len(self.starts)

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
