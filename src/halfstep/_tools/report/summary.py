"""The numbers of a recorded run, for all forms of the report.

:func:`halfstep._tools.report.summarize.summarize` computes them. They are plain data:
``halfstep report --json`` prints them unchanged, and the page shows the same numbers. Steps are
those of the run, from 1, shares go from 0 to 1, headroom is in bits, times are in seconds, and
unknown values are None.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from halfstep._common.formats import FORMATS_BY_DTYPE
from halfstep._tools.diagnose.diagnosis import Diagnosis
from halfstep._tools.record.run import Header, Kind, Note, PolicySeen, ran_lower
from halfstep._tools.watch.skips import ENDLESS

NOTABLE = 0.01  # the share of lost gradient entries or updates from which on it is mentioned
FEW = 0.01  # the share of skipped steps that is normal in dynamic scaling
OTHER_CAUSES = ("range", "maths", "growth", "optimizer", "data")
"""The verdicts of diagnoses that found a cause other than the scale."""
State: TypeAlias = Literal["ended", "failed", "running", "no end"]


@dataclass(frozen=True)
class Facts:
    """The program, the machine, and how the run ended.

    Attributes:
        header: The first line of the last segment; device and machine are "unknown" without a step.
        duration: Seconds from the start to the last step.
        seconds_per_step: Median time between steps; None with fewer than two.
        world_size: Number of processes.
        ranks: The ranks that left a record.
        num_segments: Number of times that the run was started.
        state: ``"ended"``, ``"failed"`` (with an error), ``"running"`` (a process writes the
            record), ``"no end"`` (none does).
        error: The error that ended the run, on the first rank that failed; None without one.
        error_rank: The rank of that error.
        without_end: The ranks whose record has no end.
    """

    header: Header
    duration: float
    seconds_per_step: float | None
    world_size: int
    ranks: tuple[int, ...]
    num_segments: int
    state: State
    error: str | None
    error_rank: int | None
    without_end: tuple[int, ...]


@dataclass(frozen=True)
class ModelFacts:
    """A model: its class, the number of parameter entries, and that of modules that ran.

    Attributes:
        rank: The rank of the model, if the first rank has another one; else None.
    """

    name: str
    num_parameters: int
    num_modules: int
    rank: int | None


@dataclass(frozen=True)
class StepCounts:
    """The steps of the run. In a step of several optimizers each steps once, as in a GAN.

    Attributes:
        num_skipped: The number of steps in which an optimizer was skipped.
        share_skipped: ``num_skipped`` as a share of all steps; 0 if there are no steps.
        reasons: The number of skipped steps by reason, the most frequent first.
        skipped: The skipped steps.
        partly: Those of them that another optimizer took.
        ranks: The first ranks with inf or NaN, if the ranks exchanged this.
        start_up: The skipped iterations in which dynamic scaling was still searching for its first
            usable scale, which is normal.
        after_growth: The skipped iterations that brought the scale back to its value before growth:
            this is how dynamic scaling finds the largest usable scale.
        num_skipped_later: The number of all other skipped steps.
        share_skipped_later: ``num_skipped_later`` as a share of all steps; 0 if there are no steps.
        longest_in_a_row: The largest number of iterations in a row with a skipped step, without
            ``start_up`` and ``after_growth``.
        skipped_at_end: The number of iterations in a row with a skipped step at the end.
    """

    num: int
    num_taken: int
    num_skipped: int
    share_skipped: float
    reasons: Mapping[str, int]
    skipped: tuple[int, ...]
    partly: tuple[int, ...]
    ranks: tuple[int, ...]
    start_up: tuple[int, ...]
    after_growth: tuple[int, ...]
    num_skipped_later: int
    share_skipped_later: float
    longest_in_a_row: int
    skipped_at_end: int

    @property
    def num_by_scaling(self) -> int:
        """The number of steps whose skips are part of normal dynamic scaling."""
        return len(self.start_up) + len(self.after_growth)

    @property
    def later(self) -> tuple[int, ...]:
        """The iterations whose skips are not part of normal dynamic scaling."""
        normal = {*self.start_up, *self.after_growth}
        return tuple(step for step in self.skipped if step not in normal)


@dataclass(frozen=True)
class ScaleCourse:
    """The course of the scale.

    Attributes:
        first: The scale before the first step.
        last: The scale after the last step.
        before_last: The scale of the last step.
        min: The smallest scale, also of a single step before a trial of a larger one.
        overflowed_at: The smallest scale at which a step was skipped for overflow; None without
            overflow.
        stuck_at: The lower limit of the scale, at which gradients were inf or NaN and the loss
            was finite; None if that was not seen.
        stuck: The iterations at that scale.
    """

    first: float
    last: float
    before_last: float
    min: float
    max: float
    overflowed_at: float | None
    stuck_at: float | None
    stuck: tuple[int, ...]


@dataclass(frozen=True)
class Curve:
    """The course of the loss, the gradient norm or the share of lost updates.

    Attributes:
        first: The first value, which may be inf or NaN.
        last: The last value, which may be inf or NaN.
        mean: The mean of the finite values.
        recent: The mean of those among the last 20.
        early_max: The largest finite value among the first 20; None with fewer than 40 values.
        min: The smallest finite value.
        max: The largest finite value.
        first_non_finite: The first iteration with inf or NaN; None if there is none.
        first_bad: The value of that iteration.
        num_non_finite: The number of iterations with inf or NaN.
        ranks: For the loss, the ranks with inf or NaN in the first of these iterations.
    """

    first: float
    last: float
    mean: float | None
    recent: float | None
    early_max: float | None
    min: float | None
    max: float | None
    first_non_finite: int | None
    first_bad: float | None
    num_non_finite: int
    ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class OptimizerLoss:
    """The course of the loss of one optimizer."""

    optimizer: str
    curve: Curve


@dataclass(frozen=True)
class Origin:
    """A module in which skips began, and the iterations and ranks in which they did.

    Attributes:
        module: The path of the module; None if the gradients do not show it.
        num: The number of these iterations.
        parameters: Names of parameters whose gradients were inf or NaN, at most 20.
    """

    module: str | None
    num: int
    steps: tuple[int, ...]
    parameters: tuple[str, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class BadBuffers:
    """The buffers that were inf or NaN when the record ended, or when they were last seen.

    Attributes:
        names: At most 20 names from each of these ranks.
        num: Their number on the first of these ranks.
        step: The iteration in which buffers were first seen to be so, and stayed so.
        num_first: Their number then, on the first of these ranks.
    """

    names: tuple[str, ...]
    num: int
    step: int
    num_first: int
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class BadPlace:
    """An op of a module that made steps bad for one reason, with the first diagnosis of it."""

    steps: tuple[int, ...]
    ranks: tuple[int, ...]
    diagnosis: Diagnosis


@dataclass(frozen=True)
class ScaleWindow:
    """The scales, powers of two, at which none of the measured gradients is lost.

    Attributes:
        smallest: The smallest scale at which nothing underflows; None if all entries were zero.
        largest: The largest scale at which nothing overflows; None if no limit is visible.
        is_at_least: Whether entries were flushed to zero before they were measured, so that the
            true ``smallest`` may be larger.
        is_empty: Whether there is no such scale, because ``smallest`` is above ``largest``.
    """

    smallest: float | None
    largest: float | None
    is_at_least: bool
    is_empty: bool


@dataclass(frozen=True)
class Layer:
    """One kind of tensor of one parameter or module, over all sampled steps.

    Attributes:
        dtypes: The dtypes of the tensor, usually one.
        format: The format whose range applies: that of the dtype or, for float32 and float64, the
            lower precision of the run.
        num_samples: The number of samples with this tensor.
        size: The number of entries in the last sample.
        measured: The number of measured entries in all samples, to which the counts below refer.
        non_finite_step: The first sampled step with NaN or inf.
        amax: The largest finite magnitude, as in memory (gradients: scaled); 0 if there is none.
        amin: The smallest magnitude above zero.
        headroom: Bits from the largest finite magnitude to the largest value of the format, the
            minimum of all samples; negative if it does not fit; None without nonzero finite
            entries.
        headroom_step: The step of that minimum.
        lost: The least number of entries that are lost to underflow in the format, or would be.
        share_lost: ``lost`` as a share of the measured entries.
        share_lost_worst: The share in the worst sample.
        share_lost_step: The step of the worst sample.
        flushed: The least number of lost entries that underflow in float16 turned into zeros; None
            if this is unknown or does not apply.
        underflow: By format, the number of nonzero entries that it flushes to zero.
        overflow: By format, the number of finite entries that are too large for it.
        updates: For a weight, the number of inspected entries with a nonzero gradient in sampled
            steps; None if unknown.
        lost_updates: The number of these entries that the step did not change.
        share_lost_updates: ``lost_updates`` as a share of ``updates``; None without updates.
        histogram: The number of nonzero finite entries by exponent: ``e`` is for magnitudes in
            (2**(e-1), 2**e].
        window: For gradients of parameters, the scales at which nothing is lost; else None.
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
    lost: int
    share_lost: float
    share_lost_worst: float
    share_lost_step: int | None
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
        """Whether the tensor is stored in less than float32."""
        return not set(self.dtypes).isdisjoint(FORMATS_BY_DTYPE)

    @property
    def is_hypothetical(self) -> bool:
        """Whether no value was in the format: a float32 tensor, unless lower ops computed it."""
        return not (self.is_low or self.kind == "parameter_gradient")

    @property
    def is_low_weight(self) -> bool:
        """Whether the tensor is a weight stored in less than float32."""
        return self.kind == "parameter" and self.is_low

    @property
    def share_zeros(self) -> float:
        """The share of the measured entries that are zero."""
        return self.zeros / self.measured if self.measured else 0.0

    @property
    def is_all_zeros(self) -> bool:
        """Whether all measured entries are zero in all samples."""
        return self.share_zeros == 1.0


@dataclass(frozen=True)
class GradientTotals:
    """The gradients of all parameters together.

    Attributes:
        scale: The scale of the last sample; 1 without a scaler.
        measured: The number of measured entries in all samples.
        lost: The known number of these that underflow in the lower precision of the run, or would
            in fp16.
        share_lost: ``lost`` as a share of ``measured``.
        window: The scales at which nothing is lost, and no sample and no step of the run has
            overflowed.
        best: The scale that loses least: the one in the window that is closest to ``scale``. If
            the window is empty or its lower end is uncertain, the largest scale without overflow.
            None if all entries were zero.
        share_lost_at_best: The known share that underflows at ``best``; None without ``best``.
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
        products: The number of products by the dtypes of their results, in the sampled steps.
        lower: The name of the format that applies to float32 tensors: the lower precision of the
            run, or fp16 if it is unknown.
        num_optimizers: The number of optimizers that stepped.
        loss: The course of the loss over all steps; in JSON null if there are ``losses``.
        losses: The loss of each optimizer if these have different losses, as in a GAN; else empty.
        norm: The course of the norm of the unscaled gradients in the taken steps; in JSON null if
            there are several optimizers, whose norms are measured in turn.
        lost_updates: The share of the updates of sampled steps that were lost to rounding.
        origins: The modules in which skips began, the most frequent first.
        buffers: The buffers that were left inf or NaN; None if there are none.
        bad_places: The findings of the diagnoses, in the order of the first step.
        sampled: The sampled steps.
        have_weights_moved: Whether any sampled weight differed between two samples with a taken
            step between them; None without two such samples.
        layers: The sampled tensors, in the order of first appearance.
        notes: Notes of the recorder, and on reading the record.
    """

    path: str
    facts: Facts
    models: tuple[ModelFacts, ...]
    policies: tuple[PolicySeen, ...]
    products: Mapping[str, int]
    lower: str
    steps: StepCounts
    scale: ScaleCourse | None
    num_optimizers: int
    loss: Curve | None
    losses: tuple[OptimizerLoss, ...]
    norm: Curve | None
    lost_updates: Curve | None
    origins: tuple[Origin, ...]
    buffers: BadBuffers | None
    bad_places: tuple[BadPlace, ...]
    sampled: tuple[int, ...]
    have_weights_moved: bool | None
    layers: tuple[Layer, ...]
    gradients: GradientTotals | None
    notes: tuple[Note, ...]

    def of_kind(self, kind: Kind) -> tuple[Layer, ...]:
        """Return the layers of one kind."""
        return tuple(layer for layer in self.layers if layer.kind == kind)

    @property
    def bad_weights(self) -> tuple[Layer, ...]:
        """The weights that had inf or NaN in a sample."""
        return tuple(layer for layer in self.of_kind("parameter") if layer.inf or layer.nan)

    def at(self, key: str) -> Any:
        """Return the number with a key such as ``"loss.recent"``; None if a part of it is None."""
        value: Any = self
        for name in key.split("."):
            if name.isdigit():
                value = value[int(name)]
            else:
                value = None if value is None else getattr(value, name)
        return value

    @property
    def loss_keys(self) -> dict[str, str]:
        """The keys of the losses by name: of one, or of one for each optimizer."""
        if not self.losses:
            return {"loss": "loss"}
        optimizers = enumerate(loss.optimizer for loss in self.losses)
        return {f"loss of {name}": f"losses.{place}.curve" for place, name in optimizers}

    @property
    def policy(self) -> PolicySeen | None:
        """The last policy in force."""
        return self.policies[-1] if self.policies else None

    @property
    def is_lowered(self) -> bool:
        """Whether autocast lowered ops; else float32 tensors passed through no other format."""
        return any(policy.dtype in FORMATS_BY_DTYPE for policy in self.policies)

    @property
    def has_run_lower(self) -> bool | None:
        """Whether any product ran in a lower precision; None if that is unknown."""
        return ran_lower(self.products)

    def underflows(self, layer: Layer) -> bool:
        """Return whether the losses of a layer happened in the run, and not only would in fp16."""
        return layer.is_low or (self.is_lowered and layer.kind == "parameter_gradient")

    @property
    def has_bad_gradients(self) -> bool:
        """Whether a step was taken whose gradients, where they were measured, were inf or NaN."""
        return self.norm is not None and self.norm.num_non_finite > 0

    @property
    def went_bad_at(self) -> int | None:
        """The first step with a loss of inf or NaN, or a diagnosed cause other than the scale."""
        bad = [p.steps[0] for p in self.bad_places if p.diagnosis.verdict in OTHER_CAUSES]
        if self.loss is not None and self.loss.first_non_finite is not None:
            bad.append(self.loss.first_non_finite)
        return min(bad, default=None)

    @property
    def first_in_doubt(self) -> int | None:
        """The first step that may have made weights bad: that before a bad loss, if it is unknown.

        Such a loss is of a bad batch, or of weights that the step before has made bad.
        """
        bad = self.went_bad_at
        weights = {layer.name for layer in self.bad_weights}
        found = [place.diagnosis for place in self.bad_places if place.steps[0] == bad]
        is_known = any(x.verdict in OTHER_CAUSES and x.tensor not in weights for x in found)
        return bad if bad is None or is_known or not weights else max(bad - 1, 1)

    def follows_from(self, step: int | None) -> bool:
        """Return whether events of a step are consequences of the first bad step.

        Events in the first bad step are; those in later steps are unless the run recovered.
        """
        bad = self.went_bad_at
        if bad is None or step is None:
            return False
        return step == bad or (step > bad and not self.has_recovered)

    @property
    def has_recovered(self) -> bool:
        """Whether last loss, buffers and weights have no inf or NaN, and skips have ended."""
        is_finite = self.loss is None or math.isfinite(self.loss.last)
        are_good = not self.bad_weights and self.buffers is None
        return is_finite and are_good and self.steps.skipped_at_end < ENDLESS

    @property
    def worst_share_lost(self) -> float | None:
        """The largest share of the gradient entries of a parameter that underflow."""
        return max((each.share_lost for each in self.of_kind("parameter_gradient")), default=None)

    @property
    def worst_share_lost_updates(self) -> float | None:
        """The largest share of the updates of a parameter that were lost to rounding."""
        shares = (layer.share_lost_updates for layer in self.layers)
        return max((share for share in shares if share is not None), default=None)
