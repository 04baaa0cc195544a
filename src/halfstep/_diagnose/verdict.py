"""Verdict on a bad step: its cause, with the cure; from replays, or from the op alone."""

from __future__ import annotations

import torch
from torch import nn

from halfstep._diagnose import cure_search
from halfstep._diagnose.blame import OUTSIDE, Blame, Scan, scan
from halfstep._diagnose.cure_search import CureTrial
from halfstep._diagnose.diagnosis import BadOp, Cure, Verdict
from halfstep._diagnose.half_models import all_in_float32, half_of
from halfstep._diagnose.replay import Replayer
from halfstep._diagnose.user_calls import UserCall
from halfstep._diagnose.variant import Variant

Judgement = tuple[Verdict, Cure | None]


def judge(
    replayer: Replayer, found: Scan, blame: Blame, bad: BadOp, call: UserCall | None
) -> Judgement:
    """Return the verdict on a step, and its cure, from replays of it."""
    run, trial = found.run, CureTrial(replayer, found.run)
    wide: Scan | None = None
    is_half = not run.entered and half_of(replayer.modules) is not None
    if run.entered:
        wide = scan(replayer, Variant(torch.float32, scale=run.scale))
    elif is_half:
        wide = scan(replayer, Variant(scale=run.scale), all_in_float32(replayer.modules))
    is_wide_finite = wide is not None and wide.is_finite
    may_be_scale = found.is_scaling or (
        blame.phase == "backward" and (is_wide_finite or wide is None)
    )
    if run.scale is not None and may_be_scale:
        largest = _largest_gradient(found, wide) if wide is not None else None
        smaller = cure_search.smaller_scale(trial, run.scale, bad, largest)
        if smaller is not None:
            return "scale", cure_search.of_scale(smaller, is_finite=True)
    if is_wide_finite or _is_range_alone(replayer, blame, bad, wide):
        return "range", cure_search.of_range(trial, blame, bad, call)
    return "maths", cure_search.of_maths(trial, blame, call)


def _is_range_alone(replayer: Replayer, blame: Blame, bad: BadOp, wide: Scan | None) -> bool:
    """Return whether an op is finite in a wider dtype, though no replay is finite."""
    if not bad.is_beyond_its_dtype:
        return False
    if wide is None:
        replayer.notes.append("no autocast was entered: judged by the op alone")
    elif wide.blame is None:
        error = wide.run.error
        replayer.notes.append(
            "the step could not be replayed in float32 "
            f"({type(error).__name__}: {error}): judged by the op alone"
        )
    elif wide.blame.where != blame.where:  # a cast by hand lowers in every replay
        place = wide.blame.place.module or "the model's own forward"
        replayer.notes.append(
            f"in float32 the step goes bad too, later: {wide.blame.op} in {place}"
        )
    return True


def _largest_gradient(found: Scan, wide: Scan) -> float | None:
    """Return the largest magnitude in float32 of the gradients that are float16 in the step."""
    return max(
        (
            amax
            for place, (_, amax) in wide.gradients.items()
            if found.gradients.get(place, (None,))[0] is torch.float16
        ),
        default=None,
    )


def judge_alone(
    bad: BadOp, blame: Blame, scale: float | None, model: nn.Module | None
) -> Judgement:
    """Return the verdict on an op, and a cure that was not tried; none for a bad tensor."""
    if blame.number == OUTSIDE:
        return "data", None
    if not bad.is_beyond_its_dtype:
        return "maths", cure_search.of_op(bad)
    assert bad.needs is not None
    assert bad.limit is not None
    if bad.phase == "backward" and scale is not None:
        smaller = cure_search.power_below(scale * bad.limit / bad.needs / 2)
        if smaller >= cure_search.SMALLEST_SCALE:
            return "scale", cure_search.of_scale(smaller)
    return "range", cure_search.narrowest_rule(blame, model)


STEP_IN_FLOAT32 = (
    'halfstep.master_weights(optimizer, store="float32")  # once it is made: its steps are in '
    "float32; in float16 Adam's eps of 1e-08 is 0"
)


def judge_data(bad: BadOp, tensor: str | None, *, is_of_batch: bool) -> Judgement:
    """Return the verdict on a tensor that was bad before the step, and its cure."""
    if tensor is not None and tensor.endswith(".grad"):
        text = "call zero_grad() first: this gradient is left from an earlier step"
    elif named := [operand for operand in bad.inputs if operand.name == tensor]:
        text = (
            f"load a checkpoint from before {tensor} went bad; "
            f"{tensor}.isfinite() shows which entries"
        )
        if named[0].dtype == "float16":
            text = f"{STEP_IN_FLOAT32}\n{text}"
    elif is_of_batch:
        text = f"leave this batch out: {tensor} is not finite; check where it is made"
    else:
        text = f"look where {tensor} comes from: it was not finite before the step began"
    return "data", Cure("data", text)
