"""``halfstep.doctor``: a check of objects before training, and of source without running it."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep._common.numbers import listed, things
from halfstep._pytorch.devices import card_of
from halfstep._scaler import GradScaler
from halfstep._tools.doctor import (
    about_hooks,
    about_iterations,
    about_precision,
    hardware,
    objects,
)
from halfstep._tools.doctor.finding import Checkup, Finding
from halfstep._tools.doctor.hardware import MachineReport
from halfstep._tools.doctor.objects import Training
from halfstep._tools.doctor.read_program import Program

_SCALERS = (GradScaler, torch.amp.GradScaler)
_WANTED = {
    "model": "torch.nn.Module",
    "optimizer": "torch.optim.Optimizer, or a list of them",
    "scaler": "halfstep.GradScaler or torch.amp.GradScaler",
    "dtype": "torch.dtype, such as torch.float16",
}


def doctor(
    model: nn.Module | None = None,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    scaler: Any = None,
    dtype: torch.dtype | None = None,
) -> Checkup:
    """Check objects for mixed-precision mistakes before training starts.

    All arguments are optional, and only the given ones are checked. Nothing is run or changed.

    Args:
        model: The module that is trained.
        optimizer: One optimizer, or all of them in a sequence.
        scaler: A ``GradScaler``, halfstep's or PyTorch's.
        dtype: The lower precision of autocast, ``torch.float16`` or ``torch.bfloat16``.

    Returns:
        The findings, worst first, in a sequence whose ``str()`` is the text; it has ``worst``
        and ``to_json()``. ``docs/doctor.md`` has a section on each id.

    Raises:
        TypeError: An argument has the wrong type.

    Sync: none.

    Example:
        >>> model = torch.nn.Linear(4, 1).half()
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> found = doctor(model, optimizer, dtype=torch.float16)
        >>> [finding.id for finding in found]
        ['fp16-without-scaler', 'half-parameters']
        >>> found.worst, found[1].names
        ('bad', ('weight', 'bias'))
        >>> print(found[0].cure)
        scale the loss; or use bfloat16, which needs no scaler, where it is fast
    """
    given = Training(
        _checked("model", model, nn.Module),
        tuple(_each_optimizer(optimizer)),
        _checked("scaler", scaler, *_SCALERS),
        _checked("dtype", dtype, torch.dtype),
    )
    found = [*objects.findings(given)]
    device = next((param.device for param in given.held), None)
    if device is not None:
        card = card_of(device) if device.type == "cuda" else None
        found += hardware.findings(device.type, given.dtype, card)
    return Checkup(found)


def _checked(name: str, value: Any, *kinds: type) -> Any:
    if value is not None and not isinstance(value, kinds):
        is_file = isinstance(value, str | Path) and name == "model"
        cure = f"for a file: halfstep doctor {value}" if is_file else f"pass a {_WANTED[name]}"
        raise TypeError(f"doctor({name}={type(value).__name__}): {cure}")
    return value


def _each_optimizer(value: Any) -> Iterator[Optimizer]:
    if value is None:
        return
    for each in value if isinstance(value, list | tuple) else (value,):
        yield _checked("optimizer", each, Optimizer)


# --- source ---------------------------------------------------------------------------------------

_NEEDED = {"autocast", "backward", "half", "bfloat16", "float16", "fp16", "step"}
"""The words of which a checked file contains at least one."""
_ALLOWED = re.compile(r"#\s*halfstep:\s*allow\b([\w\s,-]*)")


def check_file(path: Path, machine: MachineReport | None = None) -> list[Finding]:
    """Check a Python file; with a measured machine also whether that is fast at its dtypes.

    Raises:
        OSError: The file cannot be read.
        SyntaxError: The file is not valid Python; the error has the line.
    """
    return check_source(path.read_bytes(), str(path), machine)


def check_source(
    source: str | bytes, name: str = "<source>", machine: MachineReport | None = None
) -> list[Finding]:
    """Check Python source; ``name`` is its name in the findings.

    Raises:
        SyntaxError: The source is not valid Python.
    """
    text = source if isinstance(source, str) else source.decode("utf-8", "replace")
    program = Program(ast.parse(source, name))
    if _NEEDED.isdisjoint(program.words):
        return []
    found = (
        *about_iterations.findings(program),
        *about_precision.findings(program),
        *about_hooks.findings(program),
        *(hardware.slower(about_precision.lowered(program), machine) if machine else ()),
    )
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
