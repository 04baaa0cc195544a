"""``halfstep.doctor``: a check of objects before training, and of source without running it."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from halfstep._pytorch.devices import card_of
from halfstep._scaler import GradScaler
from halfstep._tools.doctor import (
    about_hooks,
    about_iterations,
    about_precision,
    hardware,
    objects,
)
from halfstep._tools.doctor.finding import Checkup, Finding, finding
from halfstep._tools.doctor.hardware import MachineReport
from halfstep._tools.doctor.objects import Training
from halfstep._tools.doctor.read_names import Function
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
    scheduler: Any = None,
    step_fn: Callable[..., Any] | None = None,
    dtype: torch.dtype | None = None,
) -> Checkup:
    """Check objects for mixed-precision mistakes before training starts.

    All arguments are optional, and only the given ones are checked. Nothing is run or changed.

    Args:
        model: The module that is trained.
        optimizer: One optimizer, or all of them in a sequence.
        scaler: A ``GradScaler``, halfstep's or PyTorch's.
        scheduler: A learning rate schedule, or several in a sequence.
        step_fn: The function that runs a step, or the whole loop. Its source is read. If the
            model, optimizers, scaler or schedules are not given, those that it uses by name are
            checked.
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
        tuple(_several("optimizer", optimizer, Optimizer)),
        _checked("scaler", scaler, *_SCALERS),
        tuple(_several("scheduler", scheduler)),
        _checked("dtype", dtype, torch.dtype),
    )
    read: list[Finding] = []
    if step_fn is not None:
        if not callable(step_fn):
            raise TypeError(f"doctor(step_fn={step_fn!r}): pass the function that does a step")
        given, read = _with_function(given, step_fn)
    found = [*objects.findings(given), *read]
    device = next((param.device for param in given.held), None)
    if device is not None:
        card = card_of(device) if device.type == "cuda" else None
        found += hardware.findings(device.type, given.dtype, card)
    return Checkup(found)


def _with_function(given: Training, step_fn: Callable[..., Any]) -> tuple[Training, list[Finding]]:
    """Read a function, and add the objects that it uses by name to the training."""
    try:
        function, names = _unpacked(step_fn)
        read = _check_function(function, names)
    except (OSError, SyntaxError, TypeError) as error:
        return given, [finding("source-not-read", function=repr(step_fn), error=error)]
    known, code = list(names.values()), function.__code__
    models, scalers = _of(known, nn.Module), _of(known, *_SCALERS)
    words = (*code.co_names, *code.co_varnames, *code.co_freevars)
    return (
        replace(
            given,
            model=models[0] if given.model is None and len(models) == 1 else given.model,
            optimizers=given.optimizers or _of(known, Optimizer),
            scaler=scalers[0] if given.scaler is None and len(scalers) == 1 else given.scaler,
            schedulers=given.schedulers or _of(known, torch.optim.lr_scheduler.LRScheduler),
            makes_scaler=any(map(about_precision.SCALES.search, words)),
        ),
        read,
    )


def _of(objects: Iterable[object], *kinds: type) -> tuple[Any, ...]:
    return tuple({id(each): each for each in objects if isinstance(each, kinds)}.values())


def _checked(name: str, value: Any, *kinds: type) -> Any:
    if value is not None and not isinstance(value, kinds):
        is_file = isinstance(value, str | Path) and name == "model"
        cure = f"for a file: halfstep doctor {value}" if is_file else f"pass a {_WANTED[name]}"
        raise TypeError(f"doctor({name}={type(value).__name__}): {cure}")
    return value


def _several(name: str, value: Any, *kinds: type) -> Iterator[Any]:
    if value is None:
        return
    for each in value if isinstance(value, list | tuple) else (value,):
        yield _checked(name, each, *kinds) if kinds else each


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
    return _check(Program(ast.parse(source, name), {}), text, name, machine)


def _check_function(function: FunctionType, known: Mapping[str, object]) -> list[Finding]:
    """Check a function and the functions of its file that it calls, with the values of its names.

    Raises:
        OSError: The source is not available.
    """
    lines, _ = inspect.findsource(function.__code__)
    source, name = "".join(lines), inspect.getsourcefile(function) or "<source>"
    tree = ast.parse(source, name)
    node = _definition(tree, function.__name__, function.__code__.co_firstlineno)
    if node is None:
        raise OSError(f"{name}: no definition of {function.__name__} found")
    return _check(Program(tree, known, node), source, name)


def _unpacked(function: Callable[..., Any]) -> tuple[FunctionType, dict[str, object]]:
    """Return the plain function behind a method, a partial or a wrapper, and what it knows.

    These are the values of the names that it uses, with ``self`` and partial arguments.

    Raises:
        OSError: There is no function written in Python.
    """
    given: dict[str, object] = {}
    while isinstance(function, partial):
        given, function = {**function.keywords, **given}, function.func
    owner = getattr(function, "__self__", None)
    self_name = {} if owner is None else {"self": owner}
    found = inspect.unwrap(function)
    found = getattr(found, "__func__", found)
    if not inspect.isfunction(found):
        raise OSError(f"{function!r} is not a function written in Python")
    names = inspect.getclosurevars(found)
    return found, {**names.globals, **names.nonlocals, **self_name, **given}


def _definition(tree: ast.Module, name: str, line: int) -> Function | None:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
            if first == line:
                return node
    return None


def _check(
    program: Program, source: str, file: str, machine: MachineReport | None = None
) -> list[Finding]:
    if _NEEDED.isdisjoint(program.words):
        return []
    found = (
        *about_iterations.findings(program),
        *about_precision.findings(program),
        *about_hooks.findings(program),
        *(hardware.slower(about_precision.lowered(program), machine) if machine else ()),
    )
    lines = source.splitlines()
    kept = (replace(each, file=file) for each in found if not _is_allowed(each, lines))
    return list(dict.fromkeys(kept))


def _is_allowed(finding: Finding, lines: list[str]) -> bool:
    """Return whether the line has a comment ``# halfstep: allow``, with this id or without ids."""
    line = "".join(lines[finding.line - 1 : finding.line])
    allowed = _ALLOWED.search(line)
    if allowed is None:
        return False
    ids = re.findall(r"[\w-]+", allowed[1])
    return not ids or finding.id in ids
