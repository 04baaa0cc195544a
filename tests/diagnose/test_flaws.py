"""What the trial of an edit says against it: a finite step is no cure if nothing is learned."""

from __future__ import annotations

from typing import Any

import pytest

from halfstep._tools.diagnose.diagnosis import Cure
from halfstep._tools.diagnose.flaws import Flaw, flaw_of
from halfstep._tools.diagnose.several_steps import Usual

OF_SGD, SMALL = "20 steps of SGD on this batch", "20 small steps on this batch"


@pytest.mark.parametrize(
    ("trial", "losses", "changed", "flaw"),
    [
        (OF_SGD, (3.0, 2.0), (), Flaw.NONE),
        ("", (), (), Flaw.NONE),
        (OF_SGD, (0.0, 0.0), (), Flaw.NONE),  # nothing is to be learned from the batch
        (OF_SGD, (3.0, 2.0), (0.1, 0.0), Flaw.NONE),  # the values come back
        (OF_SGD, (3.0, 2.0), (0.1, 0.05), Flaw.DOUBT),
        (OF_SGD, (3.0, 3.0), (), Flaw.DOUBT),  # the rate may be small
        (OF_SGD, (3.0, 4.0), (), Flaw.DOUBT),
        (OF_SGD, (300.0, 200.0), (), Flaw.DOUBT),  # those before it were about 3
        (SMALL, (3.0, 4.0), (), Flaw.NONE),
        (SMALL, (3.0, 3.0), (), Flaw.NO_CURE),
        (OF_SGD, (3.0, 4.0), (0.1, 0.05), Flaw.NO_CURE),
        (OF_SGD, (3.0, -9e34), (), Flaw.NO_CURE),
        (OF_SGD, (300.0, 290.0), (0.6, 0.6), Flaw.NO_CURE),
        (OF_SGD, (300.0, 290.0), (0.6, 0.52), Flaw.DOUBT),
        (OF_SGD, (3.0, 2.9), (0.6, 0.6), Flaw.DOUBT),  # it falls as before
        (OF_SGD, (300.0, 100.0), (0.6, 0.6), Flaw.DOUBT),  # or by much
    ],
)
def test_what_a_trial_says_against_a_change(
    trial: str, losses: Any, changed: Any, flaw: Flaw
) -> None:
    cure = Cure("code", "x", is_finite=True, trial=trial, losses=losses, changed=changed)
    assert flaw_of(cure, Usual(loss=3.0, size=3.0)) is flaw


def test_what_is_not_finite_is_the_last() -> None:
    assert flaw_of(Cure("code", "x", is_finite=False), Usual()) is max(Flaw)
