"""Checks of source, without running it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from halfstep._common.numbers import listed, things
from halfstep._tools.doctor import about_iterations, about_precision
from halfstep._tools.doctor.finding import Finding
from halfstep._tools.doctor.read_program import Program

_NEEDED = {"autocast", "backward", "half", "bfloat16", "float16", "fp16", "step"}
"""The words of which a checked file contains at least one."""
_ALLOWED = re.compile(r"#\s*halfstep:\s*allow\b([\w\s,-]*)")


def check_file(path: Path) -> list[Finding]:
    """Check a Python file; a SyntaxError has the line that is not valid."""
    return check_source(path.read_bytes(), str(path))


def check_source(source: str | bytes, name: str = "<source>") -> list[Finding]:
    """Check Python source; ``name`` is its name in the findings."""
    text = source if isinstance(source, str) else source.decode("utf-8", "replace")
    program = Program(ast.parse(source, name))
    if _NEEDED.isdisjoint(program.words):
        return []
    found = (*about_iterations.findings(program), *about_precision.findings(program))
    lines = text.splitlines()
    kept = (replace(each, file=name) for each in found if not _is_allowed(each, lines))
    return list(dict.fromkeys(kept))


def recognized(paths: Sequence[Path]) -> str:
    """Return what a check of files recognizes, as text: ``2 autocasts and 1 scaler``, or empty."""
    num = Counter[str]()
    for program in (Program(ast.parse(path.read_bytes())) for path in paths):
        sites, makes_optimizer = [*program.sites], program.meaning.makes_optimizer
        num["autocast"] += len({each.node for s in sites for each in s.inside if each.autocast})
        num["scaler"] += len(program.scalers)
        num["optimizer"] += len({s.call for s in sites if makes_optimizer(s.call, s.scope)})
        num["trainer"] += len({built.site.call for built in program.trainers})
        num["backward call"] += len({s.call for s in sites if program.is_backward(s)})
    return listed([things(number, name) for name, number in num.items() if number])


def _is_allowed(finding: Finding, lines: list[str]) -> bool:
    """Return whether the line has a comment ``# halfstep: allow``, with this id or without ids."""
    line = "".join(lines[finding.line - 1 : finding.line])
    allowed = _ALLOWED.search(line)
    if allowed is None:
        return False
    ids = re.findall(r"[\w-]+", allowed[1])
    return not ids or finding.id in ids
