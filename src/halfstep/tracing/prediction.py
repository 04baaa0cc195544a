"""What other rules would have cast: dtypes followed through the ops of a trace once more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from halfstep.casting.rule import Action
from halfstep.tracing.rows import Cast, Row, Value, cast_bytes, is_float, promoted

# Asked for float32, their backward gives the input's dtype by itself; that of others casts.
_GIVE_INPUT_DTYPE = ("softmax", "log_softmax")
# They take inputs of different dtypes, and autograd casts the gradient to that of each input.
_PROMOTE_BY_THEMSELVES = ("add", "sub", "mul", "div")


class Prediction:
    """The casts of a trace in which some ops had another rule.

    What is not known is left as it was: an op whose output has another dtype than its widest input
    keeps that, and a weight that was cast once is cast once.

    Args:
        rows: The trace.
        actions: For names of ops, what their rule is to say: ``"lower"`` or ``"leave"``.
    """

    def __init__(self, rows: Sequence[Row], actions: Mapping[str, Action]) -> None:
        self.bytes = 0
        self._actions = actions
        self._dtypes: dict[int, str] = {}
        self._kept: set[tuple[int, int, str]] = set()
        self._forward = [row for row in rows if row.phase != "backward"]
        backward = [cast for row in rows if row.phase == "backward" for cast in row.casts]
        self._has_backward = any(row.phase == "backward" for row in rows)
        self._gradients: dict[int, int] = {}
        for cast in backward:
            if cast.gradient_of is None:
                self.bytes += cast.bytes
            else:
                self._gradients[cast.gradient_of] = cast.bytes
        self._caches = not any_weight_cast_again(rows)
        # Whether an op that is asked for float32 copies its input first depends on its kernel.
        self._copies = {
            row.name for row in self._forward if row.action == "fp32-dtype" and row.casts
        }
        for row in self._forward:
            self._run(row)

    def _run(self, row: Row) -> None:
        recorded = {cast.source.storage: cast for cast in row.casts}
        before, after = [], []
        is_changed = row.name in self._actions and not row.is_cast_only and row.autocast is not None
        to = self._target(row, is_changed)
        for value in dict.fromkeys(row.inputs):
            cast = recorded.get(value.storage)
            dtype = self._dtypes.get(value.storage, value.dtype)
            target = to if is_float(dtype) and dtype != "float64" else None
            if cast is not None and not is_changed:
                target = cast.to
            if target and target != dtype:
                self._cast(row, value, dtype, target, cast if cast and cast.to == target else None)
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

    def _target(self, row: Row, is_changed: bool) -> str | None:
        """Return the dtype that the rule of an op casts its inputs to, None for none."""
        action = self._actions[row.name] if is_changed else row.action
        if row.is_cast_only:
            return None
        match action:
            case "lower":
                return row.autocast
            case "fp32":
                return "float32"
            case "fp32-dtype":
                return "float32" if row.name in self._copies else None
            case "promote":
                dtypes = [(self._dtypes.get(v.storage, v.dtype), (1,)) for v in row.inputs]
                return promoted(dtypes) or None
            case _:
                return None

    def _gradient_casts(self, row: Row, inputs: Sequence[tuple[str, tuple[int, ...]]]) -> int:
        """Return the bytes of casts that the backward of an op makes with inputs of these dtypes.

        Those are no gradients of casts: the op computes in another dtype than its input has.
        """
        if row.name in _PROMOTE_BY_THEMSELVES and row.action != "fp32-dtype":
            computes = promoted(inputs)
        elif row.action == "fp32-dtype" and row.name not in (*_GIVE_INPUT_DTYPE, *self._copies):
            computes = "float32"
        else:
            return 0
        if not self._has_backward or row.phase != "forward":
            return 0
        return sum(
            cast_bytes(shape, dtype, computes)
            for value, (dtype, shape) in zip(dict.fromkeys(row.inputs), inputs, strict=True)
            if value.requires_grad and is_float(dtype) and dtype != computes
        )

    def _cast(self, row: Row, value: Value, dtype: str, to: str, recorded: Cast | None) -> None:
        key = (value.storage, value.version, to)
        if value.is_weight and self._caches:
            if key in self._kept:
                return
            self._kept.add(key)
        size = cast_bytes(value.shape, dtype, to)
        self.bytes += size
        if recorded is not None:
            self.bytes += size if recorded.number in self._gradients else 0
        elif self._has_backward and value.requires_grad and row.phase == "forward":
            self.bytes += size


def any_weight_cast_again(rows: Sequence[Row]) -> bool:
    """Say whether a weight was cast to one dtype twice though it did not change."""
    seen = set()
    for row in rows:
        for cast in row.casts:
            key = (cast.source.storage, cast.source.version, cast.to)
            if row.phase != "backward" and cast.source.is_weight and not cast.by_hand:
                if key in seen:
                    return True
                seen.add(key)
    return False
