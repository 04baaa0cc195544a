"""Checks of code that changes gradients during the backward pass, while they are still scaled."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from halfstep._tools.doctor.finding import Finding
from halfstep._tools.doctor.iteration import finding
from halfstep._tools.doctor.read_names import Function, arguments, dotted
from halfstep._tools.doctor.read_program import Program
from halfstep._tools.doctor.read_sites import Site

_REGISTER = re.compile(r"register_(hook|full_backward_hook|post_accumulate_grad_hook)$")
_CLAMPS = re.compile(r"(clamp(_min|_max)?|clip)_?$")
_BOUNDED = re.compile(r"(hardtanh|tanh|sign|clip_by_norm|clip_grad_\w+)_?$")
_ADDS = re.compile(r"(add|sub)_?$")
_SHAPES = ("shape", "dtype", "device", "ndim", "dim", "size", "numel", "new_zeros")
_LIMITED = "its limits are not, so after unscaling almost nothing is left"
_ADDED = "what it adds is not, so after unscaling almost nothing of that is left"


def findings(program: Program) -> Iterator[Finding]:
    """Yield hooks and backward functions that are not linear in gradients of a scaled loss."""
    scaler = next(filter(None, map(program.scaled_by, program.sites)), "")
    for line, hook, function, names in _functions(program) if scaler else ():
        why = _why(function, names)
        if why and "scale" not in ast.unparse(function):
            yield finding("hook-on-scaled", line, scaler=scaler, hook=hook, why=why)


def _functions(program: Program) -> Iterator[tuple[int, str, ast.AST, set[str]]]:
    """Yield line, text, function and names of the gradients of each hook and ``backward``."""
    for site in program.sites:
        if _REGISTER.match(site.method) and site.call.args:
            function = _hook(program, site)
            if function is not None:
                names = [arg.arg for arg in function.args.args if arg.arg != "self"]
                if site.method != "register_hook":
                    names = names[1:] or ["grad"]
                yield site.line, ast.unparse(site.call), function, set(names)
    for (name, method), function in program.meaning.names.methods.items():
        if method == "backward" and name in program.meaning.names.differentiated:
            gradients = {arg.arg for arg in (*function.args.args[1:], function.args.vararg) if arg}
            yield function.lineno, f"{name}.backward", function, gradients


def _hook(program: Program, site: Site) -> Function | ast.Lambda | None:
    """Return the function of the file, or the lambda, that a call registers."""
    given = site.call.args[0]
    for written in program.meaning.candidates(given, site.scope):
        match written:
            case (ast.Lambda() as function, _):
                return function
            case (ast.Call(func=called, args=[ast.expr() as first, *_]), _) if dotted(
                called
            ).endswith("partial"):
                given = first
    return program.meaning.names.called(ast.Call(given, [], []), site.scope)


def _why(function: ast.AST, names: set[str]) -> str:
    """Return why a function of gradients is not linear in them, empty if it may be linear."""
    statements = [node for node in ast.walk(function) if isinstance(node, ast.stmt)]
    ordered: list[ast.AST] = [*sorted(statements, key=lambda node: node.lineno)]
    for statement in ordered or [function]:
        parts = [e for e in ast.iter_child_nodes(statement) if not isinstance(e, ast.stmt)]
        own = [statement, *(node for part in parts for node in ast.walk(part))]
        for node in own:
            match node:
                case ast.For() | ast.comprehension() if _reads(node.iter, names):
                    names = names | {e.id for e in ast.walk(node.target) if isinstance(e, ast.Name)}
        why = next(filter(None, (_why_not_linear(node, names) for node in own)), "")
        if why:
            return why
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                if _reads(value, names):
                    names = names | {name}
                elif statement in getattr(function, "body", ()):  # not in an arm
                    names = names - {name}
    return ""


def _why_not_linear(node: ast.AST, names: set[str]) -> str:
    match node:
        case ast.Call(func=called):
            method = called.attr if isinstance(called, ast.Attribute) else dotted(called)
            operands = [called.value] if isinstance(called, ast.Attribute) else []
            operands += [each for each in arguments(node) if ast.unparse(each) not in ("0", "0.0")]
            read = [_reads(each, names) for each in operands]
            others = read[1:]
            if any(read) and (
                _BOUNDED.match(method) or (_CLAMPS.match(method) and not all(others))
            ):
                return _LIMITED
            return _ADDED if _ADDS.match(method) and any(read[:1]) and not any(others) else ""
        case (
            ast.BinOp(op=ast.Add() | ast.Sub(), left=left, right=right)
            | ast.AugAssign(op=ast.Add() | ast.Sub(), target=left, value=right)
        ):
            is_constant = isinstance(left, ast.Constant) or isinstance(right, ast.Constant)
            is_mixed = _reads(left, names) != _reads(right, names)
            return _ADDED if is_mixed and not is_constant else ""
        case ast.BinOp(op=ast.Div(), left=left, right=right):
            return _LIMITED if _reads(left, names) and _reads(right, names) else ""
    return ""


def _reads(node: ast.AST, names: set[str]) -> bool:
    """Return whether an expression uses the values of gradients, not only their shapes."""
    match node:
        case ast.Attribute(attr=word) | ast.Name(id=word):
            if word in _SHAPES or word in names:
                return word in names
        case ast.Call(func=called) if dotted(called).endswith("_like"):
            return False
    return any(_reads(child, names) for child in ast.iter_child_nodes(node))
