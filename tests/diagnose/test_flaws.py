"""What the trial of an edit says against it: a finite step is no cure if nothing is learned."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from halfstep._tools.diagnose.diagnosis import Cure
from halfstep._tools.diagnose.flaws import Flaw, flaw_of
from halfstep._tools.diagnose.several_steps import Usual, failures_of, signs_of

OF_SGD, SMALL = False, True  # whether the steps of the trial were small


@pytest.mark.parametrize(
    ("is_small", "losses", "changed", "flaw"),
    [
        (OF_SGD, (3.0, 2.0), (), Flaw.NONE),
        (OF_SGD, (), (), Flaw.NONE),
        (OF_SGD, (0.0, 0.0), (), Flaw.NONE),  # nothing is to be learned from the batch
        (OF_SGD, (3.0, 2.0), (0.1, 0.0, 0.0), Flaw.NONE),  # the values come back
        (OF_SGD, (3.0, 2.0), (0.1, 0.05, 0.0), Flaw.DOUBT),
        (OF_SGD, (3.0, 3.0), (), Flaw.DOUBT),  # the rate may be small
        (OF_SGD, (3.0, 4.0), (), Flaw.DOUBT),
        (OF_SGD, (300.0, 200.0), (), Flaw.DOUBT),  # those before it were about 3
        (SMALL, (3.0, 4.0), (), Flaw.NONE),
        (SMALL, (3.0, 3.0), (), Flaw.NO_CURE),
        (OF_SGD, (3.0, 4.0), (0.1, 0.05, 0.0), Flaw.NO_CURE),
        (OF_SGD, (3.0, 4.0), (0.1, 0.01, 0.0), Flaw.DOUBT),  # almost all come back
        (OF_SGD, (3.0, -9e34), (), Flaw.NO_CURE),
        (OF_SGD, (-9e34, -9e34), (0.1, 0.1, 0.0), Flaw.NO_CURE),  # far from those before it
        (OF_SGD, (1e16, 6e15), (0.1, 0.01, 0.0), Flaw.NO_CURE),
        (OF_SGD, (300.0, 290.0), (0.6, 0.6, 0.0), Flaw.NO_CURE),
        (OF_SGD, (300.0, 290.0), (0.6, 0.52, 0.0), Flaw.DOUBT),
        (OF_SGD, (3.0, 2.9), (0.6, 0.6, 0.0), Flaw.DOUBT),  # it falls as before
        (OF_SGD, (300.0, 100.0), (0.6, 0.6, 0.0), Flaw.DOUBT),  # or by much
        (OF_SGD, (300.0, 100.0), (0.98, 0.98, 0.98), Flaw.NO_CURE),
        (OF_SGD, (300.0, 700.0), (), Flaw.NO_CURE),  # far from those before it, and farther later
    ],
)
def test_what_a_trial_shows(is_small: bool, losses: Any, changed: Any, flaw: Flaw) -> None:
    cure = Cure("code", "x", True, has_small_steps=is_small, losses=losses, changed=changed)
    assert flaw_of(cure, Usual(loss=3.0, size=3.0)) is flaw


def test_a_huge_loss_is_doubtful_in_the_first_step_too() -> None:
    huge, usual = (Cure("code", "x", True, losses=(n, n / 2)) for n in (1e21, 1e5))
    assert (flaw_of(huge, Usual()), flaw_of(usual, Usual())) == (Flaw.DOUBT, Flaw.NONE)


def test_what_is_not_finite_is_the_last() -> None:
    assert flaw_of(Cure("code", "x", is_finite=False), Usual()) is max(Flaw)


def test_a_loss_that_rises_by_more_than_ten_times_its_size_is_a_failure() -> None:
    steps: Any = SimpleNamespace(fails_at=0, losses=[3.0, 32.0], others=[3.0, 40.0])
    assert failures_of(steps) == ["the loss of the batch before it rises from 3 to 40"]


def test_losses_before_it_are_named_only_if_they_are_known() -> None:
    steps: Any = SimpleNamespace(norm=1.0, norm_before=1.0, losses=[1e14], factor=1.0)
    found = [signs_of(steps, usual) for usual in (Usual(), Usual(loss=3.0, size=3.0))]
    this = "the loss of this batch is 1e+14 with it"
    assert found == [[this], [f"{this}; those before it were about 3"]]
