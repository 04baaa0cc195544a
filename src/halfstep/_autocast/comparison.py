"""Differences between policies, and explanations of one policy, as printable values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple, TypeVar

from halfstep._autocast.rule import (
    DTYPE_NAMES,
    HALVES,
    PHASES,
    Action,
    Phase,
    Rule,
    Rules,
    holds_within,
)
from halfstep._common.module_names import around

_HALVES = {name: dtype for name, dtype in DTYPE_NAMES.items() if dtype in HALVES}
_Rule = TypeVar("_Rule", Rule, Rule | None)


class Case(NamedTuple):
    """A combination of conditions under which an op may run."""

    device: str
    dtype: str
    """The lower precision, ``"fp16"`` or ``"bf16"``."""
    phase: Phase


def _cases(devices: Sequence[str]) -> list[Case]:
    return [Case(*each) for each in product(devices, _HALVES, PHASES)]


@dataclass(frozen=True)
class Difference:
    """One op that two policies treat differently.

    Attributes:
        op: The op; a single overload if the overloads of the op differ in different ways.
        before: The action of the first policy.
        after: The action of the second policy.
        cases: The cases in which they differ.
    """

    op: str
    before: Action
    after: Action
    cases: tuple[Case, ...]


@dataclass(frozen=True)
class PolicyDiff:
    """The result of :meth:`halfstep.Policy.diff`; its ``str()`` is a table.

    Attributes:
        differences: Differences by op, outside of modules that have rules.
        devices: The compared device types.
        only_before: Rules for modules that only the first policy has.
        only_after: Rules for modules that only the second policy has.
    """

    differences: tuple[Difference, ...]
    devices: tuple[str, ...]
    only_before: tuple[Rule, ...]
    only_after: tuple[Rule, ...]

    def __bool__(self) -> bool:
        return bool(self.differences or self.only_before or self.only_after)

    def __str__(self) -> str:
        width = max((len(difference.op) for difference in self.differences), default=0)
        lines = [
            f"{each.op:{width}}  {each.before:>10} -> {each.after:10}"
            f"  {_where(each.cases, self.devices)}".rstrip()
            for each in self.differences
        ]
        lines += [f"- {rule}" for rule in self.only_before]
        return "\n".join([*lines, *(f"+ {rule}" for rule in self.only_after)])


def _where(cases: Sequence[Case], devices: Sequence[str]) -> str:
    """Describe some cases briefly; empty if they are all cases."""
    if set(cases) == set(_cases(devices)):
        return ""
    known: tuple[Sequence[str], ...] = (devices, tuple(_HALVES), PHASES)
    seen = [dict.fromkeys(values) for values in zip(*cases, strict=True)]
    return ", ".join("/".join(s) for s, k in zip(seen, known, strict=True) if len(s) < len(k))


def _by_rule(rules: Iterable[tuple[Case, _Rule]]) -> dict[_Rule, list[Case]]:
    by_rule: dict[_Rule, list[Case]] = {}
    for case, rule in rules:
        by_rule.setdefault(rule, []).append(case)
    return by_rule


def diff(before: Rules, after: Rules, ops: frozenset[str], devices: Sequence[str]) -> PolicyDiff:
    """Compare the actions of two policies for some overloads on some device types."""
    found: dict[tuple[str, Action, Action], list[Case]] = {}
    for op, case in product(sorted(ops), _cases(devices)):
        where = (case.device, _HALVES[case.dtype], case.phase)
        one, other = before.action(op, *where), after.action(op, *where)
        if one != other:
            found.setdefault((op, one, other), []).append(case)
    differences = [Difference(*key, tuple(cases)) for key, cases in found.items()]
    return PolicyDiff(
        tuple(_merged(differences, ops)),
        tuple(devices),
        tuple(rule for rule in before.module_rules if rule not in after.module_rules),
        tuple(rule for rule in after.module_rules if rule not in before.module_rules),
    )


def _merged(differences: Sequence[Difference], ops: frozenset[str]) -> Iterator[Difference]:
    """Replace overloads by their op if all of them differ in the same way."""
    num_overloads = Counter(op.rpartition(".")[0] for op in ops)
    of_op = [replace(difference, op=difference.op.rpartition(".")[0]) for difference in differences]
    num_alike = Counter(of_op)
    seen = set()
    for each, merged in zip(differences, of_op, strict=True):
        if num_alike[merged] < num_overloads[merged.op]:
            yield each
        elif merged not in seen:
            seen.add(merged)
            yield merged


@dataclass(frozen=True)
class Decision:
    """The decision of a policy for overloads of an op that are all treated alike.

    Attributes:
        overloads: Their names.
        rules: The deciding rule in each case, None if no rule applies.
        overruled: Rules that name them but never decide, last one first.
    """

    overloads: tuple[str, ...]
    rules: tuple[tuple[Case, Rule | None], ...]
    overruled: tuple[Rule, ...]

    def __str__(self) -> str:
        devices = list(dict.fromkeys(case.device for case, _ in self.rules))
        lines = [", ".join(self.overloads)]
        for rule, cases in _by_rule(self.rules).items():
            what = "leave: no rule is about it" if rule is None else f"{rule.action}: by {rule}"
            where = _where(cases, devices)
            lines.append(f"  {where + ': ' if where else ''}{what}")
        return "\n".join([*lines, *(f"  overruled: {rule}" for rule in self.overruled)])


@dataclass(frozen=True)
class Explanation:
    """The result of :meth:`halfstep.Policy.explain`; its ``str()`` is text.

    Attributes:
        decisions: Decisions for all overloads that the name includes.
        islands: The rules that make the module, or one around it, an island. There autocast is off,
            and no other rule applies.
    """

    decisions: tuple[Decision, ...]
    islands: tuple[tuple[Case, Rule], ...]

    def __str__(self) -> str:
        devices = list(dict.fromkeys(case.device for d in self.decisions for case, _ in d.rules))
        islands = (
            f"on an island in float32: by {rule}  {_where(cases, devices)}".rstrip()
            for rule, cases in _by_rule(self.islands).items()
        )
        return "\n".join([*islands, *map(str, self.decisions)])


def explain(
    policy: Rules, overloads: Iterable[str], devices: Sequence[str], module: str
) -> Explanation:
    """Find the rules that decide in a module for the overloads of an op."""
    alike: dict[tuple[object, ...], list[str]] = {}
    for overload in sorted(overloads):
        rules = tuple(
            (case, policy.rule(overload, case.device, _HALVES[case.dtype], case.phase, module))
            for case in _cases(devices)
        )
        deciding = {rule for _, rule in rules}
        named = (rule for rule in reversed(policy.rules) if rule.names(overload))
        about = [rule for rule in named if holds_within(rule, module)]
        overruled = tuple(rule for rule in about if rule not in deciding)
        alike.setdefault((rules, overruled), []).append(overload)
    decisions = tuple(Decision(tuple(o), *key) for key, o in alike.items())  # type: ignore[arg-type]
    return Explanation(decisions, tuple(_islands_around(policy, devices, module)))


def _islands_around(
    policy: Rules, devices: Sequence[str], module: str
) -> Iterator[tuple[Case, Rule]]:
    for case in _cases(devices):
        where = (case.device, _HALVES[case.dtype], case.phase)
        rules = (policy.island(name, *where) for name in around(module))
        if (rule := next(filter(None, rules), None)) is not None:
            yield case, rule
