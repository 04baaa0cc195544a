"""The page that `make gpu` writes: its form, and that there is none without a GPU."""

from __future__ import annotations

import sys

import pytest
import torch
from benchmarks import gpu
from benchmarks.gpu import Done, Part

STEP = """\
0.2 M parameters, 2 x 256 tokens, bfloat16; some GPU, PyTorch 2.13.0
                                          ms    to torch.autocast         to float32
torch.autocast, again                    4.4    1.001 (0.990-1.010)    0.700 (0.600-0.800)
halfstep.autocast                        4.4    1.010 (0.999-1.020)    0.710 (0.610-0.810)
medians; in brackets the quartiles of the ratios within a round"""

GRADIENTS = """\
                                               ms torch.amp   ours to torch.amp           noise
GPT 43M   float32   fused  step(max_norm)        13.33     31.14    0.437 (0.346-0.462)    1.0"""


def test_the_page_has_versions_ratios_and_what_was_printed() -> None:
    step = Done(Part("A step", ("step.py", "--rounds", "4"), has_ratios=True), 0, STEP)
    gradients = Done(Part("Gradients", ("gradients.py",), has_ratios=True), 0, GRADIENTS)
    casts = Done(Part("Casts", ("casts.py",)), 0, STEP)
    page = gpu.page("On a GPU: X", {"device": "X", "driver": "1.2"}, [step, gradients, casts])
    assert page.startswith("---\norphan: true\n---\n\n# On a GPU: X\n")  # no toctree needs it
    assert "| driver | 1.2 |" in page
    assert "All commands succeeded." in page
    assert page.count("| A step | halfstep.autocast | 1.010 (0.999-1.020) |") == 1
    assert "| Gradients | GPT 43M float32 fused step(max_norm) | 0.437 (0.346-0.462) |" in page
    assert "| Casts |" not in page
    assert "## Casts\n\n`python casts.py`\n\n```text\n0.2 M parameters" in page


def test_a_failure_stands_at_the_top_with_the_end_of_what_was_printed() -> None:
    output = "\n".join(f"line {number}" for number in range(200))
    page = gpu.page("X", {"device": "X"}, [Done(Part("Tests", ("-m", "pytest")), 3, output)])
    assert "**Failed**: Tests." in page
    assert "`python -m pytest` failed with exit code 3" in page
    assert "line 199" in page
    assert "line 100\n" not in page


def test_without_a_gpu_nothing_is_run_or_written(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(gpu, "run", lambda part: pytest.fail(part.title))
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: None)
    for arguments in ([], ["--device", "cuda"]):
        monkeypatch.setattr(sys, "argv", ["gpu.py", *arguments])
        assert gpu.main() == 1
        assert "sees no GPU here" in capsys.readouterr().err
    assert not gpu.PAGE.exists()


def test_on_a_gpu_the_page_is_written_and_on_a_cpu_printed(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(gpu, "run", lambda part: Done(part, 0, ""))
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", "cpu"])
    assert gpu.main() == 0
    assert "# No GPU: the form of the page" in capsys.readouterr().out
    assert not gpu.PAGE.exists()
    device = torch.device("cuda")
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: device)
    monkeypatch.setattr(gpu, "device_name", lambda device: "some GPU")
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 0
    assert "# On a GPU: some GPU\n" in gpu.PAGE.read_text()


def test_commands_are_files_that_are_there() -> None:
    for quick in (True, False):
        for part in gpu.parts("cuda", quick=quick):
            assert part.command[0] == "-m" or (gpu.ROOT / part.command[0]).exists()
