"""The numbers of a recorded run: the values behind every form of the report.

:func:`halfstep._report.summarize.summarize` fills them. Everything here is plain data, printed
unchanged by ``halfstep report --json``, and the page shows the same numbers. Steps are
numbers of iterations, shares go from 0 to 1, headroom is in bits, times are in seconds; what was
not seen is None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from halfstep._diagnose.diagnosis import Diagnosis
from halfstep._numerics.formats import FORMATS_BY_DTYPE
from halfstep._record.run import Kind, Note, PolicySeen

NOTABLE = 0.01
"""Losses, of gradient entries or of updates, are worth a word from this share on."""
ENDLESS = 5
"""From this many skipped iterations at the end on, the skips count as unending."""
FEW, MANY = 0.01, 0.1
"""Shares of skipped steps: dynamic scaling needs a few; many slow down learning."""
OTHER_CAUSES = ("absorbed", "range", "maths", "data")
"""The verdicts of a diagnosis that found another cause than the scale."""
State: TypeAlias = Literal["ended", "failed", "no end"]


@dataclass(frozen=True)
class Facts:
    """The program, the machine, and how the run ended.

    Attributes:
        device: Device type.
        machine: Name of the processor or the GPU.
        started: When the last segment began, ISO 8601.
        duration: Seconds from the start to the last thing recorded.
        seconds_per_step: Median of the time between steps; None with fewer than two.
        every: Every how many steps a sample was taken.
        world_size: Number of processes that took part.
        ranks: The ranks that left a record.
        num_segments: How often the run was started.
        state: ``"ended"``, ``"failed"`` (with an error), ``"no end"`` (still running, or killed).
        error: The error that ended it, on the first rank; None if it ended well or has no end.
        error_rank: The rank of that error.
        without_end: The ranks whose record has no end.
    """

    halfstep: str
    torch: str
    python: str
    device: str
    machine: str
    cores: int | None
    command: tuple[str, ...]
    started: str
    duration: float
    seconds_per_step: float | None
    every: int | None
    world_size: int
    ranks: tuple[int, ...]
    num_segments: int
    state: State
    error: str | None
    error_rank: int | None
    without_end: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """A model: its class, the entries of its parameters, and the modules that ran.

    Attributes:
        rank: The rank that has it, if the first rank has another model; else None.
    """

    name: str
    num_parameters: int
    num_modules: int
    rank: int | None


@dataclass(frozen=True)
class StepCounts:
    """The steps of the optimizers; with several optimizers an iteration has several steps.

    Attributes:
        share_skipped: The skipped steps as a share of all; 0 if there are none.
        reasons: How many were skipped by reason, the most frequent first.
        skipped: The iterations in which a step was skipped.
        ranks: The first ranks with inf or NaN, if the ranks exchanged that.
        start_up: The skipped iterations in which dynamic scaling was still looking for its first
            scale, which is normal.
        after_growth: The skipped iterations that brought the scale back to where it had grown
            from: this is how dynamic scaling finds the largest usable scale.
        unclear: The iterations of both kinds whose gradients had NaN and no inf right above a scale
            that fits, which the scale alone seldom causes.
        num_start_up: How many steps were skipped in the iterations at the start.
        num_after_growth: How many in those after growth.
        num_skipped_later: How many in all others: the three together are ``num_skipped``.
        share_skipped_later: Those as a share of all steps; 0 if there are none.
        longest_in_a_row: The largest number of iterations in a row with a skipped step, leaving out
            start-up and growth.
        skipped_at_end: How many iterations in a row were skipped at the end.
    """

    num: int
    num_taken: int
    num_skipped: int
    share_skipped: float
    reasons: Mapping[str, int]
    skipped: tuple[int, ...]
    ranks: tuple[int, ...]
    start_up: tuple[int, ...]
    after_growth: tuple[int, ...]
    unclear: tuple[int, ...]
    num_start_up: int
    num_after_growth: int
    num_skipped_later: int
    share_skipped_later: float
    longest_in_a_row: int
    skipped_at_end: int

    @property
    def num_by_scaling(self) -> int:
        """The number of steps whose skips are part of normal dynamic scaling."""
        return self.num_start_up + self.num_after_growth

    @property
    def later(self) -> tuple[int, ...]:
        """The iterations whose skips are not part of normal dynamic scaling."""
        normal = {*self.start_up, *self.after_growth}
        return tuple(step for step in self.skipped if step not in normal)


@dataclass(frozen=True)
class ScaleCourse:
    """How the scale went.

    Attributes:
        first: Before the first step.
        last: After the last step.
        before_last: The scale that the last step was made at.
        min: The smallest, without probes: single iterations far below, after which the scale
            rises again.
        overflowed_at: The smallest at which a step was skipped for overflow; None if none was.
        stuck: The iterations with inf or NaN even at the smallest scale: no scale helps.
    """

    first: float
    last: float
    before_last: float
    min: float
    max: float
    overflowed_at: float | None
    stuck: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """How the loss, the norm of the gradients or the share of lost updates went.

    Attributes:
        last: The last value, finite or not, as is the first.
        recent: Mean of the finite ones of the last 20 steps.
        min: The smallest finite one.
        max: The largest finite one.
        first_non_finite: The first iteration in which it was inf or NaN; None if never.
        num_non_finite: In how many steps it was inf or NaN.
        ranks: For the loss, the ranks in the first of these steps.
    """

    first: float
    last: float
    recent: float | None
    min: float | None
    max: float | None
    first_non_finite: int | None
    num_non_finite: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class OptimizerLoss:
    """How the loss of one optimizer went."""

    optimizer: str
    curve: Curve


@dataclass(frozen=True)
class Origin:
    """A module in which skips began, and the iterations and ranks in which they did.

    Attributes:
        module: Its path; None where the gradients do not show it.
        num: In how many iterations.
        parameters: Names of parameters whose gradients were inf or NaN, at most 20.
    """

    module: str | None
    num: int
    steps: tuple[int, ...]
    parameters: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class BadPlace:
    """An op of a module that made these steps bad for one reason, with the first diagnosis."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    diagnosis: Diagnosis


@dataclass(frozen=True)
class ScaleWindow:
    """The scales, powers of two, at which none of the measured gradients is lost.

    Attributes:
        smallest: The smallest scale at which nothing underflows; None if all entries were zero.
        largest: The largest scale at which nothing overflows; None if no limit is visible.
        is_at_least: Whether entries were flushed to zero before they could be measured, so that the
            true ``smallest`` may be larger.
        is_empty: Whether there is no such scale: ``smallest`` is above ``largest``.
    """

    smallest: float | None
    largest: float | None
    is_at_least: bool
    is_empty: bool


@dataclass(frozen=True)
class Layer:
    """One kind of tensor of one parameter or module, over all sampled steps.

    Attributes:
        dtypes: The dtypes that it had, usually one.
        format: The format whose range applies: that of its dtype, and for float32 and float64 the
            lower precision of the run.
        num_samples: In how many samples it is.
        size: Number of entries in the last sample.
        measured: How many entries were measured in all samples; the counts below are of these.
        non_finite_step: The first sampled step in which any was NaN or inf.
        amax: Largest finite magnitude, as in memory (gradients: scaled); 0 if there is none.
        amin: Smallest magnitude above zero.
        headroom: Bits from the largest magnitude to the largest value of the format, the minimum of
            all samples; None if nothing was finite and above zero. Negative: it does not fit.
        headroom_step: In which step.
        headroom_last: In the last sample.
        lost: Entries that the format has lost, or would lose, to underflow.
        share_lost: Those as a share of what was measured.
        share_lost_worst: The same in the worst sample.
        share_lost_step: In which step.
        share_lost_last: The same in the last sample.
        flushed: Those of the lost entries that underflow in float16 turned into zeros; None where
            this does not apply.
        underflow: By format, entries above zero that it would flush.
        overflow: By format, finite entries that it cannot hold.
        updates: Of a weight, the entries whose gradient was not zero in a sampled step, of those
            that were looked at; None where that is not known.
        lost_updates: Those that the step did not move.
        share_lost_updates: Those as a share of the updates; None without updates.
        histogram: By exponent, finite entries above zero: ``e`` is for (2**(e-1), 2**e].
        window: Gradients of parameters: the scales at which nothing is lost; None for other kinds.
    """

    kind: Kind
    name: str
    dtypes: tuple[str, ...]
    format: str
    num_samples: int
    size: int
    measured: int
    zeros: int
    nan: int
    inf: int
    non_finite_step: int | None
    amax: float
    amin: float | None
    headroom: float | None
    headroom_step: int | None
    headroom_last: float | None
    lost: int
    share_lost: float
    share_lost_worst: float
    share_lost_step: int | None
    share_lost_last: float
    flushed: int | None
    underflow: Mapping[str, int]
    overflow: Mapping[str, int]
    updates: int | None
    lost_updates: int | None
    share_lost_updates: float | None
    histogram: Mapping[int, int]
    window: ScaleWindow | None

    @property
    def is_low(self) -> bool:
        """Whether it is stored in less than float32."""
        return not set(self.dtypes).isdisjoint(FORMATS_BY_DTYPE)

    @property
    def is_low_weight(self) -> bool:
        """Whether it is a weight that is stored in less than float32."""
        return self.kind == "parameter" and self.is_low

    @property
    def is_all_zeros(self) -> bool:
        """Whether all its entries were zero in all samples."""
        return 0 < self.measured == self.zeros


@dataclass(frozen=True)
class GradientTotals:
    """The gradients of all parameters together.

    Attributes:
        scale: Of the last sample; 1 without a scaler.
        measured: How many entries were measured in all samples.
        lost: How many of them underflow in the lower precision of the run, or would in fp16.
        share_lost: Those as a share of what was measured.
        window: The scales at which nothing is lost and at which no sample and no step of the run
            has overflowed.
        best: The scale that loses least: the one in the window that is closest to ``scale``. If
            the window is empty or its lower end is unknown, the largest scale without overflow.
            None if all entries were zero.
        share_lost_at_best: The share that underflows there, as far as known; None without ``best``.
    """

    scale: float
    measured: int
    lost: int
    share_lost: float
    window: ScaleWindow
    best: float | None
    share_lost_at_best: float | None


@dataclass(frozen=True)
class Summary:
    """All numbers of a run.

    Attributes:
        path: The folder of the record.
        policies: The policies in force, in order.
        lower: Name of the format that applies to float32 tensors: the lower precision of the run,
            fp16 if none was seen.
        has_scaler: Whether any step had a scale.
        loss: How the loss went, in all steps.
        losses: The loss of each optimizer, where they step by losses of their own, as in a GAN;
            else empty.
        norm: How the norm of the unscaled gradients went in the steps that were taken.
        lost_updates: How the share of updates that rounding has lost went in the sampled steps.
        origins: Where skips began, the most frequent first.
        bad_places: The findings of the diagnoses, in the order of the first step.
        sampled: The steps that were sampled.
        layers: All that was sampled, in the order in which it was first seen.
        notes: Notes for the reader, by the recorder or the reader of the record.
    """

    path: str
    facts: Facts
    models: tuple[ModelFacts, ...]
    policies: tuple[PolicySeen, ...]
    lower: str
    has_scaler: bool
    steps: StepCounts
    scale: ScaleCourse | None
    loss: Curve | None
    losses: tuple[OptimizerLoss, ...]
    norm: Curve | None
    lost_updates: Curve | None
    origins: tuple[Origin, ...]
    bad_places: tuple[BadPlace, ...]
    sampled: tuple[int, ...]
    layers: tuple[Layer, ...]
    gradients: GradientTotals | None
    notes: tuple[Note, ...]

    def of_kind(self, kind: Kind) -> tuple[Layer, ...]:
        """Return the layers of one kind."""
        return tuple(layer for layer in self.layers if layer.kind == kind)

    def at(self, key: str) -> Any:
        """Return the number at a place such as ``"loss.recent"``; None where a part is None."""
        value: Any = self
        for name in key.split("."):
            if name.isdigit():
                value = value[int(name)]
            else:
                value = None if value is None else getattr(value, name)
        return value

    @property
    def policy(self) -> PolicySeen | None:
        """The last policy in force."""
        return self.policies[-1] if self.policies else None

    @property
    def is_lowered(self) -> bool:
        """Whether autocast lowered ops: else float32 tensors went through no other format."""
        return any(policy.dtype in FORMATS_BY_DTYPE for policy in self.policies)

    def underflows(self, layer: Layer) -> bool:
        """Return whether what a layer lost was lost in the run, and would not only be in fp16."""
        return self.is_lowered or layer.is_low

    @property
    def can_underflow(self) -> bool:
        """Whether any gradient was in a lower precision."""
        return any(map(self.underflows, self.of_kind("parameter_gradient")))

    @property
    def went_bad_at(self) -> int | None:
        """The first step with inf or NaN as loss, or that a diagnosis explains otherwise."""
        bad = [p.steps[0] for p in self.bad_places if p.diagnosis.verdict in OTHER_CAUSES]
        if self.loss is not None and self.loss.first_non_finite is not None:
            bad.append(self.loss.first_non_finite)
        return min(bad, default=None)

    def follows_from(self, step: int | None) -> bool:
        """Return whether what was seen in a step is a consequence: it is not before the first bad.

        Of a run that recovered, only what happened in the first bad step itself is one.
        """
        bad = self.went_bad_at
        if bad is None or step is None:
            return False
        return step == bad or (step > bad and not self.has_recovered)

    @property
    def has_recovered(self) -> bool:
        """Whether the last loss is finite, the last steps were taken and the weights are good."""
        is_finite = self.loss is None or math.isfinite(self.loss.last)
        are_good = not any(layer.nan or layer.inf for layer in self.of_kind("parameter"))
        return is_finite and are_good and self.steps.skipped_at_end < ENDLESS

    @property
    def worst_share_lost(self) -> float | None:
        """The largest share that underflows of the gradient of a parameter."""
        shares = (layer.share_lost for layer in self.of_kind("parameter_gradient"))
        return max(shares, default=None)

    @property
    def worst_share_lost_updates(self) -> float | None:
        """The largest share of the updates of a parameter that rounding has lost."""
        shares = (layer.share_lost_updates for layer in self.layers)
        return max((share for share in shares if share is not None), default=None)
