"""Diagnosis of a step: replays it to find the op, the module, the line, the cause and the cure."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from halfstep._autocast.modules import without_wrappers
from halfstep._common.machine import rank
from halfstep._diagnose import across_ranks, cure_search
from halfstep._diagnose.blame import OUTSIDE, Blame, BlameTracker, GradientPlace
from halfstep._diagnose.cure_search import CureTrial
from halfstep._diagnose.diagnosis import BadOp, Cure, Diagnosis, Flush, Verdict
from halfstep._diagnose.inspect_op import FlushCounter, OpInspection
from halfstep._diagnose.precision import EnteredAutocast, Precision
from halfstep._diagnose.replay import Replayer, ReplayVariant
from halfstep._diagnose.user_code import owners_in
from halfstep._pytorch import compiler
from halfstep._trace.places import OpPlace
from halfstep.errors import RanksError

COMPILED = "compiled code was replayed as it is written, in eager mode"

NO_END = (
    "the step was judged by its ops alone: it called no backward and returned no tensor (a loss in "
    "an object of your own is not seen)"
)


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
        >>> import halfstep
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
    step: Callable[[], object], model: nn.Module | None, *, with_underflow: bool = True
) -> Diagnosis:
    """Replay a step until its cause and cure are known.

    Args:
        step: Runs the step.
        model: The model, if it is known.
        with_underflow: Whether a finite step is replayed again to find underflow.
    """
    replayer = Replayer(step, model)
    with replayer.ready():
        found = _found(replayer, with_underflow)
    model = replayer.model
    if model is not None and any(map(compiler.is_compiled, model.modules())):
        replayer.notes.append(COMPILED)
    return replace(
        found,
        notes=(*found.notes, *dict.fromkeys(replayer.notes)),
        num_replays=replayer.num_replays,
        seconds=replayer.seconds,
        rank=rank(),
    )


def _found(replayer: Replayer, with_underflow: bool) -> Diagnosis:
    scan = _scan(replayer, ReplayVariant())
    if isinstance(scan.error, RanksError):  # the rest of the step was not seen
        raise scan.error
    if scan.blame is None:
        if scan.error is not None:
            raise scan.error
        found = Diagnosis("none", scale=scan.scale)
        underflow = _underflow(replayer, scan.scale) if with_underflow else ()
        return replace(found, underflow=underflow)
    if scan.error is not None:
        replayer.notes.append(
            f"the step ended with {type(scan.error).__name__}: {scan.error}; the first value "
            "that was not finite is named"
        )
    inspection = _inspect(replayer, scan)
    bad = inspection.bad_op()
    found = Diagnosis("unknown", bad, ends=scan.ends, scale=scan.scale)
    if scan.blame.number == OUTSIDE:
        return _of_data(replace(found, tensor=inspection.tensor))
    verdict, cure = _judge(replayer, scan, scan.blame, bad)
    underflow = ()
    if verdict == "scale" and cure is not None:
        underflow = _underflow(replayer, cure.scale)
    return replace(found, verdict=verdict, cure=cure, underflow=underflow)


# --- replays --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scan:
    """Result of a replay that looks for the op to blame.

    Attributes:
        blame: The blame, None if the step is finite.
        ends: What is not finite at the end: the loss, or gradients of parameters.
        scale: The scale of the loss, None without one.
        entered: The autocast regions that the step entered.
        error: The error that it raised.
        is_scaling: Whether the op to blame multiplies the loss by the scale.
        gradients: The dtypes and largest magnitudes in the backward pass (see
            :class:`BlameTracker`).
    """

    blame: Blame | None
    ends: tuple[str, ...]
    scale: float | None
    entered: list[EnteredAutocast]
    error: Exception | None
    is_scaling: bool
    gradients: Mapping[GradientPlace, tuple[torch.dtype, float]]


def _scan(
    replayer: Replayer,
    variant: ReplayVariant,
    around: AbstractContextManager[object] | None = None,
) -> Scan:
    """Replay the step, in a context if one is given, and find the op to blame."""
    with replayer.run(variant, BlameTracker, around) as (run, tracker):
        gradients = _names_of(tracker.bad_leaves, replayer.model)
        blame = tracker.root(has_failed=run.error is not None or not tracker.has_end)
        if run.error is None and not tracker.has_end:
            replayer.notes.append(NO_END)
        return Scan(
            blame=blame,
            ends=("loss",) if tracker.is_loss_bad else gradients,
            scale=run.scale,
            entered=run.entered,
            error=run.error,
            is_scaling=blame is not None and any(blame.number in ops for ops in run.scaling),
            gradients=tracker.gradients,
        )


def _inspect(replayer: Replayer, scan: Scan) -> OpInspection:
    assert scan.blame is not None
    inspection = OpInspection(scan.blame, replayer.model)
    with replayer.run(ReplayVariant(scale=scan.scale), lambda _: inspection) as (run, _):
        if not inspection.has_seen:
            error = f" ({type(run.error).__name__}: {run.error})" if run.error else ""
            replayer.notes.append(f"a second replay did not reach this op{error}")
        return inspection


def _underflow(replayer: Replayer, scale: float | None) -> tuple[Flush, ...]:
    counter = FlushCounter(scale)
    with replayer.run(ReplayVariant(scale=scale), lambda _: counter) as (run, _):
        if run.error is not None:
            error = f"{type(run.error).__name__}: {run.error}"
            replayer.notes.append(f"the replay for underflow ended with {error}")
        return counter.found()


def _blame_in(
    replayer: Replayer, variant: ReplayVariant, around: AbstractContextManager[object]
) -> Blame | None:
    """Return the blame of a replay, None if it is finite."""
    scan = _scan(replayer, variant, around)
    if scan.error is not None and scan.blame is None:
        replayer.notes.append(f"a replay ended with {type(scan.error).__name__}: {scan.error}")
        return Blame(OUTSIDE, "", OpPlace(), "forward", OUTSIDE)
    return scan.blame


# --- cause and cure -------------------------------------------------------------------------------


def _judge(replayer: Replayer, scan: Scan, blame: Blame, bad: BadOp) -> tuple[Verdict, Cure | None]:
    def replayed(variant: ReplayVariant, around: AbstractContextManager[object]) -> Blame | None:
        return _blame_in(replayer, variant, around)

    trial = CureTrial(replayed, replayer.model, scan.entered, scan.scale)
    wide: Scan | None = None
    if scan.entered:
        wide = _scan(replayer, ReplayVariant(Precision(torch.float32), scan.scale))
    is_wide_finite = wide is not None and wide.blame is None and wide.error is None
    may_be_scale = scan.is_scaling or (
        blame.phase == "backward" and (is_wide_finite or wide is None)
    )
    if scan.scale is not None and may_be_scale:
        largest = _largest_gradient(scan, wide) if wide is not None else None
        smaller = cure_search.smaller_scale(trial, bad, largest)
        if smaller is not None:
            return "scale", cure_search.of_scale(smaller)
    if is_wide_finite or _is_range_alone(replayer, blame, bad, wide):
        return "range", cure_search.of_range(trial, blame, bad)
    return "maths", cure_search.of_maths(trial, bad)


def _is_range_alone(replayer: Replayer, blame: Blame, bad: BadOp, wide: Scan | None) -> bool:
    """Return whether an op is finite in a wider dtype, though no replay is finite."""
    if not bad.is_beyond_its_dtype:
        return False
    if wide is None:
        replayer.notes.append("no autocast was entered: judged by the op alone")
        return True
    if wide.blame is None:
        replayer.notes.append(
            "the step could not be replayed in float32 "
            f"({type(wide.error).__name__}: {wide.error}): judged by the op alone"
        )
        return True
    if cure_search.is_same_place(wide.blame, blame):  # a cast by hand lowers in every replay
        return True
    place = wide.blame.place.module or "the model's own forward"
    replayer.notes.append(f"in float32 the step goes bad too, later: {wide.blame.op} in {place}")
    return True


def _largest_gradient(scan: Scan, wide: Scan) -> float | None:
    """Return the largest magnitude in float32 of the gradients that are float16 in the step."""
    return max(
        (
            amax
            for place, (_, amax) in wide.gradients.items()
            if scan.gradients.get(place, (None,))[0] is torch.float16
        ),
        default=None,
    )


def _of_data(found: Diagnosis) -> Diagnosis:
    """Return the diagnosis of a tensor that was bad before the step, with its cure."""
    assert found.bad is not None
    is_named = any(operand.name == found.tensor for operand in found.bad.inputs)
    if found.tensor is not None and found.tensor.endswith(".grad"):
        text = "call zero_grad() first: this gradient is left from an earlier step"
    elif is_named:
        text = (
            f"load a checkpoint from before {found.tensor} went bad; "
            f"{found.tensor}.isfinite() shows which entries"
        )
    else:
        text = f"leave this batch out: {found.tensor} is not finite; check where it is made"
    return replace(found, verdict="data", cure=Cure("data", text))


def _names_of(leaves: list[Tensor], model: nn.Module | None) -> tuple[str, ...]:
    """Return the names of parameters, and the shapes of other leaves."""
    named = () if model is None else model.named_parameters()
    known = {id(param): without_wrappers(name) for name, param in named}
    return tuple(known.get(id(leaf), f"a leaf of shape {tuple(leaf.shape)}") for leaf in leaves)
