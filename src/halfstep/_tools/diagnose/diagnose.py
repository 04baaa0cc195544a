"""Diagnosis of a step: replay, search for the op to blame, inspection, verdict and cure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

import torch
from torch import Tensor, nn

from halfstep._autocast import HALVES
from halfstep._common.machine import rank
from halfstep._common.module_names import without_wrappers
from halfstep._pytorch import compiler, distributed
from halfstep._tools.diagnose import cure_search
from halfstep._tools.diagnose.diagnosis import (
    A_NUMBER,
    BY_THE_OP_ALONE,
    BadOp,
    Cure,
    Diagnosis,
    Verdict,
    sentence,
    short_error,
    source_of,
)
from halfstep._tools.diagnose.inspect_op import (
    InspectingTracker,
    bad_entries,
    described,
    inspect,
    named_by,
)
from halfstep._tools.diagnose.optimizer_step import STEP_IN_FLOAT32, fault_of_step
from halfstep._tools.diagnose.recurrence import of_recurrence
from halfstep._tools.diagnose.several_steps import UNKNOWN, Usual
from halfstep._tools.diagnose.trials import CureTrial
from halfstep._tools.diagnose.user_calls import UserCall, UserCalls, call_of
from halfstep._tools.dtype_errors.dtype_error import add_explanation
from halfstep._tools.replay.blame import OUTSIDE, Blame, Scan, names_in, scan
from halfstep._tools.replay.kept_calls import (
    KeptCall,
    Made,
    gap_in,
    outside_of_contexts,
    step_of,
    why_not_again,
)
from halfstep._tools.replay.observer import waits_for_others, why_together
from halfstep._tools.replay.replay import OutOfTime, Replayer, replaying
from halfstep._tools.replay.variant import Variant, all_in_float32, half_of
from halfstep._tools.user_code import owners_in, whole_of
from halfstep.errors import RanksError
from halfstep.events import observe_ops

SECONDS = 30.0  # the default limit of the time for the replays of a step
OF_NO_OP = (
    "no op that was seen made the inf or NaN: they were there before the step, or were made where "
    "ops are not seen (another thread, a library outside of PyTorch)"
)
SWALLOWED = (
    "later ops made finite numbers of it, as rsqrt(inf) is 0; halfstep.self_check compares them "
    "with those of float32"
)
WAS_FINITE = "its replay was finite"
TO_SEE_MORE = "return its values from the function as a plain tensor on a device"
INNOCENT = (
    "what this rank computes alone is finite: an inf or NaN in its step comes from another rank, "
    "whose diagnosis names the cause"
)
BY_HAND = (
    "take a halfstep.GradScaler in place of the factor {1:.0f}, since it adapts the scale: "
    "scaler.scale(loss).backward(), scaler.unscale_(optimizer) in place of your division, "
    "scaler.step(optimizer), scaler.update()\n"
    "or multiply the loss by {0:.0f}{2}, and divide the gradients by that"
)
MARGIN = 32.0
"""How far a scale that does not adapt is below the one that is finite now: gradients grow."""
LEAVE_OUT = "leave this batch out"
WITHOUT_ROWS = (
    "leave out its bad rows, best where it is made: "
    "keep = {0}.isfinite().reshape(len({0}), -1).all(1), then inputs[keep] and targets[keep]\n"
)
COMPILED = "compiled code was replayed as it is written, in eager mode"


def diagnose_step(
    step_fn: Callable[[], object], model: nn.Module | None, seconds: float
) -> Diagnosis:
    """Diagnose a step from the current state; an error of it about dtypes gets a note."""
    for owner in (model, *owners_in(step_fn)):
        why = why_together(owner) if isinstance(owner, nn.Module) else None
        if why is not None:
            raise waits_for_others(why)
    try:
        found = diagnosis_of(step_fn, model, seconds=seconds)
        is_innocent = found.verdict == "none" and distributed.has_ranks()
        return replace(found, happened=INNOCENT) if is_innocent else found
    except Exception as error:
        add_explanation(error)
        raise


def diagnosis_of(
    step: Callable[[], object],
    model: nn.Module | None,
    *,
    is_kept: bool = False,
    usual: Usual = UNKNOWN,
    seconds: float = SECONDS,
) -> Diagnosis:
    """Replay a step, which repeats kept calls if ``is_kept``, until cause and cure are known."""
    replayer = Replayer(step, model, is_kept=is_kept)
    replayer.limit = seconds
    with observe_ops(replayer.observe):
        found = _found(replayer, usual)
    model = replayer.model
    if model is not None and any(map(compiler.is_compiled, model.modules())):
        replayer.notes.append(COMPILED)
    return replace(
        found,
        notes=(*found.notes, *dict.fromkeys(replayer.notes)),
        num_replays=replayer.num_replays,
        seconds=replayer.seconds,
        rank=rank(),
        source=source_of(found.bad),
    )


def diagnosis_of_calls(
    calls: Sequence[KeptCall],
    root: Made | None,
    scale: float | None,
    model: nn.Module | None,
    usual: Usual = UNKNOWN,
    seconds: float = SECONDS,
    results: Callable[[], Sequence[Tensor]] = tuple,
) -> tuple[Diagnosis | None, str]:
    """Replay the calls of a loop; return the diagnosis, or None and the reason why there is none.

    ``root`` is the bad value, if ``backward`` was not called on it; or there are ``results``.
    """
    if (why_not := why_not_replayed(calls, model)) is not None:
        return None, why_not
    try:
        with replaying(), outside_of_contexts():  # also hides the scaler that step_of makes
            step = step_of(calls, root, scale, results)
            found = diagnosis_of(step, model, is_kept=True, usual=usual, seconds=seconds)
    except RanksError:
        return None, "the model or the loss waits for other ranks"
    except Exception as error:  # raised by the user's code
        return None, f"a replay raised {short_error(error)}"
    gap = gap_in(calls)
    if gap is not None and found.verdict in ("unknown", "data"):
        # Values computed in the gap are not computed again, so the replay takes them for data.
        named = () if model is None else (*model.named_parameters(), *model.named_buffers())
        if found.tensor not in {without_wrappers(name) for name, _ in named}:
            return None, gap
    return (None if found.verdict == "none" else found), gap or WAS_FINITE


def why_not_replayed(calls: Sequence[KeptCall], model: nn.Module | None) -> str | None:
    """Return why one rank cannot repeat calls, or None if it can."""
    return (None if model is None else why_together(model)) or why_not_again(calls)


def is_bad_at_scale_1(calls: Sequence[KeptCall], model: nn.Module | None) -> bool:
    """Return whether a replay of kept calls at scale 1 is not finite."""
    replayer = Replayer(step_of(calls, None, 1.0), model, is_kept=True)
    # The replay for the diagnosis reports errors of the user's code.
    with replaying(), outside_of_contexts(), suppress(Exception):
        return scan(replayer, Variant(scale=1.0)).blame is not None
    return False


def _of_what_was_seen(replayer: Replayer, found: Scan) -> Diagnosis:
    """Return the diagnosis of a step whose result, or its origin, could not be checked."""
    if found.not_seen:
        replayer.notes.append(f"not seen: {', '.join(found.not_seen)}; {TO_SEE_MORE}")
    if found.first is None:
        return Diagnosis("unknown", ends=found.ends, scale=found.run.scale)
    replayer.notes.append("this op is the first that is not finite; where that ends was not seen")
    bad = inspect(replayer, found.first, found.run.scale).bad
    return Diagnosis("unknown", bad, ends=found.ends, scale=found.run.scale)


def _of_no_blame(replayer: Replayer, found: Scan) -> Diagnosis:
    """Return the diagnosis of a step in which no op is to blame."""
    run = found.run
    if run.error is not None:
        raise run.error
    if found.not_seen:
        return _of_what_was_seen(replayer, found)
    try:
        if replayer.has_steps and (of_step := fault_of_step(replayer, run.scale)) is not None:
            return of_step
        if found.first is not None and not replayer.is_kept:
            bad = inspect(replayer, found.first, run.scale).bad
            said = sentence(Diagnosis("range", bad), with_line=True)
            replayer.notes += [f"{said}; {SWALLOWED}"][: bad.is_beyond_its_dtype]
    except OutOfTime:
        _note_end(replayer)
    return Diagnosis("none", scale=run.scale)


def _of_no_op(replayer: Replayer, found: Scan, blame: Blame) -> Diagnosis:
    """Return the diagnosis of a step with non-finite values that no observed op made."""
    name = "" if blame.tensor is None else names_in(replayer.model)(blame.tensor)
    if not name or (replayer.is_kept and name.endswith(".grad")):  # kept calls begin without any
        replayer.notes.append(OF_NO_OP)
        return _of_what_was_seen(replayer, found)
    cure = of_data(described(blame), name, is_of_batch=False)
    return Diagnosis("data", None, name, found.ends, found.run.scale, cure)


def _found(replayer: Replayer, usual: Usual) -> Diagnosis:
    model = replayer.model
    tracker = None if model is None else InspectingTracker(model, is_replay=True)
    calls = UserCalls(replayer.num_ops)
    found = scan(replayer, Variant(), calls.active(), tracker=tracker)
    blame, scale, error = found.blame, found.run.scale, found.run.error
    if isinstance(error, RanksError):  # the rest of the step did not run
        raise error
    if blame is None:
        return _of_no_blame(replayer, found)
    if error is not None:
        replayer.notes.append(
            f"the step ended with {short_error(error)}; the first value "
            "that was not finite is named"
        )
    if blame.reader == OUTSIDE:
        return _of_no_op(replayer, found, blame)
    inspection = None if tracker is None else tracker.inspected.get(blame.reader)
    if inspection is None:
        inspection = inspect(replayer, blame, scale)
    else:
        inspection.call = call_of(calls, blame)
        replayer.notes += inspection.notes
    bad, tensor = named_by(inspection.call, inspection.bad), inspection.tensor
    if blame.number == OUTSIDE or tensor is not None:
        where = "" if blame.tensor is None else bad_entries(whole_of(blame.tensor))
        cure = of_data(bad, tensor, is_of_batch=inspection.is_of_batch, where=where)
        return Diagnosis("data", bad, tensor, found.ends, scale, cure)
    try:
        trial = CureTrial(replayer, found.run, usual)
        swallowed = _of_swallowed(trial, found, blame, bad, calls)
        return swallowed or judge(trial, found, blame, bad, inspection.call)
    except OutOfTime:
        _note_end(replayer)
        verdict, untested = judge_alone(bad, blame, scale, model)
        return Diagnosis(verdict, bad, None, found.ends, scale, untested)


def _note_end(replayer: Replayer) -> None:
    replayer.notes.append(
        f"at least one more replay was not run: {replayer.limit:g} s of the thread's own time "
        "were over, the limit (--diagnose=SECONDS, diagnose(seconds=...))"
    )


def _of_swallowed(
    trial: CureTrial, found: Scan, blame: Blame, bad: BadOp, calls: UserCalls
) -> Diagnosis | None:
    """Return the diagnosis of an earlier overflow that an op made finite, such as 1 / inf.

    It is the cause if a change that makes it finite makes the step finite.
    """
    first, scale = found.first, found.run.scale
    if first is None or not 0 <= first.number < blame.reader or bad.is_beyond_its_dtype:
        return None
    inspection = inspect(trial.replayer, first, scale)
    if not inspection.bad.is_overflow:
        return None  # but such as log(0)
    call = call_of(calls, first)
    verdict: Verdict = "range" if inspection.bad.is_beyond_its_dtype else "maths"
    judged = Diagnosis(verdict, named_by(call, inspection.bad), None, found.ends, scale)
    if (grown := trial.usual.explain(judged)) is not None:
        return grown
    cure = cure_search.of_swallowed(trial, first, call)
    if cure is None:
        return None
    trial.replayer.notes.append(f"an op makes finite numbers of it, and {bad.op} then goes bad")
    return replace(judged, cure=cure)


# --- the verdict ----------------------------------------------------------------------------------


def judge(
    trial: CureTrial, found: Scan, blame: Blame, bad: BadOp, call: UserCall | None
) -> Diagnosis:
    """Return the diagnosis of a step in which an op is to blame, after replays with changes."""
    replayer, run = trial.replayer, found.run
    replayer.drop_bad_gradients()
    wide: Scan | None = None
    if run.entered:
        wide = scan(replayer, Variant(torch.float32, scale=run.scale))
    elif half_of(replayer.modules) is not None:
        wide = scan(replayer, Variant(scale=run.scale), all_in_float32(replayer.modules))
    is_wide_finite = wide is not None and wide.is_finite
    may_be_scale = found.is_scaling or (
        blame.phase == "backward" and (is_wide_finite or wide is None)
    )
    scale = run.scale or run.by_hand
    cure: Cure | None = None
    margin = MARGIN if run.scale is None else 1.0
    judged = Diagnosis("scale", bad, None, found.ends, scale)
    if scale and may_be_scale and (smaller := cure_search.smaller_scale(trial, scale, bad)):
        if trial.usual.is_known(judged):
            return judged
        smaller = max(smaller / margin, cure_search.SMALLEST_SCALE)
        cure = trial.judged(cure_search.of_scale(smaller, is_finite=True), scale=smaller)
    elif scale and run.by_hand and found.is_scaling and bad.excess:  # no replay multiplies by less
        cure = cure_search.of_scale(cure_search.power_below(scale / bad.excess / 2 / margin))
    if cure is not None:
        if run.scale is None:
            tried = ", which was tried" if cure.trial else ""
            cure = replace(cure, text=BY_HAND.format(cure.scale, scale, tried))
        judged = replace(judged, cure=cure)
        return (cure.is_finite is False and trial.usual.explain(judged)) or judged
    if not is_wide_finite and bad.is_beyond_its_dtype:
        _note_range_alone(replayer, blame, wide)
    after = None if wide is None else wide.blame
    # A cast in the code holds in that replay too.
    is_same = after is not None and after.where == blame.where and after.dtype not in HALVES
    in_float32 = True if is_wide_finite else False if is_same else None
    verdict: Verdict = "range" if is_wide_finite or bad.is_beyond_its_dtype else "maths"
    judged = Diagnosis(verdict, bad, None, found.ends, run.scale, is_finite_in_float32=in_float32)
    if (grown := trial.usual.explain(judged)) is not None:
        return grown
    if trial.usual.is_known(judged):
        return judged
    try:
        if verdict == "range":
            cure = cure_search.of_range(trial, blame, bad, call)
            first = cure_search.of_inputs(trial, cure) if bad.is_overflow else None
            judged = replace(judged, cure=first or cure)
            return trial.usual.explain(judged) or judged
        may_grow = bad.is_overflow and bad.phase == "forward"
        grown = of_recurrence(trial, judged, call) if may_grow else None
        if grown is not None:
            return grown
        cure = cure_search.of_inputs(trial) if bad.is_overflow else None
        maths = cure or cure_search.of_maths(trial, blame, call, is_overflow=bad.is_overflow)
        return replace(judged, cure=maths)
    except OutOfTime:
        _note_end(replayer)
    return judged


def _note_range_alone(replayer: Replayer, blame: Blame, wide: Scan | None) -> None:
    """Note why the op alone is finite in a wider dtype, although no replay is finite."""
    if wide is None:
        replayer.notes.append(f"no autocast was entered: {BY_THE_OP_ALONE}")
    elif wide.blame is None:
        why = "it was not seen whole" if wide.run.error is None else short_error(wide.run.error)
        replayer.notes.append(
            f"the step could not be replayed in float32 ({why}): {BY_THE_OP_ALONE}"
        )
    elif wide.blame.where != blame.where:  # casts in the user's code stay in every replay
        place = wide.blame.place.module or "the model's own forward"
        replayer.notes.append(
            f"in float32 the step goes bad too, later: {wide.blame.op} in {place}"
        )


def judge_alone(
    bad: BadOp, blame: Blame, scale: float | None, model: nn.Module | None
) -> tuple[Verdict, Cure | None]:
    """Return the verdict on an op without a replay, and an untested cure (None for bad data)."""
    if blame.number == OUTSIDE:
        return "data", None
    if bad.excess is None:
        return "maths", None
    if bad.phase == "backward" and scale is not None:
        smaller = cure_search.power_below(scale / bad.excess / 2)
        if smaller >= cure_search.SMALLEST_SCALE:
            return "scale", cure_search.of_scale(smaller)
    return "range", cure_search.narrowest_rule(blame, model)


def of_data(bad: BadOp, tensor: str | None, *, is_of_batch: bool, where: str = "") -> Cure:
    """Return the cure for a tensor that was bad before the step; ``where`` names its entries."""
    # A batch is taken from at least as many examples; a row per class is taken more than once.
    has_rows = is_of_batch or (
        bad.op == "index"
        and all(math.prod(each.shape) <= bad.inputs[0].shape[0] for each in bad.inputs[1:])
    )
    name = str(tensor).partition(" in ")[0]
    rows = WITHOUT_ROWS.format(name) if has_rows and "row" in where else ""
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
        together = " on all ranks, which wait for each other" if distributed.has_ranks() else ""
        text = f"{rows}{'or ' * bool(rows)}{LEAVE_OUT}{together}\n{tensor} is not finite{where}"
    else:
        finding = f": before the step began it was not finite{where}"
        is_number = str(tensor).startswith(A_NUMBER)
        text = f"{rows}look where {tensor} comes from{'' if is_number else finding}"
    return Cure("data", text)
