"""Diagnoses of programs, compared with the truth, and their cures pasted and run."""

from __future__ import annotations

import linecache
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from tests.diagnose.kinds.program import MARK, Program, step_script

import halfstep

OF_THE_BATCH = ("bad_batch", "bad_target")
COLUMNS = ("named", "line", "verdict", "offered", "cure", "silent")


@dataclass(frozen=True)
class Judged:
    """Parts of a diagnosis that were right; None for parts that do not apply.

    ``offered``: there is a cure that a replay has found finite. ``cure``: the program with the
    cure pasted into it is finite. ``silent``: the program with a good batch is called finite.
    """

    program: Program
    named: bool | None
    line: bool | None
    verdict: bool
    offered: bool | None
    cure: bool | None
    silent: bool
    said: str
    replays: int


def judge(program: Program, folder: Path) -> Judged:
    """Diagnose a program in a folder, as a function ``step``."""
    good = run(step_script(program, bad=False), folder / "good.py")
    silent = halfstep.diagnose(good["step"], model=good["model"]).verdict == "none"
    source, file = step_script(program), folder / "program.py"
    names = run(source, file)
    found = halfstep.diagnose(names["step"], model=names["model"])
    if program.is_harmless:
        right = found.verdict == "none"
        return Judged(program, None, None, right, None, None, silent, str(found), 0)
    bad = found.bad
    if program.verdict == "data":
        named = found.tensor is not None and any(
            re.search(rf"\b{name}\b", found.tensor) for name in program.ops
        )
        line = bad is not None and _is_marked(source, bad.line or bad.forward_line)
        is_out = found.cure is not None and "leave this batch out" in found.cure.text
        return Judged(
            program=program,
            named=named,
            line=line,
            verdict=found.verdict == "data" and is_out == (program.kind in OF_THE_BATCH),
            offered=None,
            cure=None,
            silent=silent,
            said=str(found),
            replays=found.num_replays,
        )
    offered = found.cure is not None and found.cure.is_finite is True
    return Judged(
        program=program,
        named=bad is not None and bool({bad.op, bad.name, bad.forward_op} & program.ops),
        line=bad is not None and _is_marked(source, bad.line or bad.forward_line),
        verdict=found.verdict == program.verdict,
        offered=offered,
        cure=is_cured(program, source, found.cure, file),
        silent=silent,
        said=str(found),
        replays=found.num_replays,
    )


def run(source: str, file: Path) -> dict[str, Any]:
    """Run a script from a file; return its names."""
    file.write_text(source)
    linecache.checkcache(str(file))
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(file)}
    exec(compile(source, str(file), "exec"), names)
    return names


def _is_marked(source: str, line: Any) -> bool:
    return line is not None and MARK in source.splitlines()[line.number - 1]


# --- cures ----------------------------------------------------------------------------------------


def is_cured(program: Program, source: str, cure: Any, file: Path) -> bool:
    """Return whether a program is finite with a cure pasted into it."""
    pasted = None if cure is None else paste(program, source, cure)
    if pasted is None:
        return False
    try:
        names = run(pasted, file.with_name("cured.py"))
        return is_finite(names["step"], names["model"])
    except Exception as error:  # what was offered does not run
        print(f"{program}: {type(error).__name__}: {error}\n{cure.text}")
        return False


def paste(program: Program, source: str, cure: Any) -> str | None:
    """Return a source with the text of a cure in it; None if that is not clear."""
    if cure.text.startswith("model.float()"):
        region = re.search(r"with (halfstep\.autocast\(.*\)):", cure.text)
        assert region, cure.text
        setup = f"{program.setup}\nmodel.float()\n"
        return step_script(replace(program, setup=setup, region=region[1]))
    lines = source.splitlines()
    for edit in sorted(cure.edits, key=lambda edit: -edit.first):
        lines[edit.first - 1 : edit.last] = edit.text.splitlines()
    pasted, is_done = "\n".join(lines) + "\n", bool(cure.edits)
    for pattern, expression in (
        (r"halfstep\.autocast\([^#]*\)", program.autocast),
        (r"halfstep\.GradScaler\([^#]*\)", program.scaler),
    ):
        given = re.search(pattern, cure.text)
        if given and expression:
            pasted, is_done = pasted.replace(expression, given[0]), True
    return pasted if is_done else None


def is_finite(step: Callable[[], Any], model: torch.nn.Module) -> bool:
    """Run a step; return whether its loss and gradients are finite."""
    loss = step()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return math.isfinite(loss.item()) and all(bool(g.isfinite().all()) for g in grads)
