"""Table of how well the kinds are diagnosed: python -m tests.diagnose.score --kinds."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

from tests.diagnose.kinds import KINDS, programs
from tests.diagnose.kinds.judged import COLUMNS, Judged, judge, judge_loop, judge_script
from tests.diagnose.kinds.program import Program

Form = Callable[[Program, Path], Judged]
FORMS: dict[str, Form] = {"step": judge, "loop": judge_loop, "script": judge_script}
"""How a program is run and diagnosed."""

LEAST = {"offered": 0.94, "cure": 0.94}  # others 0.95; what changes all values is no cure


def judged(form: str, variants: int, seed: int, kind: str | None = None) -> Iterator[Judged]:
    """Diagnose variants of every kind, or of one."""
    with tempfile.TemporaryDirectory() as folder:
        for name in KINDS if kind is None else [kind]:
            for program in islice(programs(name, seed), variants):
                yield FORMS[form](program, Path(folder))


def wrong(case: Judged) -> list[str]:
    """Return the columns in which a diagnosis is wrong."""
    return [column for column in COLUMNS if getattr(case, column) is False]


def summary(form: str, cases: list[Judged]) -> tuple[str, bool]:
    """Return the shares that are right as a line, and whether they are enough."""
    shares, is_good = [], True
    for column in COLUMNS:
        answers = [answer for case in cases if (answer := getattr(case, column)) is not None]
        if not answers:
            continue
        share = sum(answers) / len(answers)
        shares.append(f"{column} {100 * share:.1f} %")
        is_good &= share >= LEAST.get(column, 0.95)
    return f"{len(cases)} variants of kinds as a {form}: {', '.join(shares)}", is_good
