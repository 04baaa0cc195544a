"""Savings: casts that other rules, or a change of the code, would avoid.

The dataflow of a trace shows the readers and writers of tensors. A prediction follows dtypes
through the ops of a trace under other rules. A saving is a change that is predicted to save bytes.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

from halfstep._autocast import Action, Policy, Rule
from halfstep._autocast.weight_cache import SMALL
from halfstep._tools.trace.rows import (
    Cast,
    Row,
    Value,
    cast_bytes,
    folded,
    grouped,
    is_float,
    is_lower,
    itemsize,
    pattern,
    promoted,
)


class Dataflow:
    """The writers and readers of storages in a forward pass.

    Attributes:
        writers: The last op that wrote to a storage, by number of the storage.
        raised: Casts by hand from a lower precision, by storage of the result.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.writers = {value.storage: row for row in rows for value in row.outputs}
        self.raised: dict[int, Row] = {}
        self._readers: dict[int, list[Row]] = defaultdict(list)
        self._lowered: set[tuple[int, int]] = set()  # pairs of row and storage
        self._made: set[int] = set()  # storages whose values come from no tensor
        for row in rows:
            self._note(row)

    def _note(self, row: Row) -> None:
        for value in row.inputs:
            self._readers[value.storage].append(row)
        for cast in row.casts:
            if is_lower(cast.to):
                self._lowered.add((row.number, cast.source.storage))
            if cast.by_hand and is_lower(cast.source.dtype):
                self.raised[cast.result] = row
        floats = [value for value in row.inputs if is_float(value.dtype)]
        if row.op.endswith("_like") or all(value.storage in self._made for value in floats):
            self._made |= {value.storage for value in row.outputs}

    def readers(self, row: Row) -> list[Row]:
        return [reader for value in row.outputs for reader in self._readers[value.storage]]

    def is_lowered(self, row: Row, by: Callable[[Iterable[bool]], bool] = any) -> bool:
        """Return whether any reader, or ``all`` of them, cast the output to a lower precision."""
        storage = row.outputs[0].storage if row.outputs else -1
        readers = self._readers[storage]
        return bool(readers) and by((reader.number, storage) in self._lowered for reader in readers)

    def flows_down(self, row: Row) -> bool:
        """Return whether the output is lowered, directly or after an op that keeps its dtype."""
        return any(map(self.is_lowered, (row, *self.readers(row))))

    def is_fixed(self, row: Row) -> bool:
        """Return whether an op must not be lowered: it creates values, or computes the loss."""
        if all(value.storage in self._made for value in row.outputs) or _is_loss(row):
            return True
        readers = self.readers(row)
        return row.op in ("sum", "mean") and bool(readers) and all(map(_is_loss, readers))


def _is_loss(row: Row) -> bool:
    is_number = any(is_float(v.dtype) and not v.shape for v in row.outputs[:1])
    return is_number or "loss" in row.op or "entropy" in row.op


# The backward of these ops returns the input dtype even if they return float32; others cast.
_GIVE_INPUT_DTYPE = ("softmax", "log_softmax")
# These ops take inputs of different dtypes; autograd casts the gradient to each input's dtype.
_PROMOTE_BY_THEMSELVES = ("add", "sub", "mul", "div", "cat", "stack", "where")


class Prediction:
    """A prediction of the casts of a trace if some ops had another rule.

    Unknown behaviour is assumed to stay the same: an op whose output has another dtype than its
    widest input keeps that dtype, and a tensor that was cast once, or never, is cast as often.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        self.forward = [row for row in rows if row.phase != "backward"]
        self.has_backward = len(self.forward) < len(rows)
        backward = [cast for row in rows if row.phase == "backward" for cast in row.casts]
        self.gradients = {c.gradient_of: c.bytes for c in backward if c.gradient_of is not None}
        self.other_bytes = sum(cast.bytes for cast in backward if cast.gradient_of is None)
        # Whether an op that returns float32 first copies its input depends on its kernel.
        self.copies = {row.name for row in self.forward if row.action == "fp32-dtype" and row.casts}

    def bytes(self, actions: Mapping[int, Action], dtypes: Mapping[int, str] | None = None) -> int:
        """Return the bytes that all casts would have read and written.

        Args:
            actions: The actions of other rules, ``"lower"`` or ``"leave"``, by the numbers of rows.
                A cast by hand with the action ``"leave"`` is not made.
            dtypes: Other dtypes of tensors that no op made, by the numbers of their storages.
        """
        replay = _Replay(self, actions, dtypes or {})
        for row in self.forward:
            replay.run(row)
        return replay.bytes


class _Replay:
    """A replay of the ops of a trace with other rules."""

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
                continue  # in place: the dtype stays
            follows = position == 0 and is_float(value.dtype)
            if follows and (is_changed or value.dtype == promoted(before)):
                self._dtypes[value.storage] = promoted(after) or value.dtype

    def _dtype(self, value: Value) -> str:
        model = value.storage if value.like is None else value.like
        return self._dtypes.get(value.storage) or self._dtypes.get(model, value.dtype)

    def _target(self, row: Row) -> str | None:
        """Return the dtype to which the rule of an op casts its inputs, None if it casts none."""
        match self._actions.get(row.number, row.action):
            case "lower" | "fp32-out":
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
        """Return the bytes of the casts in the backward of an op with inputs of these dtypes.

        These are not gradients of casts: they occur because the op computes in another dtype.
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
            if self._cast_anew[key] > 2:  # a context caches the second cast
                return
        has_gradient = self._trace.has_backward and value.requires_grad and row.phase == "forward"
        self.bytes += size * (2 if has_gradient else 1)


def is_small(weight: Value) -> bool:
    """Return whether a weight is not cached, since casting it is faster."""
    return math.prod(weight.shape) * itemsize(weight.dtype) < SMALL


# These ops are everywhere in a model, so a rule for all of them must be good for each.
_GENERIC = ("add", "sub", "mul", "div")
_MOST_RULES = 3  # a policy with more rules is hard to read

_Parts = dict[tuple[str, str], list[Row]]


class Saving(NamedTuple):
    """A change that saves bytes.

    Attributes:
        bytes: The reduction of the bytes that all casts read and write.
        text: The change, in words.
        policy: The text of the policy that makes it, None if no policy does.
    """

    bytes: int
    text: str
    policy: str | None


class Savings:
    """The changes that are predicted to save bytes in a trace, as rules added to its policy."""

    def __init__(self, flow: Dataflow, prediction: Prediction, policy: str) -> None:
        self._flow, self._prediction, self._policy = flow, prediction, policy
        self._bytes = prediction.bytes({})
        ran = [row for row in prediction.forward if row.autocast and not row.is_cast_only]
        self._by_name = grouped(ran, lambda row: row.name)
        self._rule = cache(self._predicted_rule)

    def best(self, rows: list[Row], actions: tuple[Action, ...]) -> Saving | None:
        """Return the largest saving for ops of one name, None if nothing saves bytes."""
        by_hand = self._by_hand(rows)
        if by_hand is not None:
            return by_hand if by_hand.bytes > 0 else None
        return _most(self._rule((rows[0].name,), action) for action in actions)

    def _by_hand(self, rows: list[Row]) -> Saving | None:
        """Return a change of the model, if the model itself makes ops run in float32."""
        free = [row for row in rows if row.autocast and row.action in (None, "leave", "promote")]
        values = [value for row in free for value in row.inputs if value.dtype == "float32"]
        raised = self._flow.raised
        casts = {v.storage: raised[v.storage] for v in values if v.storage in raised}
        is_mixed = any(is_lower(value.dtype) for row in rows for value in row.inputs)
        buffers = {
            value.storage: value.name
            for value in values
            if is_mixed and value.storage not in casts
            if value.name and not (value.is_weight or value.name.startswith("output of"))
        }
        if not casts and not buffers:
            return None
        lower = rows[0].autocast or ""
        saved = self._bytes - self._prediction.bytes(
            {row.number: "leave" for row in casts.values()}, dict.fromkeys(buffers, lower)
        )
        where = folded(row.module for row in casts.values())
        parts = [f".float() in {', '.join(where) or 'the model'}"] if casts else []
        parts += [f"the buffer {name} in torch.{lower}" for name in folded(buffers.values())]
        return Saving(saved, f"by hand: {' and '.join(parts)}", None)

    def with_neighbour(self, rows: list[Row]) -> Saving | None:
        """Return the best rule for an op and a float32 neighbour, if it beats either alone."""
        if self._by_hand(rows) is not None:
            return None
        own = rows[0].name
        near = [reader for row in rows for reader in self._flow.readers(row)]
        written = (self._flow.writers.get(v.storage) for row in rows for v in row.inputs)
        near += [row for row in written if row is not None]
        names = dict.fromkeys(r.name for r in near if r.compute == "float32" and r.name != own)
        alone = _most(self._rule((name,), "lower") for name in (own, *names))
        best = _most(self._rule(tuple(sorted((own, name))), "lower") for name in names)
        return best if best and (alone is None or best.bytes > alone.bytes) else None

    def _predicted_rule(self, names: tuple[str, ...], action: Action) -> Saving | None:
        """Return a rule for ops; only in some modules if it would be harmful in others."""
        rows = [row for name in names for row in self._by_name.get(name, ())]
        parts = grouped(rows, lambda row: (row.name, pattern(row.module)))
        good = {key: part for key, part in parts.items() if not any(map(self._is_harmed, part))}
        generic = [name for name in names if name in _GENERIC]
        if generic:
            good = {
                key: part
                for key, part in good.items()
                if key[0] not in generic or self._is_of_use(part, good, action)
            }
        is_everywhere = len(good) == len(parts)
        rules = [f"{','.join(names)}:{action}"] if is_everywhere else self._in_modules(good, action)
        policy = "; ".join([self._policy, *rules])
        if not 0 < len(rules) <= _MOST_RULES or not _is_policy(policy):
            return None
        every = f", which holds for every {generic[0]}" if generic and is_everywhere else ""
        return Saving(self._saved(good.values(), action), use(policy) + every, policy)

    def _is_harmed(self, row: Row) -> bool:
        """Return whether an op must stay wide, or is elementwise and its output stays wide."""
        if self._flow.is_fixed(row):
            return True
        # A hand-written norm may have a redundant .float() between two products.
        is_unsure = row.name in _GENERIC and row.name != "add" and not is_lower(row.compute)
        return is_unsure and not self._flow.is_lowered(row, all)

    def _is_of_use(self, part: list[Row], parts: _Parts, action: Action) -> bool:
        """Return whether a rule saves at least as much with a part as without it."""
        others = [rows for rows in parts.values() if rows is not part]
        return self._saved(others, action) <= self._saved(parts.values(), action)

    def _saved(self, parts: Iterable[list[Row]], action: Action) -> int:
        actions = {row.number: action for part in parts for row in part}
        return self._bytes - self._prediction.bytes(actions)

    def _in_modules(self, parts: _Parts, action: Action) -> list[str]:
        """Return rules for only these ops; none if module names cannot single them out."""
        modules = [(key[0], folded(row.module for row in part)) for key, part in parts.items()]
        if not all(all(paths) for _, paths in modules):
            return []  # the model's own forward has no module name
        rules = [Rule(name, action, module=path) for name, paths in modules for path in paths]
        named = {rule.op: self._by_name[rule.op] for rule in rules}
        held = {
            row.number for rule in rules for row in named[rule.op] if rule.holds_within(row.module)
        }
        meant = {row.number for part in parts.values() for row in part}
        return [str(rule) for rule in rules] if held == meant else []


def _is_policy(text: str) -> bool:
    try:
        Policy.parse(text)
    except ValueError:  # such as an in-place op, for which there are no rules
        return False
    return True


def _most(found: Iterable[Saving | None]) -> Saving | None:
    best = max((each for each in found if each), key=lambda each: each.bytes, default=None)
    return best if best and best.bytes > 0 else None


def use(policy: str) -> str:
    """Return the call that applies a policy, as text."""
    module = ", module=model" if "@" in policy else ""
    return f'autocast(policy="{policy}"{module})'
