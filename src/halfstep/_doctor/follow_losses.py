"""Losses: how often a value was multiplied by a scale on a path."""

from __future__ import annotations

import ast
from collections.abc import Sequence

from halfstep._doctor.iteration import UNKNOWN
from halfstep._doctor.read_bindings import Bindings, call_key
from halfstep._doctor.read_conditions import Names
from halfstep._doctor.read_names import NameScope, dotted
from halfstep._doctor.read_program import Program

_KEEPING = ("mean", "sum", "to", "float", "squeeze", "view", "reshape", "cuda", "half", "double")
_ADDING = ("sum", "torch.stack", "torch.cat", "torch.mean", "torch.sum", "torch.add", "max", "min")


class Losses:
    """The values of a program that are losses, or made of them."""

    def __init__(self, program: Program) -> None:
        self._meaning = program.meaning

    def times_scaled(self, node: ast.expr, scope: NameScope, names: Names, keys: Bindings) -> int:
        """Return how often a value was multiplied by a scale; -1 if uncertain."""

        def of(part: ast.expr) -> int:
            return self.times_scaled(part, scope, names, keys)

        match node:
            case ast.Constant():
                return 0
            case ast.Name() | ast.Attribute():
                return self._named(node, scope, names, keys)
            case ast.Subscript(value=part) | ast.Starred(value=part) | ast.NamedExpr(value=part):
                return of(part)
            case ast.Call():
                return self._returned(node, scope, names, keys)
            case ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right):
                return _added([of(left), of(right)])
            case ast.BinOp(left=left, right=right):
                if "scale" in ast.unparse(node).lower().replace("scaler.scale(", ""):
                    return UNKNOWN
                factors = [of(e) for e in (left, right) if not isinstance(e, ast.Constant)]
                # A known loss times anything is not scaled; an unknown one may be.
                return _added([0] if 0 in factors and max(factors) <= 0 else factors)
            case ast.List(elts=parts) | ast.Tuple(elts=parts):
                return _added([of(part) for part in parts])
            case ast.IfExp(body=body, orelse=orelse):
                either = {of(body), of(orelse)}
                return either.pop() if len(either) == 1 else UNKNOWN
        inner = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
        return UNKNOWN if any(of(child) > 0 for child in inner) else 0

    def _named(
        self, node: ast.Name | ast.Attribute, scope: NameScope, names: Names, keys: Bindings
    ) -> int:
        key = keys.key(node, scope, names)
        found = names.get(key)
        if isinstance(found, int):
            return found
        if "[*]" in key:
            return UNKNOWN
        if isinstance(node, ast.Attribute):
            is_of_other = isinstance(node.value, ast.Name) and node.value.id != "self"
            return self.times_scaled(node.value, scope, names, keys) if is_of_other else UNKNOWN
        is_local = node.id in scope.bindings and node.id not in scope.parameters
        return 0 if is_local else UNKNOWN

    def _returned(self, call: ast.Call, scope: NameScope, names: Names, keys: Bindings) -> int:
        """Return the same for the result of a call."""
        found = names.get(call_key(call))
        if isinstance(found, int):
            return found
        arguments = [*call.args, *(keyword.value for keyword in call.keywords)]
        values = [self.times_scaled(each, scope, names, keys) for each in arguments]
        if isinstance(call.func, ast.Attribute):
            owner, method = call.func.value, call.func.attr
            key = keys.key(owner, scope, names)
            if method == "scale" and self.is_scaler(owner, scope, key):
                return max([0, *values]) + 1 if self.is_on(owner, scope) else max([0, *values])
            if method in _KEEPING and not dotted(call.func).startswith("torch."):
                return self.times_scaled(owner, scope, names, keys)
        name = dotted(call.func)
        if name in _ADDING:
            return _added(values)
        is_opaque = "scale" in name.lower() or any("scale" in dotted(e).lower() for e in arguments)
        return UNKNOWN if is_opaque or any(value > 0 for value in values) else 0

    def is_scaler(self, node: ast.expr, scope: NameScope, key: str) -> bool:
        """Return whether an expression is a scaler."""
        return key.lower().endswith("scaler") or self._meaning.is_scaler(node, scope)

    def is_on(self, node: ast.expr, scope: NameScope) -> bool:
        """Return whether a scaler may be on."""
        scaler = self._meaning.scaler(node, scope)
        return scaler is None or scaler.enabled is not False


def _added(values: Sequence[int]) -> int:
    """Return how often a sum was scaled, of how often its parts were."""
    most = max([0, *values])
    return most if most or UNKNOWN not in values else UNKNOWN
