"""Diagnosis of a step: replay it, search for the op to blame, inspect that, judge, and cure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from torch import nn

from halfstep._autocast.kernels import observed_by
from halfstep._common.machine import rank
from halfstep._diagnose import across_ranks
from halfstep._diagnose.absorbed import find_absorbed
from halfstep._diagnose.blame import OUTSIDE, Blame, Scan, scan
from halfstep._diagnose.diagnosis import Diagnosis, source_of
from halfstep._diagnose.inspect_op import described, find_underflow, inspect, names_in
from halfstep._diagnose.inspecting import InspectingTracker
from halfstep._diagnose.replay import Replayer
from halfstep._diagnose.user_calls import UserCalls, call_of
from halfstep._diagnose.user_code import owners_in
from halfstep._diagnose.variant import Variant
from halfstep._diagnose.verdict import judge, judge_data
from halfstep._pytorch import compiler
from halfstep.errors import RanksError

OF_NO_OP = (
    "no op that was seen made the bad values: they were there before the step, or were made where "
    "ops are not seen (another thread, a library outside of PyTorch)"
)
TO_SEE_MORE = "return its values from the function as a plain tensor on a device"
COMPILED = "compiled code was replayed as it is written, in eager mode"


def diagnose(step_fn: Callable[[], object], *, model: nn.Module | None = None) -> Diagnosis:
    """Replay a training step and name the op, the module, the line, the cause and the cure.

    The step is run several times, op by op, from the present state. Everything is restored:
    parameters, buffers, gradients, random generators, the scaler, and what modules hold are bit for
    bit what they were. Optimizers and schedules do not step. Other effects of ``step_fn``, such as
    printing or reading files, happen each time, so read the batch outside of it.

    Args:
        step_fn: Takes no arguments and runs the step: forward, loss and backward, under autocast
            and with a scaler as in training. It may step optimizers and accumulate several batches.
        model: The model, for the names of modules. If left out, the first module with parameters
            that is called.

    Returns:
        The diagnosis; ``print`` it.

    Raises:
        TypeError: ``step_fn`` cannot be called, or ``model`` is not a module.
        CallOrderError: A trace is running.
        RanksError: The step waits for other ranks: the model is sharded, or it calls a collective.
        Exception: Any error of ``step_fn``, if no value was bad before it.

    Sync: one for each op.

    Example:
        >>> import halfstep, torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        >>> _ = nn.init.constant_(model[1].weight, 5e4)
        >>> x = torch.ones(2, 4)
        >>> def step():
        ...     with halfstep.autocast("cpu", torch.float16):
        ...         model(x).float().mean().backward()
        >>> _ = nn.init.constant_(model[0].bias, 10.0)
        >>> found = diagnose(step)
        >>> found.verdict, found.bad.name, found.bad.module
        ('range', 'linear', '1')
        >>> found.cure.policy, found.cure.is_finite
        ('standard; linear@1:fp32', True)
    """
    if not callable(step_fn):
        raise TypeError(
            f"diagnose({type(step_fn).__name__}): pass the function that runs a step, without "
            "calling it: diagnose(step), or diagnose(lambda: step(batch))"
        )
    if not (model is None or isinstance(model, nn.Module)):
        raise TypeError(f"diagnose(model={type(model).__name__}): pass a torch.nn.Module")
    for owner in (model, *owners_in(step_fn)):
        why = across_ranks.why_together(owner) if isinstance(owner, nn.Module) else None
        if why is not None:
            raise across_ranks.waits_for_others(why)
    return across_ranks.merged(diagnosis_of(step_fn, model))


def diagnosis_of(
    step: Callable[[], object], model: nn.Module | None, *, is_kept: bool = False
) -> Diagnosis:
    """Replay a step until its cause and cure are known.

    Args:
        step: Runs the step.
        model: The model, if it is known.
        is_kept: Whether it repeats kept calls: nothing of the user's is left open where a replay
            ends early, and a finite step is not replayed again to find underflow.
    """
    replayer = Replayer(step, model, may_end_early=is_kept)
    with observed_by(replayer.observe):
        found = _found(replayer, with_underflow=not is_kept)
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


def _of_what_was_seen(replayer: Replayer, found: Scan) -> Diagnosis:
    """Return the diagnosis of a step whose end, or what made it, was not seen."""
    if found.not_seen:
        replayer.notes.append(f"not seen: {', '.join(found.not_seen)}; {TO_SEE_MORE}")
    if found.first is None:
        return Diagnosis("unknown", ends=found.ends, scale=found.run.scale)
    replayer.notes.append("this op is the first that is not finite; where that ends was not seen")
    bad = inspect(replayer, found.first, found.run.scale).bad
    return Diagnosis("unknown", bad, ends=found.ends, scale=found.run.scale)


def _of_no_op(replayer: Replayer, found: Scan, blame: Blame) -> Diagnosis:
    """Return the diagnosis of a step that ends in bad values which no op has made."""
    name = "" if blame.tensor is None else names_in(replayer.model)(blame.tensor)
    if not name:
        replayer.notes.append(OF_NO_OP)
        return _of_what_was_seen(replayer, found)
    verdict, cure = judge_data(described(blame), name, is_of_batch=False)
    return Diagnosis(verdict, None, name, found.ends, found.run.scale, cure)


def _found(replayer: Replayer, with_underflow: bool) -> Diagnosis:
    model = replayer.model
    tracker = None if model is None else InspectingTracker(model, is_replay=True)
    calls = UserCalls(replayer.num_ops)
    found = scan(replayer, Variant(), calls.active(), tracker=tracker)
    blame, scale, error = found.blame, found.run.scale, found.run.error
    if isinstance(error, RanksError):  # the rest of the step was not seen
        raise error
    if blame is None and error is not None:
        raise error
    if blame is None and found.not_seen:
        return _of_what_was_seen(replayer, found)
    if blame is None:
        harm = find_absorbed(replayer, found.run) if found.first and with_underflow else None
        if harm is not None:
            return harm
        underflow = find_underflow(replayer, scale) if with_underflow else ()
        return Diagnosis("none", scale=scale, underflow=underflow)
    if error is not None:
        replayer.notes.append(
            f"the step ended with {type(error).__name__}: {error}; the first value "
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
    bad, tensor = inspection.bad, inspection.tensor
    if blame.number == OUTSIDE:
        verdict, cure = judge_data(bad, tensor, is_of_batch=inspection.is_of_batch)
        return Diagnosis(verdict, bad, tensor, found.ends, scale, cure)
    verdict, cure = judge(replayer, found, blame, bad, inspection.call)
    diagnosis = Diagnosis(verdict, bad, None, found.ends, scale, cure)
    if verdict == "scale" and cure is not None:
        diagnosis = replace(diagnosis, underflow=find_underflow(replayer, cure.scale))
    return diagnosis
