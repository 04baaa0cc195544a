"""After an iteration: see whether steps are being skipped, and make the report."""

from __future__ import annotations

from collections.abc import Sequence

from halfstep._scaler.alarm import Alarm, SkipReport
from halfstep._scaler.iteration import Journal
from halfstep._scaler.loss_scale import LossScale, state_of
from halfstep._scaler.outcome import Outcome
from halfstep._scaler.scale_state import Reason, ScaleState

NUM_SEARCHED = 16
"""The skipped step is looked for among this many: those of one iteration, or of some before it."""


def sound(alarm: Alarm, scale: LossScale, journal: Journal) -> None:
    """Speak if it is time to.

    What is known of the state is what has arrived on the host: on the CPU this iteration, on an
    accelerator it may be an earlier one.

    Args:
        alarm: Knows when to speak and how.
        scale: The scale that moved.
        journal: Has the last steps.

    Raises:
        SkippedStepsError: The user asked for an error.

    Sync: none as long as nothing is said.
    """
    # Whoever raises, or saves and asks the others, is to do so in the same iteration on all ranks.
    snapshot = scale.arrived(at_once=alarm.on_skips != "warn")
    if snapshot is None or not alarm.is_due(scale, *snapshot.skips()):
        return
    state = state_of(snapshot, scale.host)
    step = state.num_taken + state.num_skipped
    skipped = [
        outcome
        for outcome in journal.newest(NUM_SEARCHED)
        if outcome.loss_scale is scale and outcome.skipped and outcome.entry.step == step
    ]
    began_at_floor = state.run_scale <= state.min_scale
    alarm.speak(_report(state, skipped), began_at_floor=began_at_floor)


def _report(state: ScaleState, skipped: Sequence[Outcome]) -> SkipReport:
    # No outcome: steps were taken without blocks of accumulate() that overflowed.
    reasons = [outcome.reason for outcome in skipped if outcome.reason] or [Reason.OVERFLOW]
    return SkipReport(
        skipped_in_a_row=state.skipped_in_a_row,
        since=state.num_taken + state.num_skipped - state.skipped_in_a_row + 1,
        reason=Reason.NON_FINITE if Reason.NON_FINITE in reasons else reasons[-1],
        scale=state.scale,
        culprits=tuple(culprit for outcome in skipped for culprit in outcome.find_culprits()),
        optimizers=tuple(outcome.optimizer_name for outcome in skipped),
        rank=next((outcome.rank for outcome in skipped if outcome.rank is not None), None),
    )
