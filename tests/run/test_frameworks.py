"""Frameworks that make autocast and the scaler themselves."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests import forked

SCRIPTS = Path(__file__).parent / "corpus" / "scripts"


def both(script: str, folder: Path) -> tuple[str, str, str]:
    """Return what a script prints alone and under the runner, and stderr of the latter."""
    path = SCRIPTS / script
    command = [sys.executable, "-W", "ignore", path]
    alone = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert alone.returncode == 0, alone.stderr
    runner = "-m", "halfstep", "run", "--policy", "torch"
    under = forked.python(*runner, path, cwd=folder, warnings="ignore")
    assert under.code == 0, under.err
    return alone.stdout, under.out, under.err


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_lightning(tmp_path):
    alone, under, error = both("lightning_script.py", tmp_path)
    assert under == alone
    assert "torch.bfloat16\n" in under
    assert "torch.float16\n" in under
    assert error.count("policy: torch\n") == 2
    assert "scaler: halfstep._tools.run.stand_ins\n" in error
    assert "halfstep: 8 steps recorded, 1 skipped" in error  # the first scale is too large for fp16


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_the_trainer_of_transformers(tmp_path):
    alone, under, error = both("transformers_script.py", tmp_path)

    def numbers(out: str) -> list[str]:
        return [line for line in out.splitlines() if "train_runtime" not in line]

    assert numbers(under) == numbers(alone)
    assert "torch.bfloat16\n" in under
    assert error.count("policy: torch\n") == 4
    assert "halfstep: 4 steps recorded, 0 skipped" in error


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_masters_and_guard_in_what_accelerate_launches(tmp_path):
    path = SCRIPTS / "bf16_accelerate.py"
    alone, hand = (forked.python(path, *words, cwd=tmp_path) for words in ([], ["hand"]))
    launcher = "accelerate launch --cpu --num_processes 1 --num_machines 1"
    launcher += " --mixed_precision no --dynamo_backend no"
    runner = "-m", "halfstep", "run", "--masters", "--guard=1.0"
    under = subprocess.run(
        [sys.executable, *runner, *launcher.split(), str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env=os.environ
        | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"},
    )
    assert under.returncode == 0, under.stderr
    assert under.stdout == hand.out != alone.out
    assert "halfstep: --masters: AdamW steps 4 bfloat16 parameters in float32" in under.stderr
    assert under.stderr.count("halfstep: --guard: ") == 1
    assert "1 process of the program recorded" in under.stderr


@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_masters_and_guard_in_the_trainer_of_transformers(tmp_path):
    path = SCRIPTS / "bf16_transformers.py"

    def run(folder: str, *words: object) -> tuple[str, str]:
        (tmp_path / folder).mkdir()  # for checkpoints
        done = forked.python(*words, cwd=tmp_path / folder, warnings="ignore")
        assert done.code == 0, done.err
        return done.out.splitlines()[-1], done.err

    alone, hand = run("alone", path)[0], run("hand", path, "hand")[0]
    under, error = run("under", "-m", "halfstep", "run", "--masters", "--guard", path)
    assert under == hand != alone
    assert error.count("halfstep: --masters: AdamW steps 16 bfloat16 parameters") == 1
    assert "halfstep: 6 steps recorded, 0 skipped" in error


@pytest.mark.skipif(find_spec("lightning") is None, reason="lightning is not installed")
def test_masters_and_guard_in_lightning(tmp_path):
    path = SCRIPTS / "bf16_lightning.py"

    def run(*words: object) -> tuple[list[str], str]:
        done = forked.python(*words, cwd=tmp_path, warnings="ignore")
        assert done.code == 0, done.err
        return done.out.splitlines(), done.err

    alone, hand = run(path)[0], run(path, "hand")[0]
    under, error = run("-m", "halfstep", "run", "--masters", "--guard=1.0", path)
    assert under == hand
    assert [one == other for one, other in zip(under, alone, strict=True)] == [False] * 5
    assert "nan" in alone
    assert "nan" not in under
    assert "halfstep: --masters: SGD steps 4 bfloat16 parameters in float32" in error
    assert "halfstep: 70 steps recorded, 2 skipped" in error


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
@pytest.mark.parametrize("trainer", ["sft", "grpo"])
def test_the_trainers_of_trl(trainer, tmp_path):
    path = SCRIPTS / "bf16_trl.py"

    def run(*words: object) -> tuple[list[str], str]:
        offline = {"HF_HUB_OFFLINE": "1"}
        done = forked.python(*words, trainer, cwd=tmp_path, environ=offline, warnings="ignore")
        assert done.code == 0, done.err
        return done.out.splitlines()[-2:], done.err

    alone, hand = run(path)[0], run(path, "hand")[0]
    runner = "-m", "halfstep", "run"
    assert run(*runner, "--diagnose", path)[0] == alone
    under, error = run(*runner, "--masters", "--guard=1.0", path)
    assert under == hand != alone
    assert error.count("halfstep: --masters: AdamW steps 21 bfloat16 parameters") == 1
    assert error.count("halfstep: --guard: AdamW leaves out") == 1
    assert "halfstep: 8 steps recorded, 0 skipped" in error


@pytest.mark.skipif(find_spec("deepspeed") is None, reason="deepspeed is not installed")
def test_deepspeed(tmp_path):
    path = SCRIPTS / "bf16_deepspeed.py"

    def run(*words: object) -> tuple[list[str], str]:
        done = forked.python(*words, cwd=tmp_path, warnings="ignore")
        assert done.code == 0, done.err
        return [line for line in done.out.splitlines() if line.startswith("weights:")], done.err

    alone, hand = run(path)[0], run(path, "hand")[0]
    runner = "-m", "halfstep", "run"
    assert run(*runner, "--diagnose", path)[0] == alone
    under, error = run(*runner, "--masters", "--guard=1.0", path)
    assert under == hand
    assert "weights: nan" in alone
    assert under[1:4] == alone[1:4]  # DeepSpeed has float32 masters there, and skips by itself
    assert under[4] == under[5] == under[3] != alone[4]
    assert "--masters: AdamW steps 1 bfloat16 parameter in float32 (store: split)" in error
    assert "--masters: AdamW steps 4 bfloat16 parameters in float32 (store: split)" in error
