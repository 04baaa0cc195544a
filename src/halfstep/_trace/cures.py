"""What would save casts: rules, in some modules or everywhere, or a line of code."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from halfstep._autocast.policy import Policy
from halfstep._autocast.rule import Action, Rule
from halfstep._trace.dataflow import Dataflow
from halfstep._trace.prediction import Prediction
from halfstep._trace.rows import Row, folded, grouped, is_lower, pattern

# A model has them everywhere: a rule for all of them is to be good for each.
_GENERIC = ("add", "sub", "mul", "div")
_MOST_RULES = 3  # more than one would want to read

_Parts = dict[tuple[str, str], list[Row]]


class Cure(NamedTuple):
    """What to do, and the bytes that it saves.

    Attributes:
        bytes: What all casts read and write without it, less what they do with it.
        text: What to do.
        policy: The text of the policy that does it, None where none does.
    """

    bytes: int
    text: str
    policy: str | None


class Cures:
    """The cures that are predicted to save bytes in a trace.

    Args:
        flow: Its dataflow.
        prediction: What casts it would have had.
        policy: The text of the policy it ran under: cures are that and more rules.
    """

    def __init__(self, flow: Dataflow, prediction: Prediction, policy: str) -> None:
        self._flow, self._prediction, self._policy = flow, prediction, policy
        self._bytes = prediction.bytes({})
        ran = [row for row in prediction.forward if row.autocast and not row.is_cast_only]
        self._by_name = grouped(ran, lambda row: row.name)
        self._rule = cache(self._predicted_rule)

    def best(self, rows: list[Row], actions: tuple[Action, ...]) -> Cure | None:
        """Return what saves most for ops of one name; None if nothing saves anything."""
        by_hand = self._by_hand(rows)
        if by_hand is not None:
            return by_hand if by_hand.bytes > 0 else None
        return _most(self._rule((rows[0].name,), action) for action in actions)

    def _by_hand(self, rows: list[Row]) -> Cure | None:
        """Return what to change in the model, if it asks for the float32 in which ops run."""
        free = [row for row in rows if row.autocast and row.action in (None, "leave", "promote")]
        values = [value for row in free for value in row.inputs if value.dtype == "float32"]
        raised = self._flow.raised
        casts = {v.storage: raised[v.storage] for v in values if v.storage in raised}
        is_mixed = any(is_lower(value.dtype) for row in rows for value in row.inputs)
        buffers = {
            value.storage: value.name
            for value in values
            if is_mixed and value.storage not in casts and _is_buffer(value.name, value.is_weight)
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
        return Cure(saved, f"by hand: {' and '.join(parts)}", None)

    def with_neighbour(self, rows: list[Row]) -> Cure | None:
        """Return what saves most for an op and one in float32 that it reads from or writes to."""
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

    def _predicted_rule(self, names: tuple[str, ...], action: Action) -> Cure | None:
        """Return a rule for ops; for those in some modules only, where it would harm in others."""
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
        return Cure(self._saved(good.values(), action), use(policy) + every, policy)

    def _is_harmed(self, row: Row) -> bool:
        """Say whether an op is not to be lowered, or an elementwise one that nothing lowers."""
        if self._flow.is_fixed(row):
            return True
        # Between two products may stand a .float() that did nothing, as in norms by hand.
        is_unsure = row.name in _GENERIC and row.name != "add" and not is_lower(row.compute)
        return is_unsure and not self._flow.is_lowered(row, all)

    def _is_of_use(self, part: list[Row], parts: _Parts, action: Action) -> bool:
        """Say whether a rule saves no less with a part than without it."""
        others = [rows for rows in parts.values() if rows is not part]
        return self._saved(others, action) <= self._saved(parts.values(), action)

    def _saved(self, parts: Iterable[list[Row]], action: Action) -> int:
        actions = {row.number: action for part in parts for row in part}
        return self._bytes - self._prediction.bytes(actions)

    def _in_modules(self, parts: _Parts, action: Action) -> list[str]:
        """Return rules for these ops alone; none where no module tells them from others."""
        modules = [(key[0], folded(row.module for row in part)) for key, part in parts.items()]
        if not all(all(paths) for _, paths in modules):
            return []  # the model's own forward has no name
        rules = [Rule(name, action, module=path) for name, paths in modules for path in paths]
        named = {rule.op: self._by_name[rule.op] for rule in rules}
        held = {
            row.number for rule in rules for row in named[rule.op] if rule.holds_within(row.module)
        }
        meant = {row.number for part in parts.values() for row in part}
        return [str(rule) for rule in rules] if held == meant else []


def _is_buffer(name: str, is_weight: bool) -> bool:
    return bool(name) and not is_weight and not name.startswith("output of")


def _is_policy(text: str) -> bool:
    try:
        Policy.parse(text)
    except ValueError:  # an op in place, say, that no such rule is about
        return False
    return True


def _most(found: Iterable[Cure | None]) -> Cure | None:
    best = max((each for each in found if each), key=lambda each: each.bytes, default=None)
    return best if best and best.bytes > 0 else None


def use(policy: str) -> str:
    """Return the call that takes a policy."""
    module = ", module=model" if "@" in policy else ""
    return f'autocast(policy="{policy}"{module})'
