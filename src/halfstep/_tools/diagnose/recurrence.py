"""Values that grow from call to call inside one step, as the state of a recurrent net does."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from halfstep._common.module_names import without_wrappers
from halfstep._common.numbers import number
from halfstep._tools.diagnose.cure_search import of_edit
from halfstep._tools.diagnose.diagnosis import Cure, Diagnosis
from halfstep._tools.diagnose.edits import NORM
from halfstep._tools.diagnose.flaws import Flaw, flaw_of
from halfstep._tools.diagnose.trials import CureTrial
from halfstep._tools.diagnose.user_calls import UserCall
from halfstep._tools.line import line_text
from halfstep._tools.measure import float_values
from halfstep._tools.replay.observer import OpCall, OpObserver
from halfstep._tools.replay.variant import Variant
from halfstep._tools.trace.ops import makes_no_values
from halfstep._tools.user_code import Place, user_place

_LEAST_CALLS = 8  # the number of calls from which on values may grow steadily
_LEAST_GROWTH = 1e6  # the growth over all calls from which on it is one
ORTHOGONAL = (
    'torch.nn.init.orthogonal_(model.get_parameter("{0}"))  # once, before the first step\n'
    "or bound what it is multiplied by in each call, as tanh and a norm do"
)
BOUND = Cure(
    "look",
    "bound what grows from call to call: a norm or tanh of it, weights that start smaller, or a "
    "smaller step of an integration",
)


class _Calls(NamedTuple):
    """Calls of an op at one place, which multiply by a square weight if it is known."""

    op: str
    place: Place | None
    sizes: list[float]  # the largest magnitudes of their results; of zeros, none
    weight: tuple[str, Tensor] | None


class _Repeats(OpObserver):
    """Observer of the calls of ops in the forward pass. Sync: one for each op."""

    def __init__(self, model: nn.Module | None) -> None:
        named = [] if model is None else model.named_parameters()
        square = [(without_wrappers(name), weight) for name, weight in named if _is_square(weight)]
        self._square = {each[1].untyped_storage().data_ptr(): each for each in square}
        self.found: dict[tuple[object, ...], _Calls] = {}

    def after(self, call: OpCall, outputs: list[Tensor]) -> None:
        """Note the largest value of an op's result."""
        values = float_values(outputs[0]) if outputs else None
        if call.phase == "backward" or makes_no_values(call.func) or values is None:
            return
        size = float(values.abs().amax()) if values.numel() else 0.0
        if 0 < size < math.inf:
            memory = {each.untyped_storage().data_ptr() for each in call.given if _is_square(each)}
            weight = next((self._square[each] for each in memory & self._square.keys()), None)
            place, name = user_place(), weight and weight[0]
            key = call.name, place and (place.code, place.instruction), name, values.shape
            new = _Calls(call.name, place, [], weight)
            self.found.setdefault(key, new).sizes.append(size)


def _is_square(tensor: Tensor) -> bool:
    return tensor.dim() == 2 and tensor.shape[0] == tensor.shape[1]


def of_recurrence(trial: CureTrial, judged: Diagnosis, call: UserCall | None) -> Diagnosis | None:
    """Return the diagnosis of an op whose results grow from call to call, or None if they do not.

    The cure is another start of the weight that it multiplies by, or a norm of what it reads, if
    that trains; else it says in words what to bound. If steps made the weight large, they are the
    cause. A note says by how much the results grow.
    """
    replayer, repeats = trial.replayer, _Repeats(trial.replayer.model)
    with replayer.run(Variant(scale=trial.scale), repeats):
        grown = [each for each in repeats.found.values() if _grow(each.sizes)]
    if not grown:
        return None
    found = min(grown, key=lambda each: each.weight is None)
    sizes = found.sizes
    factor = math.pow(sizes[-1] / sizes[0], 1 / (len(sizes) - 1))
    where = "" if found.place is None else f" at {line_text(found.place.line)}"
    replayer.notes.append(
        f"the results of {found.op}{where} grow {number(factor)}-fold from call to call in this "
        f"step: from {number(sizes[0])} to {number(sizes[-1])} in {len(sizes)} calls"
    )
    if found.weight and (thrown := trial.usual.explain(judged, only=found.weight[1])):
        return thrown
    cures = filter(None, _cures(trial, call, found))
    cure = next((each for each in cures if flaw_of(each, trial.usual) is Flaw.NONE), BOUND)
    return replace(judged, cure=cure)


def _cures(trial: CureTrial, call: UserCall | None, found: _Calls) -> Iterator[Cure | None]:
    if found.weight is not None:
        yield _of_start(trial, *found.weight)
    if call is not None and found.place is not None and call.place.is_at(found.place):
        yield of_edit(trial, call, NORM)


def _grow(sizes: list[float]) -> bool:
    rises = [a < b for a, b in pairwise(sizes)]
    is_long = len(sizes) >= _LEAST_CALLS and sizes[-1] > _LEAST_GROWTH * sizes[0]
    return is_long and sum(rises) > 0.9 * len(rises)


def _of_start(trial: CureTrial, name: str, weight: Tensor) -> Cure | None:
    """Return an orthogonal start of a weight as the cure if the step is finite with it."""
    before = weight.detach().clone()

    @contextmanager
    def started_anew() -> Iterator[None]:
        if torch.equal(weight, before):  # in the first of several steps
            nn.init.orthogonal_(weight)
        yield

    if trial.blame(started_anew()) is not None:
        return None
    return trial.judged(Cure("code", ORTHOGONAL.format(name), is_finite=True), started_anew)
