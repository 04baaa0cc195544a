"""The baseline of benchmarks, a process that halfstep has not touched; and `make gpu`'s page."""

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from benchmarks import baseline, gpu
from benchmarks.gpu import Done, Part

# Scripts that run torch.amp and measure no ratio to it: what they compare.
NO_RATIOS = {
    "accelerator_ops.py": "ops on a simulated device; torch.amp's are counted first",
    "architectures.py": "bits",
    "ranks_counts.py": "collectives",
}


def test_every_ratio_to_torch_amp_is_to_a_process_of_its_own() -> None:
    scripts = {path.name: path.read_text() for path in (gpu.ROOT / "benchmarks").glob("*.py")}
    calls = re.compile(r"torch\.(amp\.GradScaler|autocast[(,])")
    found = {name for name, text in scripts.items() if calls.search(text)}
    assert found - {name for name in found if "measure(" in scripts[name]} == NO_RATIOS.keys()


def runs(library: Any, enters: bool) -> dict[str, Callable[[], object]]:
    def run() -> int:
        import halfstep

        with (halfstep if enters else library).autocast("cpu", torch.bfloat16):
            return os.getpid()

    return {library.__name__: run}


@pytest.mark.slow
def test_each_library_has_a_process_and_torch_amp_must_not_enter_halfstep(capfd) -> None:
    found = baseline.measure(runs, False, rounds=2)
    assert found.keys() == {"torch.amp", "torch.amp, again", "halfstep"}
    assert len({os.getpid(), *(number for (number, _) in found.values())}) == 4
    with baseline.process(runs, "torch.amp", (True,)) as connection:
        connection.send(*connection.recv())
        with pytest.raises(EOFError):
            connection.recv()
    assert "the process of torch.amp enters halfstep" in capfd.readouterr().err


ROW = "halfstep.autocast                        4.4    1.010 (0.999-1.020)    0.710 (0.610-0.810)"


def test_the_page_has_versions_ratios_and_what_was_printed() -> None:
    step = Done(Part("A step", ("step.py", "--rounds", "4")), 0, f"4 rounds\n{ROW}")
    lines = "\n".join(f"line {number}" for number in range(200))
    failed = Done(Part("Tests", ("-m", "pytest"), has_ratios=False), 3, f"{ROW}\n{lines}")
    page = gpu.page("On a GPU: X", {"device": "X", "driver": "1.2"}, [step, failed])
    assert page.startswith("---\norphan: true\n---\n\n# On a GPU: X\n")  # no toctree needs it
    assert "| driver | 1.2 |" in page
    assert "**Failed**: Tests." in page
    assert page.count("| halfstep.autocast | 1.010 (0.999-1.020) |") == 1
    assert "## A step\n\n`python step.py --rounds 4`\n\n```text\n4 rounds\n" in page
    assert "`python -m pytest` failed with exit code 3" in page
    assert ("line 199" in page, "line 100\n" in page) == (True, False)


def test_without_a_gpu_nothing_is_written(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(gpu, "PAGE", tmp_path / "gpu.md")
    monkeypatch.setattr(gpu, "run", lambda part: Done(part, 0, ""))
    device = torch.device("cuda")
    for found, argument, code in [(None, "cuda", 1), (None, "cpu", 0), (device, "cuda", 0)]:
        monkeypatch.setattr(
            torch.accelerator, "current_accelerator", lambda found=found, **_: found
        )
        monkeypatch.setattr(gpu, "device_name", lambda device: "some GPU")
        monkeypatch.setattr(sys, "argv", ["gpu.py", "--device", argument])
        assert (gpu.main(), gpu.PAGE.exists()) == (code, found is not None)
    assert "sees no GPU here" in capsys.readouterr().err
    assert all((gpu.ROOT / p.command[0]).exists() for p in gpu.parts("cuda", quick=True)[:-1])
