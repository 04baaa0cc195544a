"""Diagnoses of injected faults: one of each fourth fault, and eight clean steps.

``make score`` diagnoses all cases and prints a table.
"""

from __future__ import annotations

from itertools import islice

import pytest
import torch
from tests.diagnose import clean_runs
from tests.diagnose.faults import FAULTS, clean_cases
from tests.diagnose.score import COLUMNS, diagnose, judge
from tests.diagnose.test_faults import IS_FUZZ, SEED, some_of

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("fault", list(FAULTS)[:: 1 if IS_FUZZ else 4])
def test_the_fault_is_named_judged_and_cured(fault: str):
    for case in some_of(fault):
        judgement = judge(case)
        wrong = [name for name in COLUMNS if getattr(judgement, name) is False]
        assert not wrong, f"{case}: {case.truth}\n{judgement.said}"


def test_memory_that_is_only_allocated_is_no_cause():
    """A backward pass may take an empty tensor for its shape. Here, PyTorch fills it with NaN."""
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(1).isnan()
        test_the_fault_is_named_judged_and_cured("normalise")
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("setting", list(clean_runs.settings())[::5], ids=lambda s: s.model)
def test_a_healthy_training_raises_no_alarm(setting: clean_runs.Setting):
    said, skipped = clean_runs.alarms_in(setting._replace(growth_interval=10), steps=150)
    assert not said
    assert setting.dtype is torch.bfloat16 or skipped > 3


@pytest.mark.parametrize("part", range(2))
def test_clean_steps_raise_no_alarm(part: int):
    for training in islice(clean_cases(SEED), part, 40, 10):
        diagnosis, untouched = diagnose(training)
        assert diagnosis.verdict == "none", f"{training.setting}: {diagnosis}"
        assert diagnosis.bad is None
        assert untouched
