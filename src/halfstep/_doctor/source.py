"""Checks of Python source, which is read and never run."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from halfstep._doctor import about_iterations, about_models, about_regions
from halfstep._doctor.finding import Finding
from halfstep._doctor.read_names import Function
from halfstep._doctor.read_program import Program

_RULES = (about_iterations, about_regions, about_models)
_NEEDED = {"autocast", "backward", "half", "bfloat16", "float16", "step"}
"""A file without any of these words is not checked."""
_ALLOWED = re.compile(r"#\s*halfstep:\s*allow\b([\w\s,-]*)")


def check_file(path: Path) -> list[Finding]:
    """Check a Python file.

    Raises:
        OSError: It cannot be read.
        SyntaxError: It is not Python; the error has the line.
    """
    source = path.read_bytes()
    return _check(ast.parse(source, str(path)), source.decode("utf-8", "replace"), str(path))


def check_source(source: str, name: str = "<source>") -> list[Finding]:
    """Check Python source; ``name`` is its name in the findings.

    Raises:
        SyntaxError: It is not Python.
    """
    return _check(ast.parse(source, name), source, name)


def check_function(function: Callable[..., Any]) -> list[Finding]:
    """Check a function and the functions of its file that it calls, with the values of its names.

    Raises:
        OSError: There is no source.
    """
    plain = plain_function(function)
    lines, _ = inspect.findsource(plain.__code__)
    source, name = "".join(lines), inspect.getsourcefile(plain) or "<source>"
    tree = ast.parse(source, name)
    node = _definition(tree, plain.__name__, plain.__code__.co_firstlineno)
    if node is None:
        raise OSError(f"{name}: no definition of {plain.__name__} found")
    return _check(tree, source, name, known_to(function), node)


def known_to(function: Callable[..., Any]) -> dict[str, object]:
    """Return the values of the names that a function uses: globals, closure, ``self``."""
    bound = function
    given: dict[str, object] = {}
    while isinstance(bound, partial):
        given, bound = {**bound.keywords, **given}, bound.func
    plain = plain_function(function)
    names = inspect.getclosurevars(plain)
    owner = getattr(bound, "__self__", None)
    self_name = {} if owner is None else {"self": owner}
    return {**names.globals, **names.nonlocals, **self_name, **given}


def may_scale(function: Callable[..., Any]) -> bool:
    """Return whether a function uses names that are typical for a scaler."""
    code = plain_function(function).__code__
    return any(
        about_regions.SCALES.search(name)
        for name in (*code.co_names, *code.co_varnames, *code.co_freevars)
    )


def plain_function(function: Callable[..., Any]) -> Any:
    """Return the plain function behind a method, a partial or a wrapper.

    Raises:
        OSError: There is none with source.
    """
    while isinstance(function, partial):
        function = function.func
    found = inspect.unwrap(function)
    found = getattr(found, "__func__", found)
    if not inspect.isfunction(found):
        raise OSError(f"{function!r} is not a function written in Python")
    return found


def _definition(tree: ast.Module, name: str, line: int) -> Function | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == line:
                return node
    return None


def _check(
    tree: ast.Module,
    source: str,
    file: str,
    known: Mapping[str, object] | None = None,
    function: Function | None = None,
) -> list[Finding]:
    program = Program(tree, known or {}, function)
    if _NEEDED.isdisjoint(program.words):
        return []
    found = (finding for rule in _RULES for finding in rule.findings(program))
    lines = source.splitlines()
    kept = (replace(each, file=file) for each in found if not _is_allowed(each, lines))
    return list(dict.fromkeys(kept))


def _is_allowed(finding: Finding, lines: list[str]) -> bool:
    """Return whether the line has a comment ``# halfstep: allow``, with this id or none."""
    line = "".join(lines[finding.line - 1 : finding.line])
    allowed = _ALLOWED.search(line)
    if allowed is None:
        return False
    ids = re.findall(r"[\w-]+", allowed[1])
    return not ids or finding.id in ids
