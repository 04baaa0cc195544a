"""Whole runs of the corpus: named, judged, and cured; every second one, or HALFSTEP_RUNS=all."""

from __future__ import annotations

import copy
import os
from itertools import count, product
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from tests.diagnose import runs

import halfstep
from halfstep import Diagnosis
from halfstep._tools.diagnose import several_steps
from halfstep._tools.diagnose.diagnosis import BadOp, Cure, Operand, Verdict, parts

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
RUNS = [*runs.RUNS][:: 1 if os.environ.get("HALFSTEP_RUNS") == "all" else 2]
# Of which a short trial tells less, or finds another cure.
LONG = ("actions_at_the_edge", "lbfgs_probit", "ratio_of_probabilities")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=pytest.mark.whole_trials if n in LONG else ()) for n in RUNS],
)
def test_a_run_that_goes_bad_is_diagnosed_and_cured(name: str, tmp_path: Path) -> None:
    judged = runs.judge(name, tmp_path)
    assert not judged.wrong, f"{judged.wrong}\n{judged.said}"


# --- no sentence contradicts its own replay -------------------------------------------------------

FLOATS = Operand("", "float16", (2,), 1.0, 1.0, 0, 1, 0)
OPS = [
    BadOp("mul", "mul", "", 0, "forward", None, None, None, None, (FLOATS,), FLOATS, needs, 65504.0)
    for needs in (None, 1e5, 1e60)
]
CURES = [None, *(Cure("dtype", "x", is_finite, dtype="float32") for is_finite in (True, False))]


@pytest.mark.parametrize("verdict", get_args(Verdict))
def test_a_sentence_says_of_float32_what_a_replay_has_shown(verdict: Any) -> None:
    for bad, cure, in_float32 in product(OPS, CURES, (None, True, False)):
        if verdict == "range" and not (in_float32 or bad.is_beyond_its_dtype):
            continue  # not judged so
        found = Diagnosis(verdict, bad, "x", cure=cure, is_finite_in_float32=in_float32)
        for said in (str(found).splitlines()[0], "".join(map(str, parts(found)))):
            if "float32" in said and "alone" not in said:
                assert ("nor is it in float32" in said) == (in_float32 is False), said
                assert ("in float32 it is finite" in said) == (in_float32 is True), said
            assert "alone" not in said or bad.is_beyond_its_dtype


def test_what_was_found_until_the_limit_is_returned() -> None:
    x = torch.tensor([1.0, 0.0], requires_grad=True)
    found = halfstep.diagnose(lambda: torch.log(x).sum().backward(), seconds=0)
    assert (found.verdict, found.bad and found.bad.op) == ("maths", "log")
    assert found.num_replays == 2
    said = "at least one more replay was not run: 0 s of the thread's own time were over"
    assert any(note.startswith(said) for note in found.notes)


def test_a_trial_that_the_time_ends_after_a_few_steps_is_none(monkeypatch: Any) -> None:
    seconds = count()
    monkeypatch.setattr(several_steps, "own_time", lambda: float(next(seconds)))
    model = torch.nn.Linear(1, 1, bias=False)
    x = torch.tensor([[0.0], [1.0]])
    found = halfstep.diagnose(lambda: torch.log(model(x).abs()).sum().backward())
    assert found.cure is not None
    assert (found.cure.trial, found.cure.losses) == ("", ())
    said = "not tried over several steps: the time was over after 2 steps"
    assert said in found.cure.remarks


def test_a_trial_says_how_many_optimizers_took_its_steps() -> None:
    """All that have the weights take them, also if the loop steps one of them on this loss."""
    first, second = torch.nn.Linear(1, 1, bias=False), torch.nn.Linear(1, 1, bias=False)
    of_them = [torch.optim.Adam(each.parameters(), lr=1e-3) for each in (first, second)]
    x = torch.tensor([[0.0], [1.0]])
    found = halfstep.diagnose(lambda: torch.log(second(first(x)).abs()).sum().backward())
    assert found.cure is not None
    assert f"steps of {len(of_them)} Adam optimizers on this batch" in found.cure.trial


@pytest.mark.whole_trials
def test_several_steps_of_an_optimizer_leave_all_as_it_was() -> None:
    model, x = torch.nn.Linear(4, 1).half(), torch.ones(8, 4).half().requires_grad_()
    optimizer = torch.optim.Adam(model.parameters(), 1e-2, eps=1e-3)

    def loss_of(gain: float) -> torch.Tensor:
        return (torch.exp(model(x).abs() + gain) * torch.exp(-model(x).abs() - gain)).sum()

    loss_of(0.0).backward()
    optimizer.step()
    loss, before = loss_of(0.0), copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    found = halfstep.diagnose(lambda: loss_of(12.0).backward())
    assert found.cure.trial == "20 steps of Adam on this batch"
    torch.testing.assert_close([model.state_dict(), optimizer.state_dict()], before, rtol=0, atol=0)
    loss.backward()  # what it has saved has the same version
