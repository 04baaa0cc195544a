"""The ground truth of the cases, without any diagnosis: by running them, and by a slow reference.

`make fuzz` looks at all cases, else one for each fault is tried, and a share of the rest;
HALFSTEP_FUZZ_SEED takes those of another seed.
"""

from __future__ import annotations

import os
from functools import cache
from itertools import islice

import pytest
import torch
from tests.diagnose.faults import FAULTS, cases, cases_of, clean_cases
from tests.diagnose.reference import bad_ops
from tests.diagnose.truths import Case

pytestmark = pytest.mark.slow

IS_FUZZ = "HALFSTEP_FUZZ" in os.environ
SEED = int(os.environ.get("HALFSTEP_FUZZ_SEED", "0"))
HARMLESS_BEFORE = {"where_is_too_late": "log"}  # its forward makes an infinity, and drops it

each_fault = pytest.mark.parametrize("fault", FAULTS)


@cache
def some_of(fault: str) -> list[Case]:
    """Return one case of a fault, or all where there is time."""
    return list(islice(cases_of(fault, SEED), None if IS_FUZZ else 1))


@pytest.mark.skipif(not IS_FUZZ, reason="makes all cases: make fuzz")
def test_there_are_enough_cases_of_every_kind():
    now = list(cases(SEED))
    assert len(now) >= 240
    assert {case.setting.model for case in now} >= {"mlp", "cnn", "gpt", "lstm", "autoencoder"}
    assert {case.truth.verdict for case in now} == {"scale", "range", "maths", "data"}
    assert {case.truth.phase for case in now} == {"forward", "backward"}
    for number in (
        sum(case.decoy is not None for case in now),
        sum(case.warm for case in now),
        sum(case.setting.again == "reentrant" for case in now),
        sum(case.setting.plain for case in now),
        sum(case.setting.micro_batches > 1 for case in now),
        sum(case.setting.dtype is torch.bfloat16 for case in now),
    ):
        assert number >= 20


@pytest.mark.parametrize("fault", ["large weight", "steep", "gain"])
def test_a_seed_gives_the_same_cases_again_and_another_others(fault: str):
    def told(seed: int) -> list[object]:
        return [(case.setting, case.truth) for case in islice(cases_of(fault, seed), 2)]

    assert told(SEED) == told(SEED)
    assert told(SEED) != told(SEED + 1)


@each_fault
def test_the_step_is_finite_without_the_fault_and_not_with_it(fault: str):
    for case in some_of(fault):
        if fault != "large scale":
            assert case.make(fault=False).is_finite(), case
        assert not case.make().is_finite(), case


@each_fault
def test_the_verdict_is_what_another_dtype_and_scale_say(fault: str):
    for case in some_of(fault):
        in_bfloat16 = case.make(dtype=torch.bfloat16).is_finite()
        at_scale_1 = case.make(scale=1.0).is_finite()
        match case.truth.verdict:
            case "range":
                assert in_bfloat16 != case.truth.by_hand, case
                assert not at_scale_1, case
            case "scale":
                assert at_scale_1, case
            case _:
                assert not in_bfloat16, case
                assert not at_scale_1, case


@pytest.mark.parametrize("fault", FAULTS if IS_FUZZ else list(FAULTS)[::6])
def test_the_reference_finds_the_fault_at_its_place(fault: str):
    for case in some_of(fault):
        if case.truth.verdict != "data":
            _check(case)


def _check(case: Case) -> None:
    truth = case.truth
    events = [e for e in bad_ops(case.make_bare()) if e.op != HARMLESS_BEFORE.get(case.fault)]
    first = events[0]
    assert first.op in truth.ops, case
    assert (first.module, first.phase) == (truth.module, truth.phase), case
    assert first.line in truth.lines, case
    if truth.forward_op:
        assert first.node == f"{truth.forward_op.title()}Backward0", case


def test_clean_trainings_are_finite():
    trainings = list(clean_cases(SEED))
    assert len(trainings) >= 200
    for training in trainings[:: 1 if IS_FUZZ else 5]:
        assert training.is_finite(), training.setting
