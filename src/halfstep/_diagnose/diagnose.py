"""The function that replays a step and says what is wrong with it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from halfstep._autocast.module_names import without_wrappers
from halfstep._common.machine import rank
from halfstep._diagnose import across_ranks, curing
from halfstep._diagnose.blame import OUTSIDE, Blame, Blames, GradientPlace
from halfstep._diagnose.curing import Patient
from halfstep._diagnose.diagnosis import BadOp, Cure, Diagnosis, Flush, Verdict
from halfstep._diagnose.looking import Look
from halfstep._diagnose.owners import owners_in
from halfstep._diagnose.precision import Entered, Precision
from halfstep._diagnose.replay import Replayer, Setting
from halfstep._diagnose.underflow import Flushes
from halfstep._pytorch import compiler
from halfstep._trace.state import Place
from halfstep.errors import RanksError

COMPILED = "compiled code was replayed as it is written, in eager mode"

NO_END = (
    "the step was judged by its ops alone: it called no backward and returned no tensor (a loss in "
    "an object of your own is not seen)"
)


def diagnose(step_fn: Callable[[], object], *, model: nn.Module | None = None) -> Diagnosis:
    """Replay a training step and name the op, the module, the line, the cause and the cure.

    The step is run several times, op by op, from the state that everything is in now, and all is
    put back: parameters, buffers, gradients, random generators, the scaler, and what modules hold
    are bit for bit what they were. Optimizers and schedules do not step in it. What else
    ``step_fn`` does, printing or reading files, it does each time: the batch is to be read outside.

    Args:
        step_fn: Takes nothing and runs the step: forward, loss and backward, under autocast and
            with a scaler as in training. Optimizers may be stepped; several batches may be
            accumulated.
        model: The model, whose names the answer gives. Left out, the first module with parameters
            that is called.

    Returns:
        What was found; ``print`` it.

    Raises:
        TypeError: ``step_fn`` cannot be called, or ``model`` is no module.
        CallOrderError: A trace is running.
        RanksError: The step waits for other ranks: the model is sharded, or it calls a collective.
        Exception: What ``step_fn`` raises, if no value in it was bad before.

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
            f"diagnose({type(step_fn).__name__}): pass the function that runs a step, without its "
            "call: diagnose(step), or diagnose(lambda: step(batch))"
        )
    if not (model is None or isinstance(model, nn.Module)):
        raise TypeError(f"diagnose(model={type(model).__name__}): pass a torch.nn.Module")
    for owner in (model, *owners_in(step_fn)):
        why = across_ranks.why_together(owner) if isinstance(owner, nn.Module) else None
        if why is not None:
            raise across_ranks.waits_for_others(why)
    return across_ranks.merged(Diagnosing(step_fn, model).answer())


@dataclass(frozen=True)
class Scan:
    """What a replay has come to.

    Attributes:
        blame: What is to blame, None if the step is finite.
        ends: What went bad in the end.
        scale: The scale of the loss, None without one.
        entered: What the step asked of autocast.
        error: What it raised.
        is_scaling: Whether it is the multiplication of the loss by the scale that is to blame.
        gradients: The dtypes and largest magnitudes of the backward pass (see :class:`Blames`).
    """

    blame: Blame | None
    ends: tuple[str, ...]
    scale: float | None
    entered: list[Entered]
    error: Exception | None
    is_scaling: bool
    gradients: Mapping[GradientPlace, tuple[torch.dtype, float]]


class Diagnosing:
    """One diagnosis on its way.

    Args:
        step: Runs the step.
        model: The model, if it is known.
    """

    def __init__(self, step: Callable[[], object], model: nn.Module | None) -> None:
        self._replayer = Replayer(step, model)
        self._began = time.perf_counter()
        self._notes: list[str] = []

    def answer(self, *, with_underflow: bool = True) -> Diagnosis:
        """Replay the step until its cause and cure are known.

        Args:
            with_underflow: Whether a finite step is replayed again to see what underflows.
        """
        with self._replayer.ready():
            return self._finish(self._answer(with_underflow))

    def _answer(self, with_underflow: bool) -> Diagnosis:
        scan = self.scan(Setting())
        if isinstance(scan.error, RanksError):  # what comes after it was not seen
            raise scan.error
        if scan.blame is None:
            if scan.error is not None:
                raise scan.error
            found = Diagnosis("none", scale=scan.scale)
            underflow = self._underflow(scan.scale) if with_underflow else ()
            return replace(found, underflow=underflow)
        if scan.error is not None:
            self._notes.append(
                f"the step ended with {type(scan.error).__name__}: {scan.error}; the first value "
                "that was not finite is named"
            )
        look = self._look(scan)
        bad = look.bad_op()
        found = Diagnosis("unknown", bad, ends=scan.ends, scale=scan.scale)
        if scan.blame.number == OUTSIDE:
            return _of_data(replace(found, tensor=look.tensor))
        verdict, cure = self._judge(scan, scan.blame, bad)
        underflow = () if verdict != "scale" or cure is None else self._underflow(cure.scale)
        return replace(found, verdict=verdict, cure=cure, underflow=underflow)

    # --- replays ----------------------------------------------------------------------------------

    def scan(self, setting: Setting, around: AbstractContextManager[object] | None = None) -> Scan:
        """Replay the step, in a context if there is one, and find what is to blame."""
        with self._replayer.run(setting, Blames, around) as (ends, blames):
            model = self._replayer.model
            gradients = _names_of(blames.bad_leaves, model)
            blame = blames.root(has_failed=ends.error is not None or not blames.has_end)
            if ends.error is None and not blames.has_end:
                self._notes.append(NO_END)
            return Scan(
                blame=blame,
                ends=("loss",) if blames.is_loss_bad else gradients,
                scale=ends.scale,
                entered=ends.entered,
                error=ends.error,
                is_scaling=blame is not None and any(blame.number in ops for ops in ends.scaling),
                gradients=blames.gradients,
            )

    def _look(self, scan: Scan) -> Look:
        assert scan.blame is not None
        look = Look(scan.blame, self._replayer.model)
        with self._replayer.run(Setting(scale=scan.scale), lambda _: look) as (ends, _):
            if not look.has_seen:
                error = f" ({type(ends.error).__name__}: {ends.error})" if ends.error else ""
                self._notes.append(f"a second replay did not come to this op{error}")
            return look

    def _underflow(self, scale: float | None) -> tuple[Flush, ...]:
        flushes = Flushes(scale)
        with self._replayer.run(Setting(scale=scale), lambda _: flushes) as (ends, _):
            if ends.error is not None:
                error = f"{type(ends.error).__name__}: {ends.error}"
                self._notes.append(f"the replay for underflow ended with {error}")
            return flushes.found()

    def replayed(self, setting: Setting, around: AbstractContextManager[object]) -> Blame | None:
        """Return what is to blame in a replay, None if it is finite."""
        scan = self.scan(setting, around)
        if scan.error is not None and scan.blame is None:
            self._notes.append(f"a replay ended with {type(scan.error).__name__}: {scan.error}")
            return Blame(OUTSIDE, "", Place(), "forward", OUTSIDE)
        return scan.blame

    # --- why --------------------------------------------------------------------------------------

    def _judge(self, scan: Scan, blame: Blame, bad: BadOp) -> tuple[Verdict, Cure | None]:
        patient = Patient(self.replayed, self._replayer.model, scan.entered, scan.scale)
        wide = self.scan(Setting(Precision(torch.float32), scan.scale)) if scan.entered else None
        is_wide_finite = wide is not None and wide.blame is None and wide.error is None
        may_be_scale = scan.is_scaling or (
            blame.phase == "backward" and (is_wide_finite or wide is None)
        )
        if scan.scale is not None and may_be_scale:
            largest = _largest_gradient(scan, wide) if wide is not None else None
            smaller = curing.smaller_scale(patient, bad, largest)
            if smaller is not None:
                return "scale", curing.of_scale(smaller)
        if is_wide_finite or self._is_range_alone(blame, bad, wide):
            return "range", curing.of_range(patient, blame, bad)
        return "maths", curing.of_maths(patient, bad)

    def _is_range_alone(self, blame: Blame, bad: BadOp, wide: Scan | None) -> bool:
        """Say whether an op would be finite in a wider dtype, though no replay is that shows it."""
        if not bad.is_beyond_its_dtype:
            return False
        if wide is None:
            self._notes.append("no autocast was entered: judged by the op alone")
            return True
        if wide.blame is None:
            self._notes.append(
                "the step could not be replayed in float32 "
                f"({type(wide.error).__name__}: {wide.error}): judged by the op alone"
            )
            return True
        if curing.is_same_place(wide.blame, blame):  # a cast by hand lowers in every replay
            return True
        place = wide.blame.place.module or "the model's own forward"
        self._notes.append(f"in float32 the step goes bad too, later: {wide.blame.op} in {place}")
        return True

    def _finish(self, found: Diagnosis) -> Diagnosis:
        model = self._replayer.model
        if model is not None and any(map(compiler.is_compiled, model.modules())):
            self._notes.append(COMPILED)
        return replace(
            found,
            notes=(*found.notes, *dict.fromkeys(self._notes)),
            num_replays=self._replayer.num_replays,
            seconds=time.perf_counter() - self._began,
            rank=rank(),
        )


def _largest_gradient(scan: Scan, wide: Scan) -> float | None:
    """Return the largest magnitude, in float32, of what is float16 in the step."""
    return max(
        (
            amax
            for place, (_, amax) in wide.gradients.items()
            if scan.gradients.get(place, (None,))[0] is torch.float16
        ),
        default=None,
    )


def _of_data(found: Diagnosis) -> Diagnosis:
    """Say what to do about a tensor that was bad before the step."""
    assert found.bad is not None
    is_named = any(operand.name == found.tensor for operand in found.bad.inputs)
    if found.tensor is not None and found.tensor.endswith(".grad"):
        text = "call zero_grad() first: this gradient is left from a step before"
    elif is_named:
        text = (
            f"load a checkpoint from before {found.tensor} went bad; "
            f"{found.tensor}.isfinite() tells which entries"
        )
    else:
        text = f"leave this batch out: {found.tensor} is not finite; look where it is made"
    return replace(found, verdict="data", cure=Cure("data", text))


def _names_of(leaves: list[Tensor], model: nn.Module | None) -> tuple[str, ...]:
    """Return the names of parameters; of others what they look like."""
    named = () if model is None else model.named_parameters()
    known = {id(param): without_wrappers(name) for name, param in named}
    return tuple(known.get(id(leaf), f"a leaf of shape {tuple(leaf.shape)}") for leaf in leaves)
