"""A recorded run as values: what the report, the checks and the live view are made from."""

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
"""Twice the next power of two is no float any more."""


class _Event(Struct, frozen=True, gc=False, tag_field="event"):
    """A line of a record."""


class Header(_Event, tag="run", frozen=True):
    """The first line of a segment; "unknown" and None for what it does not say.

    Attributes:
        started: When the segment began, ISO 8601.
        halfstep: Version.
        torch: Version.
        python: Version.
        device: Device type.
        machine: Name of the processor or the GPU.
        cores: Number of cores of the machine.
        command: The command line.
        world_size: Number of processes that take part.
        every: Every how many steps a sample is taken.
        crc: The checksum of the line; None in records of versions that wrote none.
    """

    started: str = "unknown"
    halfstep: str = "unknown"
    torch: str = "unknown"
    python: str = "unknown"
    device: str | None = None
    machine: str | None = None
    cores: Count | None = None
    command: tuple[str, ...] = ()
    world_size: Count | None = None
    every: Count | None = None
    crc: str | None = None


class Device(_Event, tag="device", frozen=True):
    """Where the first step has run.

    Attributes:
        device: Device type.
        machine: Name of the processor or the GPU.
    """

    device: str
    machine: str


class Model(_Event, tag="model", frozen=True):
    """A model that is trained.

    Attributes:
        step: When it was first seen to run.
        name: Of its class.
        parameters: Number of entries of its parameters.
        modules: In the order in which they ran.
        note: What a reader must know of it.
        rank: The rank whose it is, if the first rank has another, as in a pipeline.
    """

    step: Count
    name: str
    parameters: Count
    modules: tuple[str, ...]
    note: str | None = None
    rank: int | None = None


class PolicySeen(_Event, tag="policy", frozen=True):
    """The policy from a step on.

    Attributes:
        step: When it was first seen.
        device: Device type.
        dtype: The lower precision, such as ``"float16"``.
        text: The policy as text.
    """

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
        reason: Why not, None if taken.
        scale: What the loss was multiplied by, None without a scaler.
        scale_after: The scale of the next iteration.
        norm: L2 norm of the unscaled gradients before clipping, None where nobody measured it.
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
        """Check what the types do not say.

        Raises:
            ValueError: A number is finite, and too large for the float32 that it was.
        """
        for value in (self.norm, self.loss):
            if value is not None and LARGEST < abs(value) < math.inf:
                raise ValueError(f"{value} is no float32")


class Measured(Statistics, frozen=True, gc=False, kw_only=True):
    """The statistics of one tensor of one sampled step, of all ranks together.

    Gradients are as in memory: multiplied by the scale.

    Attributes:
        kind: What it is.
        name: Of the parameter or of the module.
        dtype: Its dtype, e.g. ``"float16"``.
    """

    kind: Kind
    name: str
    dtype: str

    @classmethod
    def of(cls, kind: Kind, name: str, dtype: str, statistics: Statistics) -> Measured:
        """Return the statistics of a tensor with its name."""
        return cls(kind=kind, name=name, dtype=dtype, **asdict(statistics))

    def __post_init__(self) -> None:
        """Check what the types do not say.

        Raises:
            ValueError: There are no counts of a format, or bins that are those of no float.
        """
        if not (FORMATS.keys() <= self.underflow.keys() and FORMATS.keys() <= self.overflow.keys()):
            raise ValueError(f"underflow and overflow are to have {', '.join(FORMATS)}")
        last = self.first + len(self.histogram) - 1
        if not -LARGEST_EXPONENT <= self.first <= last + 1 <= LARGEST_EXPONENT:
            raise ValueError(f"a histogram from 2^{self.first} to 2^{last} is that of no float")


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

    step: Count
    optimizer: str
    began_in: str | None
    parameters: tuple[str, ...]
    num_parameters: Count
    rank: int = 0


class Diagnosed(Struct, frozen=True):
    """A step that went bad and was replayed.

    Attributes:
        rank: Who saw it.
        step: Number of the iteration in the record.
        diagnosis: What was found.
    """

    rank: int
    step: int
    diagnosis: Diagnosis


class Note(_Event, tag="note", frozen=True):
    """Something that the recorder has to say.

    Attributes:
        step: When.
        text: What.
    """

    step: Count
    text: str


class End(_Event, tag="end", frozen=True):
    """The end of a segment.

    Attributes:
        error: What ended it; None if it ended well.
        time: Seconds since the record (its first segment) began; None if unknown.
    """

    error: str | None
    time: Seconds | None = None


@dataclass(frozen=True)
class Run:
    """Everything that a record holds, ranks and segments put together.

    Attributes:
        path: The folder.
        header: The first line of rank 0, of the last segment: versions, machine, command, every.
        starts: The number of the first step of each segment: each time the run was started.
        ranks: Which ranks have written.
        models: Those of the first rank, and those that others have and it has not.
        policies: Those of the first rank.
        steps: Those of the first rank, in order, with the losses of all.
        samples: The sampled steps, of all ranks together.
        culprits: Of all ranks.
        diagnoses: Of all ranks, by step.
        notes: What the recorders had to say, and what the reader has: ranks that disagree, and
            all of ``left_out``.
        left_out: Which lines are cut or damaged: nothing is made from them.
        error: What ended the last segment, on the rank that ended first; None if it ended well.
        error_rank: Which rank that is.
        without_end: The ranks whose last segment has no end: it runs, or was ended by kill -9.
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
