"""Hostile programs that fail with an error about dtypes; many follow public threads.

They are the files of ``corpus``: simple ones, those that came first, newer ones, those that import
libraries, which takes seconds, and whole scripts. ``BEGIN`` stands before each. Lines above one
say::

    # thread: OWNER/REPOSITORY NUMBER
    # expect: what the explanation says; #1 in it is the number of the line that ends with #1, and
              a $ at its end the end of a line
    # cure: code of one of the cures that are offered
    # incurable: no change of the line, or of a line around it, cures it
    # missed: what is not said, or not cured, yet

A program fails at the line that ends with ``#!``.
"""

import re
from pathlib import Path
from typing import NamedTuple

from halfstep._tools.dtype_errors.dtype_error import explain
from halfstep._tools.line import LineEdit

CORPUS = Path(__file__).parent / "corpus"
BEGIN = """
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import halfstep

x = torch.randn(2, 4)
half = x.half()

"""


class Hostile(NamedTuple):
    """A program that fails.

    Attributes:
        source: Its source without marks.
        marks: The number of the line of each mark.
        said: What the explanation says, in parts.
        cures: Code that is offered.
        is_curable: Whether a change of the line, or of a line around it, cures it.
        is_missed: Whether not all of this is so yet.
    """

    source: str
    marks: dict[str, int]
    said: list[str]
    cures: list[str]
    is_curable: bool
    is_missed: bool


def read(file: Path) -> Hostile:
    """Read a file of the corpus."""
    head, _, source = file.read_text().partition("\n\n")
    lines, marks = (BEGIN + source).rstrip("\n").split("\n"), {}
    for number, line in enumerate(lines):
        if mark := re.search(r"  #([!\d])$", line):
            marks[mark[1]] = number + 1
            lines[number] = line[: mark.start()]
    head = re.sub(r"#(\d)", lambda mark: str(marks[mark[1]]), head)
    said = re.findall("^# expect: (.*)$", head, re.M)
    return Hostile(
        "\n".join(lines) + "\n",
        marks,
        [re.sub(r"\$$", "\n", part) for part in said],
        re.findall("^# cure: (.*)$", head, re.M),
        "# incurable" not in head,
        "# missed" in head,
    )


def programs(folder: str) -> dict[str, Hostile]:
    """Return the programs of a folder of the corpus, by their names."""
    files = sorted((CORPUS / folder).glob("*.py"))
    return {file.stem.replace("_", " "): read(file) for file in files}


FIRST, NEWER, LIBRARIES = map(programs, ("first", "newer", "libraries"))
REST, WHOLE = programs("rest"), programs("whole")
ALL = FIRST | NEWER | LIBRARIES
PLAIN = programs("simple")


# --- what is said of them -------------------------------------------------------------------------


class Judged(NamedTuple):
    """What was right in the explanation of a program.

    Attributes:
        has_line: Whether the line was named.
        missing: What was not said of the tensors and their origins.
        is_cured: Whether a program with one of the cures ran, and with each that is expected; None
            if none can.
        does_first: Whether the program with the first cure ran.
        explanation: The explanation.
    """

    has_line: bool
    missing: list[str]
    is_cured: bool | None
    does_first: bool
    explanation: str

    @property
    def is_right(self) -> bool:
        return self.has_line and not self.missing and self.is_cured is not False


def judge(program: Hostile, folder: Path) -> Judged:
    """Run a program in a folder of its own, and once more with each of its cures."""
    text, marks, said = program.source, program.marks, program.said
    (file := folder / "train.py").write_text(text)
    found = explain(raised_by(file))
    if found is None:
        return Judged(False, said, False, False, "")
    has_line = found.where == f"train.py:{marks['!']}"
    missing = [part for part in said if part not in str(found)]
    ran = []
    for number, cure in enumerate(found.cures):
        (file := folder / f"{number}.py").write_text(pasted(text, cure.edits))
        if raised_by(file) is None:
            ran.append(str(cure))
    has_each = all(any(part in cure for cure in ran) for part in program.cures)
    is_cured = (bool(ran) and has_each) if program.is_curable else None
    does_first = bool(ran) and ran[0] == str(found.cures[0])
    return Judged(has_line, missing, is_cured, does_first, str(found))


def raised_by(file: Path) -> Exception | None:
    try:
        runs(file)
    except Exception as error:
        return error
    return None


def runs(file: Path) -> None:
    """Run a program in this process."""
    exec(compile(file.read_text(), str(file), "exec"), {"__name__": "__main__"})


def pasted(text: str, edits: tuple[LineEdit, ...]) -> str:
    """Return a program with edits of its lines."""
    lines = text.split("\n")
    for edit in sorted(edits, key=lambda edit: -edit.first):
        lines[edit.first - 1 : edit.last] = edit.text.split("\n")
    return "\n".join(lines)
