"""What findings say, how they are counted, and that there is none in our own code."""

from pathlib import Path

import pytest

from halfstep._tools.doctor import read_paths
from halfstep._tools.doctor.doctor import check_file, check_source
from halfstep._tools.doctor.finding import CATALOG

ROOT = Path(__file__).parents[2]
IMPORTS = "import torch\nfrom torch import nn\nfrom halfstep import GradScaler, autocast\n"


def test_functions_that_call_each_other_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_paths, "MOST_SITES", 200)
    source = "".join(
        f"def f{n}():\n" + "".join(f"    f{m}()\n" for m in range(6)) for n in range(6)
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


def test_the_code_updates_a_scaler_that_the_file_does_not_update() -> None:
    source = "scaler = GradScaler()\nscaler.scale(loss).backward()\noptimizer.step()\n"
    for update, code in (("", "\nscaler.update()"), ("scaler.update()\n", "")):
        found = check_source(IMPORTS + source + update)
        (bypassed,) = [each for each in found if each.id == "scaler-bypassed"]
        assert bypassed.code == f"scaler.step(optimizer){code}"


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
