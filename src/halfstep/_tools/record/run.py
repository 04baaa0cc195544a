"""A recorded run as values, for the report, the checks and the live view."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct
from msgspec.structs import asdict

from halfstep._common.formats import FORMATS, FORMATS_BY_DTYPE
from halfstep._common.numbers import listed, percent
from halfstep._common.text import Severity
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.json import Count, Scale, Seconds, Share
from halfstep._tools.statistics import Statistics

Kind: TypeAlias = Literal["parameter", "parameter_gradient", "output", "output_gradient"]
KINDS: tuple[Kind, ...] = get_args(Kind)

# What notes say of a run whose precision, or whose record, is not as it seems.
RANKS_DISAGREE = "ranks disagree"
NOT_WRITTEN = "could not be written"
PAST_THE_SCALER = "steps were taken past the scaler"
HOOKS_AND_SCALE = "hooks get gradients that are multiplied by the scale"
TORCH_SCALER = "torch.amp.GradScaler scales the losses"
CLIPPED_EARLY = "clipped before they are unscaled"
OWN_PRECISION = "the script has its own"  # autocast or GradScaler, which --amp leaves as it is
WRONG_STEP = "a step was wrong, as it is with torch.amp"
NEVER_ACTED = "never acted"  # a policy, or a rule of it
NOTE_SEVERITIES: dict[str, Severity] = {
    RANKS_DISAGREE: "bad",
    PAST_THE_SCALER: "bad",
    HOOKS_AND_SCALE: "warning",
    TORCH_SCALER: "warning",
    CLIPPED_EARLY: "warning",
    WRONG_STEP: "warning",
    NOT_WRITTEN: "warning",
    NEVER_ACTED: "warning",
}
"""By what a note says; others are notices."""
NO_STEP = (
    "no optimizer step was seen: the program made none, steps by hand, or trains in processes that "
    "halfstep cannot reach"
)

LARGEST_EXPONENT = 1023
"""The largest exponent: beyond it, twice the next power of two is not a float."""


def options_in(words: Sequence[str]) -> list[str]:
    """Return the options of a ``halfstep run``, each of which is one word; none without words."""
    begin = words.index("run") + 1 if words else 0
    return list(takewhile(lambda word: word.startswith("-"), words[begin:]))


def with_options(words: Sequence[str], *options: str) -> str:
    """Return the command of a ``halfstep run`` with options, in place of the same ones."""
    begin, given = words.index("run") + 1, options_in(words)
    names = {option.partition("=")[0] for option in options}
    others = (word for word in given if word.partition("=")[0] not in names)
    return shlex.join([*words[:begin], *options, *others, *words[begin + len(given) :]])


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
    run_as: tuple[str, ...] = ()  # the words of `halfstep run`, without its folder
    world_size: Count | None = None
    every: Count | None = None
    is_diagnosing: bool = False


class Device(_Event, tag="device", frozen=True):
    """The device of the first step: its type, and the name of the processor or the GPU."""

    device: str
    machine: str
    is_diagnosing: bool = False  # whether steps that go bad are replayed


class Model(_Event, tag="model", frozen=True):
    """A trained model."""

    step: Count  # when it was first seen to run
    name: str  # the class name
    parameters: Count  # the number of entries
    modules: tuple[str, ...]  # in the order of execution
    rank: int | None = None  # set if the first rank lacks this model, as in a pipeline


class PolicySeen(_Event, tag="policy", frozen=True):
    """The policy on a device from a step on, and its lower precision, such as ``"float16"``."""

    step: Count
    device: str
    dtype: str
    text: str


HIDDEN, CUSTOM = "hidden", "custom"
"""Among the dtypes of products: functions whose products autograd does not see.

``CUSTOM`` are custom functions whose results are in no lower precision.
"""


class Products(_Event, tag="products", frozen=True):
    """How many products autograd saw in a sampled step, by the dtypes of their results."""

    step: Count
    num: dict[str, Count]


class Step(_Event, tag="step", frozen=True):
    """One step of one optimizer."""

    step: Count  # number of the iteration in the record, from 1
    time: Seconds  # since the first segment of the record began
    optimizer: str  # its class
    taken: bool
    reason: str | None  # why it was skipped
    scale: Scale | None  # the factor of the loss; None without a scaler
    scale_after: Scale | None
    norm: float | None  # L2, of the unscaled gradients before clipping, if it was measured
    loss: float | None  # before scaling, if it was seen; the mean over the ranks that have one
    number: Count | None = None  # of the optimizer, among those of its class, from 1
    share_lost_updates: Share | None = None  # in sampled steps; over all ranks
    updates: Count | None = None  # of this rank, of which that is the share; None in old records
    num_losses: Count = 1  # whose sum that is, as of micro-batches
    rank: Count | None = None  # the first one with inf or NaN in its gradients, if that is known
    bad_losses: tuple[int, ...] = ()  # the ranks whose loss was inf or NaN


class Measured(Statistics, frozen=True, gc=False, kw_only=True):
    """The statistics of one tensor in one sampled step, over all ranks.

    Gradients are as in memory: multiplied by the scale.
    """

    kind: Kind
    name: str  # of the parameter or module
    dtype: str  # such as "float16"

    @classmethod
    def of(cls, kind: Kind, name: str, dtype: str, statistics: Statistics) -> Measured:
        return cls(kind=kind, name=name, dtype=dtype, **asdict(statistics))

    def __post_init__(self) -> None:
        """Raise ``ValueError`` if counts of a format are missing, or numbers too large."""
        if not (FORMATS.keys() <= self.underflow.keys() and FORMATS.keys() <= self.overflow.keys()):
            raise ValueError(f"underflow and overflow must have {', '.join(FORMATS)}")
        if (self.lost_updates or 0) > (self.updates or 0):
            raise ValueError(f"{self.lost_updates} of {self.updates or 0} updates cannot be lost")
        last = self.first + len(self.histogram) - 1
        if not -LARGEST_EXPONENT <= self.first <= last + 1 <= LARGEST_EXPONENT:
            raise ValueError(f"bins from 2^{self.first} to 2^{last} exceed the range of floats")


class Sample(_Event, tag="sample", frozen=True):
    """A sampled step."""

    step: Count  # number of the iteration in the record
    scale: Scale  # of the gradients; 1.0 without a scaler
    tensors: tuple[Measured, ...]  # in the order of the model


class Culprits(_Event, tag="culprits", frozen=True):
    """The parameters whose gradients were inf or NaN in a skipped step, on one rank."""

    step: Count  # number of the iteration in the record
    optimizer: str  # its class
    began_in: str | None  # the module where the backward pass first left the range, if that shows
    parameters: tuple[str, ...]  # names of the first 20
    num_parameters: Count
    rank: int = 0


class BadBuffers(_Event, tag="buffers", frozen=True):
    """The buffers that are inf or NaN on one rank from a step on, until the next such event."""

    step: Count  # number of the iteration in the record
    names: tuple[str, ...]  # the first 20; none if all are finite again
    num_buffers: Count
    rank: int = 0


class Diagnosed(Struct, frozen=True):
    """A step that went bad on a rank and was replayed there."""

    rank: int
    step: int
    diagnosis: Diagnosis


class DiagnosisLine(_Event, tag="diagnosis", frozen=True):
    """The step of a diagnosis; the rest of the line is a :class:`Diagnosis`."""

    step: Count


class Note(_Event, tag="note", frozen=True):
    """A note by the recorder."""

    step: Count
    text: str


class End(_Event, tag="end", frozen=True):
    """The end of a segment."""

    error: str | None  # the error that ended it; None if it ended normally
    steps: Count | None = None  # that were made, which may be more than were written
    time: Seconds | None = None  # since the first segment of the record began


LINES = tuple(_Event.__subclasses__())  # what the lines of a record may be


def seen_in(products: Mapping[str, int]) -> dict[str, int]:
    """Return the products that autograd saw, without the functions that may hide others."""
    return {dtype: num for dtype, num in products.items() if dtype not in (HIDDEN, CUSTOM)}


def ran_lower(products: Mapping[str, int]) -> bool | None:
    """Return whether any product ran in a lower precision; None if that is unknown."""
    if not FORMATS_BY_DTYPE.keys().isdisjoint(products):
        return True
    return None if not seen_in(products) or HIDDEN in products else False


def dtypes_text(products: Mapping[str, int]) -> str:
    """Return in which dtypes products ran: ``products with gradients ran in float16 ...``."""
    seen, where = seen_in(products), " with gradients"
    if not seen:
        return "the dtypes of products were not measured"
    if seen.keys() != products.keys():
        where += f" outside of {'compiled or ' * (HIDDEN in products)}custom functions"
    if ran_lower(products) is False:
        ran = f"products: {listed(sorted(seen))}"
        return f"no product{where} ran in a lower precision ({ran})"
    if len(seen) == 1:
        return f"all products{where} ran in {next(iter(seen))}"
    shares = {dtype: num / sum(seen.values()) for dtype, num in seen.items()}
    parts = [f"{name} ({percent(shares[name])})" for name in sorted(seen, key=seen.__getitem__)]
    return f"products{where} ran in {listed(parts[::-1])}"


def share_lost(steps: Iterable[Step]) -> float | None:
    """Return which share of the updates of all these steps was lost; None if none was counted."""
    counted = ((step.share_lost_updates, step.updates or 1) for step in steps)
    seen = [(share * num, num) for share, num in counted if share is not None]
    return sum(lost for lost, _ in seen) / sum(num for _, num in seen) if seen else None


@dataclass
class Seen:
    """What a recorder knows of a run without reading the record."""

    products: Counter[str] = field(default_factory=Counter)  # by dtype, in sampled steps
    updates: int = 0  # that were counted
    lost_updates: float = 0.0  # of these
    has_low_weights: bool = False  # whether any sampled weight is stored in less than float32
    has_float16: bool = False  # whether any of these is in float16, whose steps have no guard
    bad_buffers: list[str] = field(default_factory=list)  # that are inf or NaN
    bad_taken: set[int] = field(default_factory=set)  # steps taken with a loss of inf or NaN
    has_bad_gradients: bool = False  # whether a taken step had a measured norm of inf or NaN
    first_scale: float = 0.0  # of the first step
    scale: float | None = None  # after the last step; None without a scaler
    is_last_taken: bool = True  # whether the last step with a scaler was taken
    num_written: int = 0  # steps that the record has
    problem: str | None = None  # why the record could not be written; None if it could

    def take(self, event: Mapping[str, Any]) -> None:
        """Note a step."""
        if event["share_lost_updates"] is not None:
            self.updates += event["updates"]
            self.lost_updates += event["share_lost_updates"] * event["updates"]
        if event["taken"]:
            self.has_bad_gradients |= not math.isfinite(event["norm"] or 0.0)
            if not math.isfinite(event["loss"] or 0.0):
                self.bad_taken.add(event["step"])
        if event["scale_after"] is not None:
            self.first_scale = self.first_scale or event["scale"]
            self.scale, self.is_last_taken = event["scale_after"], event["taken"]


@dataclass(frozen=True)
class Run:
    """The contents of a record, with ranks and segments joined."""

    path: Path  # the folder
    header: Header  # the header of the last segment of the first rank
    starts: tuple[int, ...]  # the first step of each segment: one for each start of the run
    ranks: tuple[int, ...]  # ranks that have written
    models: tuple[Model, ...]  # of the first rank, and those that only others have
    policies: tuple[PolicySeen, ...]  # of the first rank
    products: tuple[Products, ...]  # of all ranks
    steps: tuple[Step, ...]  # of the first rank, with the losses of all
    samples: tuple[Sample, ...]  # of all ranks together
    culprits: tuple[Culprits, ...]  # of all ranks, by step
    buffers: tuple[BadBuffers, ...]  # of all ranks, by step
    diagnoses: tuple[Diagnosed, ...]  # of all ranks, by step
    notes: tuple[Note, ...]  # by recorders and reader: ranks that disagree, and all of left_out
    left_out: tuple[Note, ...]  # on lines that are cut or damaged
    error: str | None  # the error that ended the last segment, on the first rank that failed
    error_rank: int | None  # the rank of that error
    without_end: tuple[int, ...]  # ranks whose last segment has no end: still running, or killed
    is_running: bool  # whether a process writes it

    @property
    def num_steps(self) -> int:
        return len({step.step for step in self.steps})

    @property
    def skipped(self) -> tuple[Step, ...]:
        return tuple(step for step in self.steps if not step.taken)
