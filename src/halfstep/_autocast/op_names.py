"""The names of ops: which overloads a rule means, and whether there is such an op.

``"softmax.int"`` is an overload of the ATen op ``"softmax"``; ``"mylib::attention.default"`` of a
custom one.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch

from halfstep._autocast.rule import Rule, did_you_mean, is_in_place
from halfstep._autocast.written import PRESETS, rules_of
from halfstep._pytorch import dispatch


def meant_by(rules: Iterable[Rule]) -> frozenset[str]:
    """Return the overloads that rules are about."""
    return frozenset(op for rule in rules for op in _meant_by(rule.op) if rule.names(op))


def check(rules: Iterable[Rule]) -> None:
    """Raise ``ValueError`` if a rule cannot be carried out.

    An op of a preset may be missing: some are in some versions and builds of PyTorch only.
    """
    ours = _preset_rules()
    checked: set[tuple[str, str]] = set()  # of a million rules, most name the same few ops
    for rule in rules:
        if (rule.op, rule.action) in checked or rule.is_for_whole_module or rule in ours:
            continue
        _check(rule)
        checked.add((rule.op, rule.action))


def _check(rule: Rule) -> None:
    meant = meant_by([rule])
    if rule.is_glob and not meant:
        near = did_you_mean(rule.op.replace("*", ""), _table())
        raise ValueError(f"rule {str(rule)!r}: no op that a preset names is like {rule.op!r}{near}")
    if not _exists(rule.op) and not rule.is_glob:
        raise ValueError(f"rule {str(rule)!r}: there is no op {rule.op!r}{_near(rule.op)}")
    if not meant:
        raise ValueError(
            f"rule {str(rule)!r}: 'destination' is the action for ops in place, such as "
            "'index_put_', and the only one that casts for them; out= has no rules"
        )
    if rule.action == "fp32-dtype" and not all(map(_takes_dtype, meant)):
        raise ValueError(
            f"rule {str(rule)!r} needs an op with an optional dtype argument, such as softmax or "
            "sum; use the action 'fp32'"
        )


# Overloads without a dtype argument, and the overload of the same op that has one.
WITH_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}


def _takes_dtype(name: str) -> bool:
    """Return whether an overload, or the one it stands for, can be asked for a dtype."""
    return any(arg.name == "dtype" for arg in _arguments(WITH_DTYPE.get(name, name)))


def _meant_by(rule_op: str) -> frozenset[str]:
    # Not kept for other libraries than ATen: they may be loaded later.
    return _custom(rule_op) if "::" in rule_op else _of_aten(rule_op)


@cache
def _of_aten(rule_op: str) -> frozenset[str]:
    if "*" in rule_op or "?" in rule_op:
        glob = Rule(rule_op, "leave")
        return frozenset(name for op in _table() for name in _of_aten(op) if glob.names(name))
    op, _, of_op = rule_op.partition(".")
    if of_op:
        return frozenset({rule_op} if _exists(rule_op) and not _writes_out(rule_op) else ())
    names = (f"{op}.{of_op}" for of_op in dispatch.aten_overloads().get(op, ()))
    return frozenset(n for n in names if not _writes_out(n) and not _must_name_dtype(n))


def _custom(rule_op: str) -> frozenset[str]:
    glob = Rule(rule_op, "leave")
    names = _overloads_beside(rule_op)
    return frozenset(name for name in names if glob.names(name) and not _writes_out(name))


def _overloads_beside(rule_op: str) -> list[str]:
    """Return all overloads in the library of a custom op."""
    return dispatch.overloads_of_namespace(rule_op.rpartition("::")[0])


def _exists(rule_op: str) -> bool:
    if "::" in rule_op:
        return any(map(Rule(rule_op, "leave").names, _overloads_beside(rule_op)))
    op, _, of_op = rule_op.partition(".")
    known = dispatch.aten_overloads().get(op, [])
    return of_op in known if of_op else bool(known)


@cache
def _preset_rules() -> frozenset[Rule]:
    return frozenset(rule for name in PRESETS for rule in rules_of(name))


@cache
def _table() -> frozenset[str]:
    """Return the ops, or overloads, that a preset names: those that a glob ranges over."""
    return frozenset(rule.op for rule in _preset_rules() if not rule.is_glob)


def _writes_out(name: str) -> bool:
    """Return whether it writes to something else than its first argument, and in place."""
    written = [arg.alias_info is not None and arg.alias_info.is_write for arg in _arguments(name)]
    return any(written[1:]) or (any(written) and not is_in_place(name.rpartition(".")[0]))


def _arguments(name: str) -> list[torch.Argument]:
    return dispatch.schema_of(dispatch.overload(name)).arguments


def _must_name_dtype(name: str) -> bool:
    """The caller has decided: ``norm(x, 2, dtype=...)`` is an overload of its own."""
    return any(
        arg.name in ("dtype", "out_dtype") and not arg.has_default_value()
        for arg in _arguments(name)
    )


def _near(rule_op: str) -> str:
    if "::" in rule_op:
        custom = _overloads_beside(rule_op)
        near = did_you_mean(rule_op, [name.rpartition(".")[0] for name in custom])
        return near if custom else "; import the library that defines it first"
    op = rule_op.partition(".")[0]
    known = dispatch.aten_overloads()
    return did_you_mean(rule_op, [f"{op}.{o}" for o in known[op]] if op in known else known)
