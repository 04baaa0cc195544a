"""Warnings about skipped steps: when to issue them, and their content."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from halfstep._common.numbers import count, power, things
from halfstep._common.text import warn
from halfstep._gradients.scalars import checked_count
from halfstep._scaler.journal import OBSERVERS, Journal
from halfstep._scaler.loss_scale import LossScale
from halfstep._scaler.outcome import Culprit
from halfstep._scaler.scale_state import Reason
from halfstep.errors import SkippedStepsError, SkippedStepsWarning

NUM_NAMED = 5  # maximum number of parameters named in a message; the rest are counted
NUM_SEARCHED = 16  # number of recent outcomes that are searched for the skipped step

WHICH_OP = (
    "To find the op, use halfstep run --diagnose, or put `with halfstep.diagnose(scaler):` around "
    "the loop"
)

CURES = {
    Reason.OVERFLOW: (
        "the scaled gradients overflow. If it goes on: start at a smaller init_scale, look for a "
        "layer whose gradients explode (outcome.norms), clip, or lower the learning rate"
    ),
    Reason.LOSS: (
        "the loss was already inf or NaN before it was scaled. Check the batch and the parameters "
        "for inf and NaN, keep the loss and the ops before it in float32, and check log(), "
        "division and sqrt() at 0. If the loss depends on the scale, as a gradient penalty may, "
        f"start at a smaller init_scale. {WHICH_OP}"
    ),
    Reason.NON_FINITE: (
        "the gradients were inf or NaN at min_scale too, while the loss was finite. Check "
        "the backward pass for sqrt(), norm() or pow() at 0, 0/0, a NaN hidden by where() or "
        "masked_fill(), values too large for float16, and NaN in the parameters. "
        f"{WHICH_OP}"
    ),
    Reason.AFTER_UNSCALE: (
        "the gradients were finite when they were unscaled, and code between unscale_() and step() "
        "made one inf or NaN. Check what it divides by (a norm of 0, inf or NaN), its sums over "
        "ranks, and clipping: clip_grad_norm_(..., error_if_nonfinite=True) raises at once"
    ),
}

BELOW_1 = (
    "the scale has fallen below 1, since gradients were inf or NaN at all larger ones that were "
    "tried. If steps are taken now, the loss is likely too large for float16: average it where it "
    "is a sum, divide it by a constant, or use bfloat16. If none is, the scale is not to "
    f"blame: the backward pass makes inf or NaN. {WHICH_OP}"
)
"""Advice about overflows while the scale falls below 1."""
UNSCALED = (
    "check the batch, the parameters for inf and NaN, and log(), division and sqrt() at 0; "
    "clip (max_norm), or lower the learning rate. halfstep run --diagnose names the op"
)
"""Advice where no loss is scaled."""
DIAGNOSED = "see the diagnoses of this run, if any: it replays steps that go bad"
LEFT = (
    "call optimizer.zero_grad() where the script continues without a step, or inf and NaN stay in "
    "the gradients, and later ones are added to them. If it does: "
)


@dataclass(frozen=True)
class SkipReport:
    """A run of skipped steps; ``str()`` formats the message.

    Attributes:
        skipped_in_a_row: Number of consecutive updates whose steps were skipped.
        since: Number of the first of them; each ``update`` counts one, from 1.
        reason: Why the last one was skipped.
        scale: The scale from now on; None for a guard, which scales nothing.
        culprits: The parameters with inf or NaN in their gradients; empty if these are gone.
        optimizers: Class names of the optimizers whose last step was skipped; empty if the script
            did not call ``step``.
        rank: The first rank that found inf or NaN; None with one rank or if all have the same
            gradients.
        is_diagnosing: Whether steps that go bad are replayed, so that their cause is not guessed.
        num_skipped: Number of all such updates until now.
    """

    skipped_in_a_row: int
    since: int
    reason: Reason
    scale: float | None
    culprits: tuple[Culprit, ...]
    optimizers: tuple[str, ...]
    rank: int | None = None
    is_diagnosing: bool = False
    num_skipped: int = 0

    @property
    def cure(self) -> str:
        """What to try."""
        left = LEFT if self.scale is not None and not self.optimizers else ""
        if self.is_diagnosing:
            return left + DIAGNOSED
        if self.scale is None:
            return UNSCALED
        is_low = self.reason is Reason.OVERFLOW and self.scale < 1
        return left + (BELOW_1 if is_low else CURES[self.reason])

    def __str__(self) -> str:
        last = self.since + self.skipped_in_a_row - 1
        # No steps: one of a record may have several updates, as of a GAN.
        which = f" {last} was" if last == self.since else f"s {self.since} to {last} were"
        what = f"update{which} skipped" + f" ({', '.join(self.optimizers)})" * bool(self.optimizers)
        if self.num_skipped > self.skipped_in_a_row:
            what += f", {count(self.num_skipped)} of {count(last)} so far"
        if self.scale is None:
            lines = [f"{what}; reason: inf or NaN in the gradients"]
        elif self.is_diagnosing:
            lines = [f"{what}; the scale is now {power(self.scale)}"]
        else:
            lines = [f"{what}; reason: {self.reason}; the scale is now {power(self.scale)}"]
        if self.rank is not None:
            lines.append(f"the first rank with inf or NaN is {self.rank}; its message says where")
        if self.culprits:
            lines.append(
                f"inf or NaN in the gradients of {things(len(self.culprits), 'parameter')}:"
            )
            lines += [f"  {culprit}" for culprit in self.culprits[:NUM_NAMED]]
            if len(self.culprits) > NUM_NAMED:
                lines.append(f"  and {len(self.culprits) - NUM_NAMED} more")
        lines.append(f"What to try: {self.cure}.")
        return "\n".join(lines)


OnSkips: TypeAlias = Literal["warn", "raise"] | Callable[[SkipReport], object]


class Alarm:
    """The alarm about skipped steps: never silent, and never repeated at every step.

    In a run of skips it is due when the scale has fallen below 1, when a step was skipped at
    ``min_scale`` too, after ``max_consecutive_skips``, and each time the run has doubled in length.
    The first two are reported at the 1st, 2nd, 4th, 8th, ... time over all runs.
    """

    def __init__(self, max_consecutive_skips: int, on_skips: OnSkips) -> None:
        self.max_consecutive_skips = checked_count(
            "max_consecutive_skips", max_consecutive_skips, at_least=1
        )
        if on_skips not in ("warn", "raise") and not callable(on_skips):
            raise ValueError(
                f"on_skips is {on_skips!r}: pass 'warn', 'raise', or a function that takes a "
                "SkipReport"
            )
        self.on_skips = on_skips
        self._next_length = self.max_consecutive_skips  # of a run of skips at which to speak next
        self._depth = 0  # how far this run has come
        self._num_deep = 0  # how often runs have come to a new depth
        self._said: set[object] = set()  # where inf and NaN were, and the cures, in warnings before

    def sound(self, scale: LossScale, journal: Journal) -> None:
        """Raise the alarm if it is due; call this after an iteration.

        After a fused step on an accelerator the state is that of some updates ago, on all ranks of
        the same one. Sync: none unless the alarm is due.
        """
        state = scale.state
        depth = 2 if state.reached_floor else int(state.is_below_1 and state.has_backed_off)
        if not self.note(state.skipped_in_a_row, depth):
            return
        step = state.num_taken + state.num_skipped
        skipped = [
            outcome
            for outcome in journal.newest(NUM_SEARCHED)
            if outcome.skipped and outcome._entry.step == step
        ]
        # A step at a scale that never was above the floor proves no defect.
        is_proven = state.reached_floor and state.run_scale > state.min_scale
        # There is no outcome if the script unscaled gradients and did not call step().
        reasons = [outcome.reason for outcome in skipped if outcome.reason] or [Reason.OVERFLOW]
        report = SkipReport(
            skipped_in_a_row=state.skipped_in_a_row,
            since=state.since,
            reason=Reason.NON_FINITE if Reason.NON_FINITE in reasons else reasons[-1],
            scale=state.scale,
            culprits=tuple(culprit for outcome in skipped for culprit in outcome.find_culprits()),
            optimizers=tuple(outcome.optimizer_name for outcome in skipped),
            rank=next((outcome.rank for outcome in skipped if outcome.rank is not None), None),
            is_diagnosing=any(observer.is_diagnosing for observer in OBSERVERS),
            num_skipped=state.num_skipped,
        )
        self.speak(report, is_proven=is_proven)

    def note(self, skipped_in_a_row: int, depth: int) -> bool:
        """Note an iteration; return whether the alarm is due.

        ``depth``: how far the run of skips has come: 1: below a scale of 1, 2: to ``min_scale``.
        """
        if skipped_in_a_row == 0:
            self._next_length, self._depth = self.max_consecutive_skips, 0
            return False
        is_due = skipped_in_a_row >= self._next_length
        if depth > self._depth:
            self._depth = depth
            self._num_deep += 1
            is_due |= self._num_deep.bit_count() == 1
        if is_due:
            self._next_length = max(self._next_length, 2 * skipped_in_a_row)
        return is_due

    def speak(self, report: SkipReport, *, is_proven: bool) -> None:
        """Warn, raise or call, as the user chose. A warning repeats no causes and no cure.

        "raise" only warns in two cases: if the script left out the steps itself, and up to
        ``max_consecutive_skips`` unless all scales down to ``min_scale`` were tried in vain.
        """
        if callable(self.on_skips):
            self.on_skips(report)
        elif (
            self.on_skips == "raise"
            and report.optimizers
            and (is_proven or report.skipped_in_a_row >= self.max_consecutive_skips)
        ):
            raise SkippedStepsError(str(report))
        else:
            where = report.rank, *(culprit.name for culprit in report.culprits)
            head, *causes, cure = str(report).split("\n")
            parts = {where: causes, report.cure: [cure]}
            new = [line for key, part in parts.items() if key not in self._said for line in part]
            self._said.update(parts)
            warn("\n".join([head, *new]), SkippedStepsWarning)
