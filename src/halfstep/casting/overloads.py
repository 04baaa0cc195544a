"""The names of ops: which overloads a rule means, and whether an op exists.

``"softmax.int"`` is an overload, ``"softmax"`` the op it belongs to.
"""

import difflib
from functools import cache

import torch

from halfstep import _torch
from halfstep.casting.policy import Policy
from halfstep.casting.presets import PRESETS, preset


def overload(name: str) -> torch._ops.OpOverload:
    """Return the overload itself, ``torch.ops.aten.softmax.int`` for ``"softmax.int"``."""
    op, _, of_op = name.partition(".")
    found = getattr(getattr(torch.ops.aten, op), of_op)
    assert isinstance(found, torch._ops.OpOverload)
    return found


def named_by(policy: Policy) -> frozenset[str]:
    """Return the overloads that the rules of ``policy`` mean."""
    return frozenset().union(*map(_meant_by, {rule.op for rule in policy.rules}))


def check(policy: Policy) -> None:
    """Raise ``ValueError`` if a rule cannot be carried out.

    An op of a preset may be missing: some are in some versions and builds of PyTorch only.
    """
    ours = {rule for name in PRESETS for rule in preset(name).rules}
    for rule in policy.rules:
        if rule in ours:
            continue
        if not _exists(rule.op):
            raise ValueError(f"{policy!r}: {rule!r} names no ATen op{_near(rule.op)}")
        meant = _meant_by(rule.op)
        if not meant:
            raise ValueError(
                f"{policy!r}: {rule!r} names an op that writes to its arguments; a rule casts the "
                "inputs of ops that return a new value"
            )
        if rule.action == "fp32-dtype" and not all(map(_takes_dtype, meant)):
            raise ValueError(
                f"{policy!r}: {rule!r} needs an op with an optional dtype argument, such as "
                "softmax or sum; use the action 'fp32'"
            )


# Overloads without a dtype argument, and the overload of the same op that has one.
WITH_DTYPE = {
    "norm.Scalar": "norm.ScalarOpt_dtype",
    "norm.ScalarOpt_dim": "norm.ScalarOpt_dim_dtype",
    "norm.names_ScalarOpt_dim": "norm.names_ScalarOpt_dim_dtype",
}


def _takes_dtype(name: str) -> bool:
    """Say whether an overload, or the one it stands for, can be asked for a dtype."""
    arguments = overload(WITH_DTYPE.get(name, name))._schema.arguments
    return any(argument.name == "dtype" for argument in arguments)


@cache
def _meant_by(rule_op: str) -> frozenset[str]:
    op, _, of_op = rule_op.partition(".")
    if of_op:
        return frozenset({rule_op} if _exists(rule_op) and not _writes(rule_op) else ())
    names = (f"{op}.{of_op}" for of_op in _torch.aten_overloads().get(op, ()))
    return frozenset(n for n in names if not _writes(n) and not _must_name_dtype(n))


def _exists(rule_op: str) -> bool:
    op, _, of_op = rule_op.partition(".")
    known = _torch.aten_overloads().get(op, [])
    return of_op in known if of_op else bool(known)


def _writes(name: str) -> bool:
    """Into ``out=``, or in place."""
    arguments = overload(name)._schema.arguments
    return any(arg.alias_info is not None and arg.alias_info.is_write for arg in arguments)


def _must_name_dtype(name: str) -> bool:
    """The caller has decided: ``norm(x, 2, dtype=...)`` is an overload of its own."""
    arguments = overload(name)._schema.arguments
    return any(
        arg.name in ("dtype", "out_dtype") and not arg.has_default_value() for arg in arguments
    )


def _near(rule_op: str) -> str:
    op = rule_op.partition(".")[0]
    known = _torch.aten_overloads()
    names = [f"{op}.{of_op}" for of_op in known[op]] if op in known else list(known)
    near = difflib.get_close_matches(rule_op, names, n=3)
    return f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
