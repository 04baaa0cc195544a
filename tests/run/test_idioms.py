"""What public code does with scalers and autocast: the same output with and without halfstep.

Each file of ``corpus/idioms`` is a program of our own; where PyTorch trains wrongly without a word,
or ends with another error, a line ``# expect:`` has what halfstep says.
"""

import re
from pathlib import Path

import pytest
from tests import forked

IDIOMS = Path(__file__).parent / "corpus" / "idioms"
NAMES = sorted({file.stem for file in IDIOMS.glob("*.py")} - {"prelude"})


@pytest.mark.parametrize("name", NAMES)
def test_an_idiom_does_what_it_does_under_python(name, halfstep_run, tmp_path):
    script = IDIOMS / f"{name}.py"
    alone = forked.python(script, cwd=tmp_path)
    done = halfstep_run(script)
    assert alone.code == 0, alone.err
    assert (done.code, done.out) == (alone.code, alone.out)
    for expected in re.findall("^# expect: (.*)$", script.read_text(), re.M):
        assert expected in done.err


def test_the_warning_names_the_line_of_the_script(halfstep_run):
    script = IDIOMS / "unscale_then_more.py"
    done = halfstep_run(script)
    line = int(re.search(r"more\.py:(\d+): HalfstepWarning: step\(SGD\)", done.err)[1])
    assert script.read_text().splitlines()[line - 1].strip() == "scaler.step(opt)"


def test_gradients_of_two_scales_are_reported_once_with_the_cure(halfstep_run):
    done = halfstep_run(IDIOMS / "two_cadences.py")
    assert done.err.count("were accumulated at scale") == 1
    assert "use one GradScaler for each cadence" in done.err
    assert "HalfstepWarning" not in done.err


# A script without mixed precision that guards its steps by itself, under --amp fp16.
GUARDED = """
import sys, torch

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
x, steps = 40 * torch.randn(16, 8), 0
for _ in range(60):
    (model if sys.argv[1] == "module" else optimizer).zero_grad()
    (model(x).square().mean() * 20).backward()
    ends = sys.argv[1] == "ends"
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=ends)
    if ends or norm.isfinite():
        optimizer.step()
        steps += 1
print(steps)
"""


@pytest.mark.parametrize(("how", "steps"), [("optimizer", 48), ("module", 48), ("ends", 60)])
def test_a_script_that_guards_its_steps_takes_them(how, steps, halfstep_run, tmp_path):
    """The scale comes down from 2^16 in the 12 iterations whose step is left out or skipped."""
    (tmp_path / "train.py").write_text(GUARDED)
    done = halfstep_run("--amp", "fp16", "train.py", how)
    assert (done.code, done.out) == (0, f"{steps}\n"), done.err


def test_an_overflow_at_the_smallest_scale_still_ends_a_script_that_asks_for_it(
    halfstep_run, tmp_path
):
    (tmp_path / "train.py").write_text(GUARDED.replace("* 20", "* float('inf')"))
    done = halfstep_run("--amp", "fp16", "train.py", "ends")
    assert done.code == 1
    assert "non-finite" in done.err
