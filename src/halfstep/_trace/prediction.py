"""What other rules would have cast: dtypes followed through the ops of a trace once more."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from halfstep._autocast.rule import Action
from halfstep._autocast.weight_cache import SMALL
from halfstep._trace.rows import Cast, Row, Value, cast_bytes, is_float, itemsize, promoted

# Asked for float32, their backward gives the input's dtype by itself; that of others casts.
_GIVE_INPUT_DTYPE = ("softmax", "log_softmax")
# They take inputs of different dtypes, and autograd casts the gradient to that of each input.
_PROMOTE_BY_THEMSELVES = ("add", "sub", "mul", "div", "cat", "stack", "where")


class Prediction:
    """The casts of a trace in which some ops had another rule.

    What is not known is left as it was: an op whose output has another dtype than its widest input
    keeps that, and what was cast once, or not at all, is cast as often.

    Args:
        rows: The trace.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.forward = [row for row in rows if row.phase != "backward"]
        self.has_backward = len(self.forward) < len(rows)
        backward = [cast for row in rows if row.phase == "backward" for cast in row.casts]
        self.gradients = {c.gradient_of: c.bytes for c in backward if c.gradient_of is not None}
        self.other_bytes = sum(cast.bytes for cast in backward if cast.gradient_of is None)
        # Whether an op that is asked for float32 copies its input first depends on its kernel.
        self.copies = {row.name for row in self.forward if row.action == "fp32-dtype" and row.casts}

    def bytes(self, actions: Mapping[int, Action], dtypes: Mapping[int, str] | None = None) -> int:
        """Return what all casts would have read and written.

        Args:
            actions: For numbers of rows what their rule is to say: ``"lower"`` or ``"leave"``. A
                cast by hand that is to be left is not made.
            dtypes: Other dtypes of tensors that no op made, by the numbers of their memories.
        """
        replay = _Replay(self, actions, dtypes or {})
        for row in self.forward:
            replay.run(row)
        return replay.bytes


class _Replay:
    """One pass through the ops of a trace."""

    def __init__(
        self, trace: Prediction, actions: Mapping[int, Action], dtypes: Mapping[int, str]
    ) -> None:
        self.bytes = trace.other_bytes
        self._trace = trace
        self._actions = actions
        self._dtypes = dict(dtypes)
        self._cast_anew: Counter[tuple[object, ...]] = Counter()

    def run(self, row: Row) -> None:
        recorded = {cast.source.storage: cast for cast in row.casts}
        before, after = [], []
        is_changed = row.number in self._actions
        to = self._target(row) if is_changed or not row.is_cast_only else None
        for value in dict.fromkeys(row.inputs):
            cast = recorded.get(value.storage)
            dtype = self._dtype(value)
            target = to if is_float(dtype) and dtype != "float64" else None
            if cast is not None and not is_changed:
                target = cast.to
            if target and target != dtype:
                made = cast if cast and cast.to == target else None
                self._cast(row, value, dtype, target, made)
            if cast is not None:
                self._dtypes[cast.result] = target or dtype
            before.append((cast.to if cast else value.dtype, value.shape))
            after.append((target or dtype, value.shape))
        had, has = self._gradient_casts(row, before), self._gradient_casts(row, after)
        self.bytes += (0 if is_changed else has) - had
        read = {value.storage for value in row.inputs}
        for position, value in enumerate(row.outputs):
            if value.storage in read:
                continue  # in place: the dtype is that of what is written to
            follows = position == 0 and is_float(value.dtype)
            if follows and (is_changed or value.dtype == promoted(before)):
                self._dtypes[value.storage] = promoted(after) or value.dtype

    def _dtype(self, value: Value) -> str:
        model = value.storage if value.like is None else value.like
        return self._dtypes.get(value.storage) or self._dtypes.get(model, value.dtype)

    def _target(self, row: Row) -> str | None:
        """Return the dtype that the rule of an op casts its inputs to, None for none."""
        match self._actions.get(row.number, row.action):
            case "lower":
                return row.autocast
            case "fp32":
                return "float32"
            case "fp32-dtype":
                return "float32" if row.name in self._trace.copies else None
            case "promote":
                return promoted((self._dtype(value), (1,)) for value in row.inputs) or None
            case _:
                return None

    def _gradient_casts(self, row: Row, inputs: Sequence[tuple[str, tuple[int, ...]]]) -> int:
        """Return the bytes of casts that the backward of an op makes with inputs of these dtypes.

        Those are no gradients of casts: the op computes in another dtype than its input has.
        """
        if row.name in _PROMOTE_BY_THEMSELVES and row.action != "fp32-dtype":
            computes = promoted(inputs)
        elif row.action == "fp32-dtype" and row.name not in (
            *_GIVE_INPUT_DTYPE,
            *self._trace.copies,
        ):
            computes = "float32"
        else:
            return 0
        if not self._trace.has_backward or row.phase != "forward":
            return 0
        return sum(
            cast_bytes(shape, dtype, computes)
            for value, (dtype, shape) in zip(dict.fromkeys(row.inputs), inputs, strict=True)
            if value.requires_grad and is_float(dtype) and dtype != computes
        )

    def _cast(self, row: Row, value: Value, dtype: str, to: str, recorded: Cast | None) -> None:
        size = cast_bytes(value.shape, dtype, to)
        if recorded is not None:
            self.bytes += size * (2 if recorded.number in self._trace.gradients else 1)
            return
        if value.is_weight and value.requires_grad and row.cache and not is_small(value):
            key = (value.storage, value.version, value.offset, value.shape, to)
            self._cast_anew[key] += 1
            if self._cast_anew[key] > 2:  # a context keeps the second cast
                return
        has_gradient = self._trace.has_backward and value.requires_grad and row.phase == "forward"
        self.bytes += size * (2 if has_gradient else 1)


def is_small(weight: Value) -> bool:
    """Say whether the cache leaves a weight alone, since to cast it is faster."""
    return math.prod(weight.shape) * itemsize(weight.dtype) < SMALL
