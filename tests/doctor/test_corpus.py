"""What is found in source, and what is not: the programs of ``corpus``.

A line of a program that a finding is about ends with ``# expect:`` and the ids; no other has one.
"""

import ast
import re
from pathlib import Path

import pytest

from halfstep._tools.doctor.doctor import check_source

CORPUS = Path(__file__).parent / "corpus"
PROGRAMS = {str(file.relative_to(CORPUS)): file for file in sorted(CORPUS.rglob("*.py"))}


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_is_found(name: str) -> None:
    lines = PROGRAMS[name].read_text().splitlines()
    source = [re.sub("  # expect: .*", "", line) for line in lines]
    found: list[list[str]] = [[] for _ in lines]
    for finding in check_source("\n".join(source) + "\n"):
        assert finding.file == "<source>"
        ast.parse(finding.code)
        found[finding.line - 1].append(finding.id)
    marked = [
        f"{line}  # expect: {' '.join(sorted(ids))}" if ids else line
        for line, ids in zip(source, found, strict=True)
    ]
    assert marked == lines
