"""Whole runs that go bad, each diagnosed as under ``halfstep run --diagnose``, and cured.

They are the files of ``corpus/runs``. Lines at the top of each say::

    # kind: what it is an example of (the optimizer, growth, closures, casts, losses, ...)
    # expect: the verdict, and the op if the line that is marked with ``# bad`` is to be named
    # form: "step" if the file has a function ``step`` to diagnose, "error" if it ends with one
    # step: the number of the bad step, if the file does not count it as ``bad_step``
    # tensor, says, cure, last: regular expressions for parts of the diagnosis (last: of the last)
    # never: one that must not be in it
    # learns: true after the run whose edits are pasted, which is finite then
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.diagnose.kinds.judged import run_file
from tests.dtype_errors.dtype_programs import pasted

import halfstep
from halfstep import Diagnosis
from halfstep._tools.dtype_errors.dtype_error import explain
from halfstep._tools.watch.watch import Watch

CORPUS = Path(__file__).parent / "corpus" / "runs"
RUNS = {file.stem: file for file in sorted(CORPUS.glob("*.py"))}
COLUMNS = ("named", "verdict", "cure")


@dataclass(frozen=True)
class Judged:
    """Parts of a diagnosis that were right; None for parts that do not apply."""

    named: bool | None
    verdict: bool
    cure: bool | None
    said: str

    @property
    def wrong(self) -> list[str]:
        return [column for column in COLUMNS if getattr(self, column) is False]


class _Truth:
    def __init__(self, source: str) -> None:
        self.source = source
        self._said = re.findall(r"^# (\w+): (.*)$", source, re.M)
        self.verdict, _, ops = self.one("expect").partition(" ")
        self.ops = set(ops.split("|")) - {""}

    def all(self, key: str) -> list[str]:
        return [value for name, value in self._said if name == key]

    def one(self, key: str) -> str:
        return next(iter(self.all(key)), "")


def judge(name: str, folder: Path) -> Judged:
    """Run a file with its fault, diagnose it, and compare with the truth."""
    truth = _Truth(RUNS[name].read_text())
    file = folder / f"{name}.py"
    if truth.one("form") == "error":
        return _of_error(truth, file)
    told: list[tuple[Diagnosis, int | None]] = []
    names: dict[str, Any] = {}
    notes: list[str] = []
    if truth.one("form") == "step":
        names = run_file(truth.source, file)
        told = [(halfstep.diagnose(names["step"]), None)]
        told = [each for each in told if each[0].verdict != "none"]
    else:
        watch = Watch(tell=lambda *found: told.append(found))
        with watch, suppress(ValueError, RuntimeError):
            names = run_file(truth.source, file)
        notes = watch.notes
    said = "\n\n".join([*(f"step {step}\n{found}" for found, step in told), *notes])
    if truth.verdict == "none":
        return Judged(None, not told, None, said)
    if not told:
        return Judged(False, False, False, "nothing")
    found, step = told[0]
    wanted = truth.one("step") or names.get("bad_step")
    is_named = all(_named(truth, found, said, str(told[-1][0])))
    is_named &= wanted is None or step is None or str(step) == str(wanted)
    return Judged(is_named, found.verdict == truth.verdict, _cures(truth, found, folder), said)


def _named(truth: _Truth, found: Diagnosis, said: str, last: str) -> Iterator[bool]:
    bad = found.bad
    if truth.ops:
        yield bad is not None and bool({bad.op, bad.name, bad.forward_op} & truth.ops)
        line = bad and (bad.forward_line or bad.line)
        yield bool(line) and "# bad" in truth.source.splitlines()[line.number - 1]
    for each in truth.all("tensor"):
        yield found.tensor is not None and bool(re.search(each, found.tensor))
    for each in truth.all("says"):
        yield bool(re.search(each, said))
    for each in truth.all("last"):
        yield bool(re.search(each, last))
    for each in truth.all("never"):
        yield not re.search(each, said)


def _cures(truth: _Truth, found: Diagnosis, folder: Path) -> bool | None:
    wanted, learns = truth.all("cure"), truth.one("learns")
    if not (wanted or learns):
        return None
    if found.cure is None or not all(re.search(each, found.cure.text) for each in wanted):
        return False
    if not learns:
        return True
    if found.cure.edits:
        source = pasted(truth.source, found.cure.edits)
    elif found.cure.policy is not None:
        region = 'torch.autocast("cpu", dtype=torch.float16'
        given = f', policy="{found.cure.policy}"'
        source = truth.source.replace(region, region.replace("torch.a", "halfstep.a") + given)
        source = source.replace("import torch\n", "import halfstep\nimport torch\n", 1)
    elif found.cure.kind == "scale":
        source = truth.source.replace(str(found.scale), str(found.cure.scale))
    else:
        return False
    with suppress(Exception):
        return bool(eval(learns, run_file(source, folder / "cured.py")))
    return False


# --- errors about dtypes --------------------------------------------------------------------------


def _of_error(truth: _Truth, file: Path) -> Judged:
    """Judge the first cure of an error: the file runs to its end with it."""
    try:
        run_file(truth.source, file)
    except (RuntimeError, TypeError, ValueError) as error:
        found = explain(error)
    if found is None or not found.cures:
        return Judged(False, found is not None, False, str(found))
    said, runs = str(found), _ends(pasted(truth.source, found.cures[0].edits), file)
    return Judged(bool(re.search(truth.one("cure"), said)), True, runs, said)


def _ends(source: str, file: Path) -> bool:
    with suppress(Exception):
        run_file(source, file.with_name("cured.py"))
        return True
    return False
