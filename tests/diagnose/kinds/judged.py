"""Diagnoses of programs, compared with the truth, and their cures pasted and run."""

from __future__ import annotations

import linecache
import re
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from tests import forked
from tests.diagnose.kinds.program import (
    BAD_STEP,
    MARK,
    NUM_STEPS,
    Program,
    loop_script,
    step_script,
)

import halfstep
from halfstep import Diagnosis
from halfstep._tools.record.read import read_run
from halfstep._tools.watch.watch import LEFT_OUT

OF_THE_BATCH = ("bad_batch", "bad_target")
ALL_CHANGED = (
    *("atanh_of_one", "flow_log_det", "growing_recurrence", "inverse_softplus", "sac_log_prob"),
    *("squares_overflow", "state_space"),
)
"""The kinds in which an edit may change all values, so that it is described as no cure."""
COLUMNS = ("named", "line", "verdict", "offered", "cure", "silent", "step", "same")


@dataclass(frozen=True)
class Judged:
    """Parts of a diagnosis that were right; None for parts that do not apply.

    ``offered``: there is a cure that a replay has found finite. ``cure``: the program with the
    cure pasted into it is finite. ``silent``: the program with a good batch is called finite. Of a
    loop, ``step``: the number of the bad step. ``same``: the training is, bit for bit.
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
    step: bool | None = None
    same: bool | None = None


def judge(program: Program, folder: Path) -> Judged:
    """Diagnose a program in a folder, as a function ``step``."""
    good = run_file(step_script(program, bad=False), folder / "good.py")
    silent = halfstep.diagnose(good["step"], model=good["model"]).verdict == "none"
    source, file = step_script(program), folder / "program.py"
    names = run_file(source, file)
    found = halfstep.diagnose(names["step"], model=names["model"])
    return judged(program, found, source, silent, partial(is_cured, program, source, found, file))


def judged(
    program: Program, found: Any, source: str, silent: bool, cures: Callable[[], bool]
) -> Judged:
    """Compare a diagnosis with the truth."""
    if program.is_harmless:
        right = found.verdict == "none"
        return Judged(program, None, None, right, None, None, silent, str(found), 0)
    bad = found.bad
    if program.verdict == "data":
        named = found.tensor is not None and any(
            re.search(rf"\b{name}\b", found.tensor) for name in (*program.ops, "batches")
        )
        line = bad is not None and _is_marked(source, bad.line or bad.forward_line)
        cure = "" if found.cure is None else found.cure.text
        is_out = "leave this batch out" in cure or any(
            note.startswith(LEFT_OUT) for note in found.notes
        )
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
    is_told = program.kind in ALL_CHANGED and found.cure is not None and found.cure.kind == "look"
    offered = None if is_told else found.cure is not None and found.cure.is_finite is True
    return Judged(
        program=program,
        named=bad is not None and bool({bad.op, bad.name, bad.forward_op} & program.ops),
        line=bad is not None and _is_marked(source, bad.line or bad.forward_line),
        verdict=found.verdict == program.verdict,
        offered=offered,
        cure=None if is_told else cures(),
        silent=silent,
        said=str(found),
        replays=found.num_replays,
    )


def run_file(source: str, file: Path) -> dict[str, Any]:
    """Run a script from a file; return its names."""
    file.write_text(source)
    linecache.checkcache(str(file))
    names: dict[str, Any] = {"__name__": "__main__", "__file__": str(file)}
    # A loop may end with its bad step, or fail in the next one for the weights that it left.
    errors = (SystemExit, ValueError, RuntimeError) if "finite, losses" in source else ()
    with suppress(*errors):
        exec(compile(source, str(file), "exec"), names)
    return names


def _is_marked(source: str, line: Any) -> bool:
    return line is not None and MARK in source.splitlines()[line.number - 1]


# --- loops ----------------------------------------------------------------------------------------


WATCH = "with halfstep.diagnose(scaler, model=model, tell=lambda *found: told.append(found)):"


def judge_loop(program: Program, folder: Path) -> Judged:
    """Diagnose a program in a folder, as a training loop under a watch."""
    file = folder / "program.py"
    plain = run_file(loop_script(program), file)
    good = run_file(loop_script(program, bad=False, around=WATCH), folder / "good.py")
    source = loop_script(program, around=WATCH)
    names = run_file(source, file)
    found, step = names["told"][0] if names["told"] else (Diagnosis("none"), None)
    silent = not good["told"] or not all(good["finite"])  # a few are bad by chance
    result = _judged_loop(program, found, step, source, file)
    return replace(result, silent=silent, same=_bits(plain) == _bits(names))


def _judged_loop(
    program: Program, found: Diagnosis, step: int | None, source: str, file: Path
) -> Judged:
    """Compare a diagnosis of a loop with the truth."""
    if program.verdict == "scale":  # one such step is the search for a scale
        program = replace(program, is_harmless=True)
    result = judged(program, found, source, True, partial(is_cured, program, source, found, file))
    is_from_start = program.verdict == "data" and program.kind not in OF_THE_BATCH
    right_step = None if program.is_harmless else step == (1 if is_from_start else BAD_STEP)
    return replace(result, step=right_step)


def _bits(names: dict[str, Any]) -> list[bytes]:
    """Return the bits of the losses and the parameters that a loop has left."""
    values = [*names["losses"], *(p.detach() for p in names["model"].parameters())]
    return [bytes(value.reshape(-1).view(torch.uint8).tolist()) for value in values]


def judge_script(program: Program, folder: Path) -> Judged:
    """Diagnose a program in a folder, as a script under ``halfstep run --diagnose``."""
    file, record = folder / "program.py", folder / f"record-{program}"
    source = loop_script(program)
    file.write_text(source + SAY_BITS)
    plain = _said([str(file)], folder)
    watched = _said(["-m", "halfstep", "run", "-q", "--diagnose", "-o", record, file], folder)
    diagnoses = read_run(record).diagnoses
    found, step = Diagnosis("none"), None
    if diagnoses:
        found, step = diagnoses[0].diagnosis, diagnoses[0].step
    return replace(_judged_loop(program, found, step, source, file), same=plain == watched)


SAY_BITS = """
values = [*losses, *(p.detach() for p in model.parameters())]
print([value.reshape(-1).view(torch.uint8).tolist() for value in values])
"""


def _said(arguments: list[Any], folder: Path) -> str:
    """Return what a script has printed."""
    root = str(Path(__file__).parents[3])
    return forked.python(*arguments, cwd=folder, environ={"PYTHONPATH": root}).out


# --- cures ----------------------------------------------------------------------------------------


def is_cured(program: Program, source: str, found: Any, file: Path) -> bool:
    """Return whether a program is finite with the cure of a diagnosis pasted into it."""
    cure = found.cure
    pasted = None if cure is None else paste(program, source, cure)
    if pasted is None:
        return False
    try:
        names = run_file(pasted, file.with_name("cured.py"))
        if "finite" in names:  # a loop
            return len(names["finite"]) == NUM_STEPS and all(names["finite"])
        loss = names["step"]()
        return is_finite([loss, *(p.grad for p in names["model"].parameters())])
    except Exception as error:  # what was offered does not run
        print(f"{program}: {type(error).__name__}: {error}\n{cure.text}")
        return False


def paste(program: Program, source: str, cure: Any) -> str | None:
    """Return a source with the text of a cure in it; None if that is not clear."""
    if cure.text.startswith("model.float()"):
        region = re.search(r"with (halfstep\.autocast\(.*\)):", cure.text)
        assert region, cure.text
        setup = f"{program.setup}\nmodel.float()\n"
        script = loop_script if "finite, losses" in source else step_script
        return script(replace(program, setup=setup, region=region[1]))
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


def is_finite(tensors: Iterable[torch.Tensor | None]) -> bool:
    """Return whether the values of all tensors are."""
    return all(tensor is None or bool(tensor.detach().isfinite().all()) for tensor in tensors)
