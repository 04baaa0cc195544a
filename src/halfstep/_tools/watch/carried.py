"""Tensors of the script that grow from step to step, as an average does whose decay is above 1."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterable
from itertools import pairwise
from types import CodeType

from torch import Tensor, nn

from halfstep._common.numbers import number
from halfstep._tools.line import line_text
from halfstep._tools.measure import bytes_of
from halfstep._tools.replay.blame import name_in_code
from halfstep._tools.replay.kept_calls import LARGEST_COPY, KeptCall, weights_of
from halfstep._tools.user_code import Place
from halfstep._tools.watch.bad_steps import are_finite, largest
from halfstep._tools.watch.call_log import CallLog, unseen

_GROWN, _BEGUN = 100.0, 4.0
"""The growth that is one, and that of it which was measured before the bad step."""
_STEADY = 0.75
"""The least rate of growth at the end, as a share of that before: of a sum, it is a half."""
STOP = (
    "stop the growth of {name}; a wider dtype or a clamp only delays it. It grew {factor}-fold a "
    "step by this line: a decay or a discount has to be below 1, a learning rate lower: {line}"
)


class Carried:
    """Sizes of the tensors that the loop makes or writes to, by the place in its code."""

    def __init__(self, log: CallLog) -> None:
        self.log, self._next = log, 1
        self._sizes: dict[tuple[CodeType, int, int], list[tuple[int, float]]] = {}

    def measure(self, step: int) -> None:
        """Note the sizes when steps 1, 2, 4, 8 ... end. Sync: one for each tensor then."""
        if step >= self._next:
            self._next = 2 * step
            with unseen():
                last = {_key(*each): each[0] for each in self.log.recent()}
                for key, tensor in last.items():
                    is_data = tensor.is_floating_point() and tensor.grad_fn is None
                    if is_data and bytes_of(tensor) <= LARGEST_COPY and (size := largest([tensor])):
                        self._sizes.setdefault(key, []).append((step, size))

    def grown(
        self, calls: Iterable[KeptCall], step: int, *, are_bad: bool
    ) -> tuple[str, str] | None:
        """Return what of the tensors that a bad step's calls read has grown, and the cure, or None.

        Those that are not finite are read if ``are_bad``, else the others. Sync: one for each.
        """
        for tensor in weights_of(calls):
            place = self.log.place_of(tensor)
            known = [] if place is None else self._sizes.get(_key(tensor, place), [])
            if place is None or not known or are_finite([tensor]) == are_bad:
                continue
            (first, low), (last, high) = known[0], known[-1]
            size = math.inf if are_bad else largest([tensor])
            if high > _BEGUN * low and size > max(_GROWN * low, high) and _is_steady(known):
                name, line = self._name(tensor, place), line_text(place.line)
                factor = number(math.pow(high / low, 1 / (last - first)))
                end = "inf or NaN" if are_bad else number(size)
                event = f"{name} grew from {number(low)} when step {first} ended to {end}"
                text = STOP.format(name=name, factor=factor, line=line)
                return f"{event} in step {step}", text
        return None

    def _name(self, tensor: Tensor, place: Place) -> str:
        """Return the name that a statement gives a tensor, which may have another value by now."""
        match place.statement:
            case ast.Assign(targets=[ast.Name(name) | ast.Attribute(attr=name)]):
                return name
        return self.log.name_in_models(tensor) or name_in_code(tensor).partition(" in ")[0]


def _key(tensor: Tensor, place: Place) -> tuple[CodeType, int, int]:
    """Return the place, and which parameter it is: one line may write to those of a model."""
    return place.code, place.instruction, id(tensor) if isinstance(tensor, nn.Parameter) else 0


def _is_steady(sizes: list[tuple[int, float]]) -> bool:
    """Return whether sizes have grown by about the same factor in each step, unlike a sum."""
    rates = [math.log(b / a) / (n - m) for (m, a), (n, b) in pairwise(sizes)]
    return len(rates) > 1 and min(rates) > 0 and rates[-1] > _STEADY * rates[-2]
