"""Steps of optimizers that make weights inf or NaN of finite gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._common.formats import dtype_name
from halfstep._common.nested import map_plain, tensors_in
from halfstep._common.numbers import things
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import members
from halfstep._pytorch import autograd, distributed
from halfstep._tools.diagnose import cure_search
from halfstep._tools.diagnose.diagnosis import BadOp, Cure, Diagnosis, source_of
from halfstep._tools.diagnose.inspect_op import inspect, names_in
from halfstep._tools.diagnose.trials import CureTrial
from halfstep._tools.diagnose.user_calls import UserCalls, call_of
from halfstep._tools.measure import is_finite
from halfstep._tools.replay.blame import BlameTracker, scan
from halfstep._tools.replay.replay import OutOfTime, Replayer
from halfstep._tools.replay.variant import Variant
from halfstep._tools.user_code import called_by_user

USUAL_EPS = 1e-8
STEP_IN_FLOAT32 = (
    'halfstep.master_weights(optimizer, store="float32")  # once it is made: its steps are in '
    "float32; in float16 Adam's eps of 1e-08 is 0"
)
IN_PLACE_OF_LOST = (
    "the step was replayed with zeros in place of the weights that it had made inf or NaN"
)


@dataclass(frozen=True)
class StepEvent:
    """Weights that a step of an optimizer has made inf or NaN."""

    tensor: str  # name of the first weight
    said: str
    causes: tuple[str, ...]  # what was measured at these entries
    is_of_state: bool  # whether the state is bad there
    has_eps: bool  # whether an eps of 0 is among the causes
    is_rounded: bool  # whether it is 0 in the dtype of the weight alone


def event_of(
    optimizer: Optimizer, name_of: Callable[[Tensor], str], known: frozenset[str] = frozenset()
) -> StepEvent | None:
    """Describe weights that are bad after a step of finite gradients; None if there are none.

    Weights with names in ``known`` were bad before. Sync: one for each weight.
    """
    found = [
        (group, weight, name)
        for member in members(optimizer)
        for group in member.param_groups
        for weight in group["params"]
        if weight.grad is not None and is_finite(weight.grad) and not is_finite(weight)
        if (name := _name(weight, name_of)) not in known
    ]
    if not found:
        return None
    group, weight, name = found[0]
    values = distributed.local_part(weight.detach())
    bad = ~values.isfinite()
    count, num_nan = int(bad.sum()), int(values.isnan().sum())
    what = "NaN" if num_nan == count else "inf or NaN" if num_nan else "inf"
    more = f" (and {things(len(found) - 1, 'more tensor')})" if found[1:] else ""
    said = (
        f"{type(optimizer).__name__} made {count:,} of {values.numel():,} entries of {name} "
        f"{what}{more}; its gradients were finite"
    )
    state = {
        key: distributed.local_part(value)
        for key, value in getattr(optimizer, "state", {}).get(weight, {}).items()
        if isinstance(value, Tensor) and value.shape == weight.shape
    }
    zero = [key for key, value in state.items() if bool((value[bad] == 0).all())]
    spoilt = [key for key, value in state.items() if not bool(value[bad].isfinite().all())]
    eps, dtype = group.get("eps"), values.dtype
    has_eps = isinstance(eps, float | int) and float(torch.tensor(eps, dtype=dtype)) == 0
    is_rounded = has_eps and eps != 0
    causes = [f"eps is {eps:g}, in {dtype_name(dtype)} 0" if is_rounded else "eps is 0"]
    causes = [f"{causes[0]}, and {zero[-1]} is 0 there" if zero else causes[0]][:has_eps]
    causes += [f"{key} is inf or NaN there" for key in spoilt]
    return StepEvent(name, said, tuple(causes), bool(spoilt), has_eps, is_rounded)


def _name(weight: Tensor, name_of: Callable[[Tensor], str]) -> str:
    shape = ", ".join(map(str, weight.shape))
    return name_of(weight) or called_by_user(weight) or f"a weight of shape [{shape}]"


class _StepTracker(BlameTracker):
    """Blame tracker that describes the first step that makes weights bad."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self._name_of = names_in(model)
        self.event: StepEvent | None = None
        self.optimizer: Optimizer | None = None

    def see_step(self, optimizer: Optimizer) -> None:
        super().see_step(optimizer)
        if self.event is None:
            self.event, self.optimizer = event_of(optimizer, self._name_of), optimizer


def fault_of_step(replayer: Replayer, scale: float | None) -> Diagnosis | None:
    """Carry out the steps of optimizers in a replay; return the diagnosis of a bad one."""
    replayer.takes_steps = True
    tracker, calls = _StepTracker(replayer.model), UserCalls(replayer.num_ops)
    found = scan(replayer, Variant(scale=scale), calls.active(), tracker)
    event, optimizer, blame = tracker.event, tracker.optimizer, found.blame
    if event is None or optimizer is None or found.run.error is not None:
        replayer.takes_steps = False
        return None
    bad, cure = None, None
    is_users = not type(optimizer).__module__.startswith("torch.")
    if blame is not None and blame.key is not None:
        bad = inspect(replayer, blame, scale).bad
        trial = CureTrial(replayer, found.run)
        call = call_of(calls, blame)
        with suppress(OutOfTime):
            if event.is_rounded:
                cure = Cure("code", STEP_IN_FLOAT32)
            elif event.has_eps:
                cure = _of_eps(trial, optimizer)
            if cure is None and is_users and not event.is_of_state:
                cure = cure_search.of_maths(trial, blame, call)
    return diagnosis_of_event(event, None if bad is None else _shown(bad), cure)


def _shown(bad: BadOp) -> BadOp:
    """Return an op of an optimizer without the lists of tensors that PyTorch's loops over."""
    if not bad.op.startswith(("_foreach_", "_fused_")):
        return bad
    return replace(bad, inputs=(), output=None, needs=None, limit=None)


def diagnosis_of_event(
    event: StepEvent, bad: BadOp | None = None, cure: Cure | None = None
) -> Diagnosis:
    notes = event.causes
    return Diagnosis("optimizer", bad, event.tensor, cure=cure, notes=notes, happened=event.said)


def _of_eps(trial: CureTrial, optimizer: Optimizer) -> Cure | None:
    """Return a usual ``eps`` as the cure if the step is finite with it."""

    @contextmanager
    def changed() -> Iterator[None]:
        before = [(group, group["eps"]) for group in optimizer.param_groups if "eps" in group]
        for group, eps in before:
            group["eps"] = eps or USUAL_EPS
        try:
            yield
        finally:
            for group, eps in before:
                group["eps"] = eps

    if trial.blame(changed()) is not None:
        return None
    return Cure("code", f"{type(optimizer).__name__}(..., eps={USUAL_EPS:g})", is_finite=True)


# --- a step that was taken ------------------------------------------------------------------------

Numbers = list[tuple[dict[Any, Any], dict[Any, Any]]]
"""Pairs of a dictionary of an optimizer, and the numbers in it before a step."""


def numbers_of(optimizer: Optimizer) -> Numbers:
    """Return the numbers that an optimizer counts with, to take a step again. Sync: none."""
    found: Numbers = []
    for member in members(optimizer):
        state = getattr(member, "state", {})
        of_weights = [each for each in state.values() if isinstance(each, dict)]
        found += [
            (each, _numbers_in(each)) for each in (*of_weights, getattr(member, "__dict__", {}))
        ]
    return found


def _numbers_in(values: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: value.clone() if isinstance(value, Tensor) else value
        for key, value in values.items()
        if type(value) in (int, float)
        or (isinstance(value, Tensor) and value.ndim == 0 and value.device.type == "cpu")
    }


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


@contextmanager
def _zero_where_bad(optimizer: Optimizer) -> Iterator[None]:
    """Put zeros in place of inf and NaN in weights and state for the time of the block."""
    states = [s for m in members(optimizer) for s in getattr(m, "state", {}).values()]
    tensors = [*parameters(optimizer), *tensors_in([s for s in states if isinstance(s, dict)])]
    bad = [(each, each.detach().clone()) for each in tensors if not is_finite(each)]
    versions = [autograd.version_of(each) for each, _ in bad]
    with torch.no_grad():
        for each, _ in bad:
            each.nan_to_num_(0.0, 0.0, 0.0)
        try:
            yield
        finally:
            for (each, before), version in zip(bad, versions, strict=True):
                each.copy_(before)
                autograd.set_version(each, version)


def diagnosis_of_taken_step(
    optimizer: Optimizer,
    before: Numbers,
    event: StepEvent,
    model: nn.Module | None,
    seconds: float,
) -> Diagnosis:
    """Take a step again that has made weights bad; name its op and its cure if it goes bad again.

    The gradients are still there. What was inf or NaN begins at zero, and the numbers as before.
    """

    def step(optimizer: Optimizer) -> None:
        known = {id(values) for values, _ in before}
        for member in members(optimizer):
            state = getattr(member, "state", {})
            for weight in [w for w, values in state.items() if id(values) not in known]:
                del state[weight]  # its first step made it
        for values, numbers in before:
            values.update(map_plain(_copied, numbers))
        type(optimizer).step(optimizer)

    replayer = Replayer(partial(step, optimizer), model)
    replayer.limit, found = seconds, None
    with suppress(Exception), _zero_where_bad(optimizer):  # raised by the user's optimizer
        found = fault_of_step(replayer, None)
    if found is None:
        return diagnosis_of_event(event)
    return replace(
        found,
        happened=event.said,
        tensor=event.tensor,
        notes=(*(event.causes or found.notes), IN_PLACE_OF_LOST),
        num_replays=replayer.num_replays,
        seconds=replayer.seconds,
        source=source_of(found.bad),
    )
