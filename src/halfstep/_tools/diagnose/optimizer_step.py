"""Steps of optimizers that make weights inf or NaN of finite gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from halfstep._autocast import HALVES
from halfstep._common.formats import dtype_name
from halfstep._common.nested import map_plain, tensors_in
from halfstep._common.numbers import listed, things
from halfstep._gradients.gradients import parameters
from halfstep._gradients.optimizers import Closure, members
from halfstep._pytorch import autograd, distributed
from halfstep._tools.diagnose import cure_search
from halfstep._tools.diagnose.diagnosis import (
    BadOp,
    Cure,
    Diagnosis,
    Operand,
    short_error,
    source_of,
)
from halfstep._tools.diagnose.inspect_op import inspect
from halfstep._tools.diagnose.trials import CureTrial
from halfstep._tools.diagnose.user_calls import UserCalls, call_of
from halfstep._tools.measure import bytes_of, is_finite
from halfstep._tools.replay.blame import BlameTracker, name_in_code, names_in, scan
from halfstep._tools.replay.kept_calls import LARGEST_COPY
from halfstep._tools.replay.replay import ClosureCalledAgain, OutOfTime, Replayer
from halfstep._tools.replay.variant import Variant
from halfstep._tools.user_code import variable_of

USUAL_EPS = 1e-8
STEP_IN_FLOAT32 = (
    'halfstep.master_weights(optimizer, store="float32")  # once it is made: its steps are in '
    "float32; in float16 Adam's eps of 1e-08 is 0"
)
BELOW_ZERO = "centered=True takes a root of square_avg - grad_avg**2, which rounding took below 0"
LOST = "{0} is 0 there, which {1} rounds small values to: its gradients are not 0"
IN_FLOAT32 = "keep {0} in float32: make it with dtype=torch.float32, and write to it without a cast"
OF_NUMBERS = "keep {0} as Python numbers, or in float32: {1} rounds what is above {2:.6g} to 1"
IN_PLACE_OF_LOST = (
    "the step was taken again after it, with zeros in place of what it had made inf or NaN; "
    "numbers that depend on these are left out"
)
NOT_AGAIN = "the step could not be taken again: {0}"


def event_of(
    optimizer: Optimizer,
    name_of: Callable[[Tensor], str],
    known: frozenset[str] = frozenset(),
    written: Callable[[Tensor], list[str]] = lambda _: [],
) -> Diagnosis | None:
    """Return the diagnosis of weights that are bad after a step of finite gradients, or None.

    Weights with names in ``known`` were bad before. ``written`` returns what is to be said of the
    line that wrote to a weight or state since the step before. Sync: one for each weight.
    """
    found = [
        (group, weight, name)
        for member in members(optimizer)
        for group in member.param_groups
        for weight in group["params"]
        if weight.grad is not None and is_finite(weight.grad) and not is_finite(weight)
        if (name := name_of(weight) or name_in_code(weight)) not in known
    ]
    if not found:
        return None
    group, weight, name = found[0]
    values = distributed.local_part(weight.detach())
    bad = ~values.isfinite()
    count, num_nan = int(bad.sum()), int(values.isnan().sum())
    what = "NaN" if num_nan == count else "inf or NaN" if num_nan else "inf"
    more = f" (and {things(len(found) - 1, 'more tensor')})" if found[1:] else ""
    entries, lines = f"{count:,} of {values.numel():,} entries of {name}", written(weight)
    said = f"{type(optimizer).__name__} made {entries} {what}{more}"
    if lines:  # who knows whether the optimizer or the loop did
        said = f"{entries} were {what}{more} after a step of {type(optimizer).__name__}"
    said += "; its gradients were finite"
    own = getattr(optimizer, "state", {}).get(weight, {})
    state = {
        key: distributed.local_part(value)
        for key, value in own.items()
        if isinstance(value, Tensor) and value.shape == weight.shape
    }
    gradient = distributed.local_part(weight.grad.detach())
    zero = [key for key, value in state.items() if bool((value[bad] == 0).all())]
    spoilt = [key for key, value in state.items() if not bool(value[bad].isfinite().all())]
    eps, dtype = group.get("eps"), values.dtype
    has_eps = isinstance(eps, float | int) and float(torch.tensor(eps, dtype=dtype)) == 0
    is_rounded = has_eps and eps != 0
    causes = [f"eps is {eps:g}, in {dtype_name(dtype)} 0" if is_rounded else "eps is 0"]
    causes = [f"{causes[0]}, and {zero[-1]} is 0 there" if zero else causes[0]][:has_eps]
    causes += [f"its state {key} is inf or NaN there" for key in spoilt]
    lost = [key for key in zero if state[key].dtype in HALVES and bool((gradient[bad] != 0).any())]
    others = {k: v for k, v in own.items() if isinstance(v, Tensor) and k not in (*state, "step")}
    numbers = [k for k, v in others.items() if v.numel() < 3 and v.dtype in HALVES and 1 in v]
    if lost and not numbers and not has_eps:
        causes += [LOST.format(lost[-1], dtype_name(state[lost[-1]].dtype))]
    texts = [STEP_IN_FLOAT32] if is_rounded else [IN_FLOAT32.format(key) for key in lost[-1:]]
    texts = texts or lines
    if zero and numbers:  # a decay that is rounded to 1 keeps a state at 0, too
        dtype = own[numbers[0]].dtype
        limit = 1 - torch.finfo(dtype).eps / 4
        texts = [OF_NUMBERS.format(listed(numbers), dtype_name(dtype), limit)]
    texts = next(filter(None, (written(state[key]) for key in spoilt)), texts)
    cure = Cure("code", "\n".join(texts)) if texts else None
    return Diagnosis("optimizer", None, name, cure=cure, notes=tuple(causes), happened=said)


class _StepTracker(BlameTracker):
    """Blame tracker that describes the first step that makes weights bad."""

    def __init__(self, model: nn.Module | None) -> None:
        super().__init__()
        self._name_of = names_in(model)
        self.event: Diagnosis | None = None
        self.optimizer: Optimizer | None = None
        self._bad_before: dict[Optimizer, frozenset[str]] = {}  # one may step inside another

    def before_step(self, optimizer: Optimizer) -> None:
        bad = (weight for weight in parameters(optimizer) if not is_finite(weight))
        names = (self._name_of(each) or name_in_code(each) for each in bad)
        self._bad_before[optimizer] = frozenset(names)

    def see_step(self, optimizer: Optimizer) -> None:
        super().see_step(optimizer)
        if self.event is None:
            known = self._bad_before.get(optimizer, frozenset())
            self.event = event_of(optimizer, self._name_of, known)
            self.optimizer = optimizer


def fault_of_step(
    replayer: Replayer, scale: float | None, put: Callable[[float], None] | None = None
) -> Diagnosis | None:
    """Carry out the steps of optimizers in a replay; return the diagnosis of a bad one.

    ``put`` puts a number in place of what is lost; numbers that depend on it are left out.
    """
    replayer.takes_steps = True
    tracker, calls = _StepTracker(replayer.model), UserCalls(replayer.num_ops)
    found = scan(replayer, Variant(scale=scale), calls.active(), tracker)
    event, optimizer, blame = tracker.event, tracker.optimizer, found.blame
    if found.run.error is not None:
        replayer.notes.append(NOT_AGAIN.format(short_error(found.run.error)))
    if event is None or optimizer is None or found.run.error is not None:
        replayer.takes_steps = False
        return None
    if blame is None or blame.key is None:
        return event
    bad, cure = inspect(replayer, blame, scale).bad, event.cure
    if put is not None:
        put(1.0)
        bad = _in_both(bad, inspect(replayer, blame, scale).bad)
        put(0.0)
    trial = CureTrial(replayer, found.run)
    with suppress(OutOfTime):
        if any(note.startswith("eps is 0") for note in event.notes):
            cure = _of_setting(trial, optimizer, "eps", USUAL_EPS)
        elif bad.op.endswith("sqrt_") and any(g.get("centered") for g in optimizer.param_groups):
            cure = _of_setting(trial, optimizer, "centered", False, BELOW_ZERO)
        if cure is None and not _is_of_torch(optimizer):
            cure = cure_search.of_maths(trial, blame, call_of(calls, blame))
    return replace(event, bad=_shown(bad), cure=cure)


def _in_both(bad: BadOp, other: BadOp) -> BadOp:
    """Return an op without the values in which it differs from that of another replay."""
    pairs = zip_longest(bad.inputs, other.inputs[: len(bad.inputs)])
    inputs = tuple(
        one if one == two else Operand(one.name, one.dtype, one.shape, None, None, 0, 0, 0)
        for one, two in pairs
    )
    return replace(bad, inputs=inputs, output=bad.output if bad.output == other.output else None)


def _shown(bad: BadOp) -> BadOp:
    """Return an op of an optimizer without the lists of tensors that PyTorch's loops over."""
    if not bad.op.startswith(("_foreach_", "_fused_")):
        return bad
    return replace(bad, inputs=(), output=None, needs=None, limit=None)


def _of_setting(
    trial: CureTrial, optimizer: Optimizer, key: str, value: object, *remarks: str
) -> Cure | None:
    """Return a setting as the cure if the step is finite with it, in groups where it is 0 or on."""

    @contextmanager
    def changed() -> Iterator[None]:
        groups = [group for group in optimizer.param_groups if key in group]
        before = [(group, group[key]) for group in groups if bool(group[key]) != bool(value)]
        for group, _ in before:
            group[key] = value
        try:
            yield
        finally:
            for group, old in before:
                group[key] = old

    if trial.blame(changed()) is not None:
        return None
    text = f'for group in {variable_of(optimizer)}.param_groups: group["{key}"] = {value!r}'
    return trial.judged(Cure("code", text, is_finite=True, remarks=remarks), changed)


# --- a step that was taken ------------------------------------------------------------------------

Numbers = list[tuple[dict[Any, Any], dict[Any, Any]]]
"""Pairs of a dictionary of an optimizer, and the numbers in it before a step."""


def _states(optimizer: Optimizer) -> list[dict[Any, Any]]:
    found = [each for m in members(optimizer) for each in getattr(m, "state", {}).values()]
    return [each for each in found if isinstance(each, dict)]


def numbers_of(optimizer: Optimizer) -> Numbers:
    """Return the numbers that an optimizer counts with, to take a step again. Sync: none.

    Of one that is not PyTorch's also the weights and the state, if they are not large.
    """
    states = _states(optimizer)
    own = [getattr(member, "__dict__", {}) for member in members(optimizer)]
    found = [*parameters(optimizer), *tensors_in(states)]
    # Its step may read state that it overwrites.
    is_whole = not _is_of_torch(optimizer) and sum(map(bytes_of, found)) <= LARGEST_COPY
    own += [{weight: weight for weight in parameters(optimizer)}] * is_whole
    return [
        (each, {key: _copied(value) for key, value in each.items() if _is_kept(value, is_whole)})
        for each in (*states, *own)
    ]


def _is_of_torch(optimizer: Optimizer) -> bool:
    return type(optimizer).__module__.startswith("torch.")


def _is_kept(value: Any, is_whole: bool) -> bool:
    if isinstance(value, Tensor):
        return is_whole or (value.ndim == 0 and value.device.type == "cpu")
    return type(value) in (int, float)


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


@contextmanager
def _zero_where_bad(optimizer: Optimizer) -> Iterator[Callable[[float], None]]:
    """Put zeros in place of inf and NaN in weights and state for the time of the block.

    Yield what puts another number there.
    """
    tensors = [*parameters(optimizer), *tensors_in(_states(optimizer))]
    bad = [(each, each.detach().clone()) for each in tensors if not is_finite(each)]
    versions = [autograd.version_of(each) for each, _ in bad]

    def put(value: float) -> None:
        with torch.no_grad():
            for each, before in bad:
                each.copy_(before.nan_to_num(value, value, value))

    put(0.0)
    try:
        yield put
    finally:
        for (each, before), version in zip(bad, versions, strict=True):
            with torch.no_grad():
                each.copy_(before)
            autograd.set_version(each, version)


def diagnosis_of_taken_step(
    optimizer: Optimizer,
    before: Numbers,
    event: Diagnosis,
    model: nn.Module | None,
    seconds: float,
    arguments: Callable[[Closure], tuple[tuple[Any, ...], dict[str, Any]]],
    loss: Callable[[], object] | None = None,
) -> Diagnosis:
    """Take a step again that has made weights bad; name its op and its cure if it goes bad again.

    ``arguments`` are those of the step with a closure, if it has one. The gradients are still
    there, those of the first call of a closure; the replay ends with the second one. The numbers
    begin as before, and what was inf or NaN and is not among them at zero. ``loss`` computes the
    loss and its gradients again, which further steps take.
    """
    is_exact = any(isinstance(key, Tensor) for _, numbers in before for key in numbers)
    gradients = [(weight, weight.grad) for weight in parameters(optimizer)]
    taken_in: list[int] = []

    def step(optimizer: Optimizer, loss: Callable[[], object] | None) -> None:
        is_first, taken_in[:] = taken_in != [replayer.num_replays], [replayer.num_replays]
        if is_first:
            begin_as_before()
        if loss is not None:
            with torch.enable_grad():
                loss()
        for weight, gradient in gradients if is_first else ():
            weight.grad = gradient
        losses = [torch.zeros(())]

        def closure() -> Tensor:
            if not losses:
                raise ClosureCalledAgain
            return losses.pop()

        args, kwargs = arguments(closure)
        type(optimizer).step(optimizer, *args, **kwargs)

    def begin_as_before() -> None:
        known = {id(values) for values, _ in before}
        for member in members(optimizer):
            state = getattr(member, "state", {})
            for weight in [w for w, values in state.items() if id(values) not in known]:
                del state[weight]  # its first step made it
        for values, numbers in before:
            values.update(map_plain(_copied, numbers))
            for weight in (each for each in numbers if isinstance(each, Tensor)):
                weight.detach().copy_(numbers[weight])

    replayer = Replayer(partial(step, optimizer, loss if is_exact else None), model)
    replayer.limit, found = seconds, None
    try:
        with _zero_where_bad(optimizer) as put:
            found = fault_of_step(replayer, None, put)
    except Exception as error:  # raised by the user's optimizer
        replayer.notes.append(NOT_AGAIN.format(short_error(error)))
    if found is None:
        why_not = [note for note in replayer.notes if note.startswith(NOT_AGAIN[:30])]
        return replace(event, notes=(*event.notes, *why_not))
    return replace(
        event,
        bad=found.bad,
        cure=found.cure,
        notes=(*(event.notes or found.notes), *[IN_PLACE_OF_LOST] * (not is_exact)),
        num_replays=replayer.num_replays,
        seconds=replayer.seconds,
        source=source_of(found.bad),
    )
