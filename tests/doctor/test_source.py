"""What findings say, how they are counted, and that there is none in our own code."""

from pathlib import Path

import pytest

from halfstep._tools.doctor.doctor import check_file, check_source
from halfstep._tools.doctor.finding import CATALOG

ROOT = Path(__file__).parents[2]
IMPORTS = "import torch\nfrom torch import nn\nfrom halfstep import GradScaler, autocast\n"


@pytest.mark.slow
def test_functions_that_call_each_other_end() -> None:
    source = "".join(
        f"def f{n}():\n" + "".join(f"    f{m}()\n" for m in range(9)) for n in range(9)
    )
    assert check_source(IMPORTS + source + "loss.backward()\nf0()\n") == []


PATHS = [
    *(ROOT / "examples").rglob("*.py"),
    *(ROOT / "benchmarks").rglob("*.py"),
    *(ROOT / "src").rglob("*.py"),
]


@pytest.mark.slow
def test_there_is_no_false_alarm_in_our_own_code() -> None:
    assert len(PATHS) > 150
    alarms = [
        str(finding)
        for path in PATHS
        for finding in check_file(path)
        if CATALOG[finding.id] != "notice"
    ]
    assert alarms == []


@pytest.mark.parametrize(
    ("made", "text"),
    [
        ("GradScaler()", "65536 times too large"),
        ("GradScaler(init_scale=1024)", "1024 times too large"),
        ("GradScaler(init_scale=2.**10)", "1024 times too large"),
        ("torch.amp.GradScaler('cuda', 2**12)", "4096 times too large"),
        ("torch.cuda.amp.GradScaler(256.0)", "256 times too large"),
        ("GradScaler(init_scale=args.scale)", "too large by the scale"),
    ],
)
def test_a_text_names_the_scale_that_the_scaler_starts_with(made: str, text: str) -> None:
    source = f"scaler = {made}\nscaler.scale(loss).backward()\noptimizer.step()\n"
    (bypassed,) = [each for each in check_source(IMPORTS + source) if each.id == "scaler-bypassed"]
    assert text in bypassed.text
    assert bypassed.code == "scaler.step(optimizer)\nscaler.update()"
    (bypassed,) = [
        each
        for each in check_source(IMPORTS + source + "scaler.update()\n")
        if each.id == "scaler-bypassed"
    ]
    assert bypassed.code == "scaler.step(optimizer)"


def test_in_an_accumulation_unscale_belongs_to_the_pass_that_steps() -> None:
    source = (
        "for i, x in enumerate(batches):\n    scaler.scale(model(x)).backward()\n"
        "    nn.utils.clip_grad_norm_(model.parameters(), 1.0)\n"
        "    if i % 4 == 3:\n        scaler.step(optimizer)\n        scaler.update()\n"
        "        optimizer.zero_grad()\n"
    )
    (clipped,) = check_source(IMPORTS + source)
    assert clipped.id == "clip-before-unscale"
    assert "# before clipping, both only where the step is" in clipped.code
