"""``halfstep run --diagnose``: a script whose loss is bad in one step."""

import json
from pathlib import Path
from textwrap import indent

import pytest
from msgspec.structs import replace
from tests import forked

from halfstep._tools.cli import main
from halfstep._tools.record.read import read_run

SCRIPT = Path(__file__).parent / "corpus" / "scripts" / "overflow.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("diagnosed")


@pytest.fixture(scope="module")
def done(folder):
    words = "run", "--diagnose", "-o", "out", "--every", 1, SCRIPT
    done = forked.python("-m", "halfstep", *words, cwd=folder)
    assert done.code == 0, done.err
    return done


def test_the_step_the_op_the_line_and_the_cure_are_printed(done):
    first, second, *facts, last = done.err.splitlines()
    assert first == "halfstep: step 4 went bad:"
    assert second.startswith("range: `linear`")
    assert " of `up` in the forward pass overflowed float16" in second
    assert any("overflow.py:19 in forward: large = self.up(x)" in fact for fact in facts)
    assert "cure (replayed: finite):" in facts
    assert any("linear@up:fp32" in fact for fact in facts)
    assert last.startswith("halfstep: 6 steps recorded, 1 skipped, 1 diagnosis; ")


def test_the_record_the_report_and_the_check_have_it(done, folder, capsys):
    (only,) = read_run(folder / "out").diagnoses
    rank, step, found = only.rank, only.step, only.diagnosis
    assert (rank, step, found.verdict) == (0, 4, "range")
    assert str(found).partition("\n")[0] in done.err
    assert main(["report", str(folder / "out"), "--json"]) == 0
    (place,) = json.loads(capsys.readouterr().out)["bad_places"]
    assert (place["steps"], place["diagnosis"]["bad"]["module"]) == ([4], "up")
    assert main(["check", str(folder / "out")]) == 1
    assert "bad: Step 4 went bad: `linear`" in capsys.readouterr().out


def test_the_training_and_the_rest_of_the_record_are_the_same(done, folder, halfstep_run, tmp_path):
    alone = halfstep_run("-o", "alone", "--every", "1", SCRIPT)
    assert alone.out == done.out
    first, second = read_run(folder / "out"), read_run(tmp_path / "alone")
    # As text, in which NaN is NaN.
    assert str([replace(s, time=0) for s in first.steps]) == str(
        [replace(s, time=0) for s in second.steps]
    )
    assert str(first.samples) == str(second.samples)
    assert second.diagnoses == ()


OWN = """
import torch
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(6)), nn.LayerNorm(16), nn.Linear(16, 1))
optimizer, scaler = torch.optim.SGD(model.parameters(), lr=1e-3), torch.amp.GradScaler("cpu")
for n in range(12):
    if n == 8:
        for layer in model[:6]:
            layer.weight.data *= 100
    with torch.autocast("cpu", torch.float16):
        loss = model(torch.randn(8, 16)).square().mean()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
"""


def test_the_cure_of_a_script_that_keeps_its_precision_is_no_option_of_amp(halfstep_run, tmp_path):
    (tmp_path / "own.py").write_text(OWN)
    done = halfstep_run("--amp", "fp16", "--diagnose", "-o", "out", "own.py")
    assert "GradScaler; no autocast and no scale are added to it" in done.err
    (only,) = read_run(tmp_path / "out").diagnoses
    assert only.diagnosis.cure.text == 'halfstep.autocast("cpu", dtype=torch.bfloat16)'


def test_without_a_scaler_the_step_has_the_same_number(halfstep_run, tmp_path):
    done = halfstep_run("-q", "--diagnose", "-o", "out", SCRIPT, "unscaled")
    assert (done.code, done.err) == (0, "")
    first, *_ = read_run(tmp_path / "out").diagnoses
    assert (first.step, first.diagnosis.verdict) == (4, "range")


def test_steps_of_another_thread_are_said_not_to_be_diagnosed(halfstep_run, tmp_path):
    call = "\nimport threading\nt = threading.Thread(target=learn)\nt.start()\nt.join()\n"
    (tmp_path / "own.py").write_text(f"def learn():\n{indent(OWN, '    ')}{call}")
    done = halfstep_run("--diagnose", "-o", "out", "own.py")
    assert "skipped, 0 diagnoses (steps of other threads are not diagnosed);" in done.err


LEAVES = """
import math, sys, torch
from torch import nn

torch.manual_seed(0)
model = nn.Linear(4, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(1, 6):
    x, y = torch.randn(3, 4), torch.rand(3, 2) + 0.1
    if i == 4:
        y[1, 0] = -1
    loss = (model(x) - y.sqrt()).square().mean()
    print(i, loss.item())
    {leave}
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(model.weight.tolist())
"""


@pytest.mark.parametrize(
    ("leave", "code"),
    [
        ("if not math.isfinite(loss.item()): sys.exit(1)", 1),
        ("if loss.isnan(): continue", 0),
        ("if loss != loss: break", 0),
        ("assert math.isfinite(float(loss.detach())), 'diverged'", 1),
    ],
)
def test_a_loss_that_the_script_leaves_out(halfstep_run, tmp_path, leave, code):
    (tmp_path / "leaves.py").write_text(LEAVES.format(leave=leave))
    done = halfstep_run("--diagnose", "-o", "out", tmp_path / "leaves.py")
    plain = halfstep_run("-o", "plain", tmp_path / "leaves.py")
    assert (done.code, done.out) == (code, plain.out)
    assert "halfstep: step 4 went bad:\nmaths: `sqrt` in the forward pass" in done.err
    assert "loss = (model(x) - y.sqrt()).square().mean()" in done.err
    (only,) = read_run(tmp_path / "out").diagnoses
    assert only.step == 4


def test_a_script_that_steps_by_hand(halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text(BY_HAND)
    done = halfstep_run("--diagnose", "-o", "out", "train.py")
    assert done.code == 0, done.err
    first, second, *facts = done.err.splitlines()
    assert first == "halfstep: step 3 went bad:"
    assert second == "maths: `sqrt` in the backward pass is not finite"
    assert any("train.py:5 in <module>: loss = " in fact for fact in facts)
    (only,) = read_run(tmp_path / "out").diagnoses
    assert only.step == 3


BY_HAND = """
import torch
model = torch.nn.Linear(2, 1)
for x in 1.0, 2.0, 0.0, 3.0:
    loss = (model(torch.ones(4, 2)) * x).square().sqrt().mean()
    model.zero_grad()
    loss.backward()
    for p in model.parameters():
        p.data.add_(p.grad, alpha=-0.1)
"""


RUNS = Path(__file__).parents[1] / "diagnose" / "corpus" / "runs"


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("lars_of_an_unused_head", 6),  # an optimizer is at fault: told after its step
        ("adam_eps_zero", 1),  # and in the first step, which a record has counted then
        ("penalty_of_a_flat_critic", 1),  # whose gradient of the loss is no step
    ],
)
def test_the_number_is_that_of_the_step_that_went_bad(halfstep_run, tmp_path, name, step):
    done = halfstep_run("--diagnose", "-o", "out", RUNS / f"{name}.py")
    assert f"halfstep: step {step} went bad:\n" in done.err
    assert [each.step for each in read_run(tmp_path / "out").diagnoses] == [step]
