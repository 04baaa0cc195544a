"""Kinds of code that goes wrong, as text of small programs with random variants.

from tests.diagnose.kinds import KINDS, programs
program = next(programs("bce_by_hand", seed=0))   # a Program: see program.py
source = step_script(program)                     # one step, for halfstep.diagnose
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator

from tests.diagnose.kinds import forms, functions, halves, losses, nets, rounding
from tests.diagnose.kinds.program import KINDS, Program, Variety

__all__ = ["KINDS", "programs"]

MODULES = (losses, functions, nets, rounding, halves, forms)
"""They fill KINDS."""


def programs(kind: str, seed: int = 0) -> Iterator[Program]:
    """Yield variants of a kind without end; the same seed yields the same ones."""
    number = 0
    while True:
        rng = random.Random(zlib.crc32(f"{seed} {number} {kind}".encode()))
        program = KINDS[kind](Variety(rng))
        yield program.named(kind, number)
        number += 1
