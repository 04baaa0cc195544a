"""A variant of every kind of faulty program: named, judged, and cured by what is told to paste.

Each is judged as a step or as a loop, in turn; on a simulated device, one in five.
``HALFSTEP_FUZZ=1`` looks at five variants of each in both forms.
"""

from __future__ import annotations

import os
from itertools import islice
from pathlib import Path

import pytest
from tests.device import share
from tests.diagnose.kinds import KINDS, programs
from tests.diagnose.kinds.judged import is_finite, run_file
from tests.diagnose.kinds.program import step_script
from tests.diagnose.kinds.table import FORMS, wrong

IS_FUZZ = "HALFSTEP_FUZZ" in os.environ
VARIANTS = 5 if IS_FUZZ else 1

pytestmark = pytest.mark.filterwarnings(
    "ignore:std..:UserWarning",
    "ignore:var..:UserWarning",
    "ignore::halfstep.errors.SkippedStepsWarning",  # the loops start at the smallest scale
)


@pytest.mark.parametrize(
    ("form", "kind"),
    share(
        (
            (form, kind)
            for number, kind in enumerate(KINDS)
            for place, form in enumerate(("step", "loop"))
            if IS_FUZZ or number % 2 == place
        ),
        one_in=5,
    ),
)
def test_the_fault_is_named_and_its_cure_can_be_pasted(form, kind, tmp_path):
    for program in islice(programs(kind), VARIANTS):
        case = FORMS[form](program, tmp_path)
        assert not wrong(case), f"{program}: {wrong(case)}\n{case.said}"


@pytest.mark.parametrize("kind", ["focal", "backward_in_python", "squares_in_half"])
def test_the_same_holds_for_a_script(kind: str, tmp_path: Path) -> None:
    program = next(programs(kind))
    case = FORMS["script"](program, tmp_path)
    assert not wrong(case), f"{program}: {wrong(case)}\n{case.said}"


@pytest.mark.parametrize("kind", share(KINDS, one_in=5))
def test_a_program_is_finite_without_its_fault_and_not_with_it(kind: str, tmp_path: Path) -> None:
    for program in islice(programs(kind, seed=1), VARIANTS):
        for is_bad in (False, True):
            names = run_file(step_script(program, bad=is_bad), tmp_path / f"{is_bad}.py")
            is_fault = is_bad and not program.is_harmless
            loss = names["step"]()
            grads = [p.grad for p in names["model"].parameters()]
            assert is_finite([loss, *grads]) != is_fault, program
