"""Kinds of code that goes wrong, as text of small programs with random variants.

from tests.diagnose.kinds import KINDS, programs
program = next(programs("bce_by_hand", seed=0))   # a Program: see program.py
source = step_script(program)                     # one step, for halfstep.diagnose
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tests.diagnose.kinds.program import Program, read

FILES = {file.stem: file for file in sorted(Path(__file__).parents[1].glob("corpus/kinds/*.py"))}
KINDS = tuple(FILES)


def programs(kind: str, seed: int = 0) -> Iterator[Program]:
    """Yield variants of a kind without end; the same seed yields the same ones."""
    number = 0
    while True:
        rng = random.Random(zlib.crc32(f"{seed} {number} {kind}".encode()))
        yield replace(read(FILES[kind], rng), kind=kind, number=number)
        number += 1
