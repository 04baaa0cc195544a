"""Frameworks that make autocast and the scaler themselves."""

import functools
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests import forked

SCRIPTS = Path(__file__).parent / "corpus" / "scripts"


def run(script: str, folder: Path, *options: object) -> tuple[list[str], str]:
    """Return the lines that a script prints under the runner, and stderr."""
    name, *words = script.split()
    runner = "-m", "halfstep", "run", *options, SCRIPTS / name, *words
    offline = {"HF_HUB_OFFLINE": "1"}
    done = forked.python(*runner, cwd=folder, environ=offline, warnings="ignore")
    assert done.code == 0, done.err
    return done.out.splitlines(), done.err


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., list[list[str]]]:
    """Returns a function: the lines that each script prints without the runner, in one process."""

    @functools.cache
    def run_alone(*scripts: str) -> list[list[str]]:
        calls = [[SCRIPTS / name, *words] for name, *words in map(str.split, scripts)]
        folder = tmp_path_factory.mktemp("alone")
        printed = forked.one_after_another(*calls, cwd=folder, warnings="ignore")
        return [out.splitlines() for out in printed]

    return run_alone


LIGHTNING = "lightning_script.py", "bf16_lightning.py", "bf16_lightning.py hand"
TRANSFORMERS = "transformers_script.py", "bf16_transformers.py", "bf16_transformers.py hand"


@pytest.mark.parametrize(
    ("framework", "scripts", "num_policies", "recorded"),
    # The first scale is too large for fp16.
    [
        ("lightning", LIGHTNING, 2, "8 steps recorded, 1 skipped"),
        ("transformers", TRANSFORMERS, 4, "4 steps recorded, 0 s"),
    ],
)
def test_a_script_computes_as_alone(framework, scripts, num_policies, recorded, alone, tmp_path):
    pytest.importorskip(framework)
    under, error = run(scripts[0], tmp_path, "--policy", "torch")
    lines = [[line for line in out if "runtime" not in line] for out in (alone(*scripts)[0], under)]
    assert lines[0] == lines[1]
    assert "torch.bfloat16" in under
    assert error.count("policy: torch\n") == num_policies
    assert f"halfstep: {recorded}" in error
    if framework == "lightning":
        assert "torch.float16" in under
        assert "scaler: halfstep._tools.run.stand_ins\n" in error


def test_masters_and_guard_in_what_accelerate_launches(alone, tmp_path):
    pytest.importorskip("accelerate")
    plain, hand = alone("bf16_accelerate.py", "bf16_accelerate.py hand")
    launcher = "accelerate launch --cpu --num_processes 1 --num_machines 1"
    launcher += " --mixed_precision no --dynamo_backend no"
    runner = "-m", "halfstep", "run", "--masters", "--guard=1.0"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    under = forked.python(
        *runner,
        *launcher.split(),
        SCRIPTS / "bf16_accelerate.py",
        cwd=tmp_path,
        environ={"PATH": path},
    )
    assert under.code == 0, under.err
    assert under.out.splitlines() == hand != plain
    masters = "halfstep: process-1, --masters: AdamW steps 4 bfloat16 parameters in float32"
    assert masters in under.err
    assert under.err.count("halfstep: process-1, --guard: ") == 1
    assert "1 process of the program recorded" in under.err


def test_masters_and_guard_in_the_trainer_of_transformers(alone, tmp_path):
    pytest.importorskip("transformers")
    _, plain, hand = (lines[-1] for lines in alone(*TRANSFORMERS))
    under, error = run("bf16_transformers.py", tmp_path, "--masters", "--guard")
    assert under[-1] == hand != plain
    assert error.count("halfstep: --masters: AdamW steps 16 bfloat16 parameters") == 1
    assert "halfstep: 6 steps recorded, 0 skipped" in error


def test_masters_and_guard_in_lightning(alone, tmp_path):
    pytest.importorskip("lightning")
    _, plain, hand = alone(*LIGHTNING)
    under, error = run("bf16_lightning.py", tmp_path, "--masters", "--guard=1.0")
    assert under == hand
    assert [one == other for one, other in zip(under, plain, strict=True)] == [False] * 5
    assert "nan" in plain
    assert "nan" not in under
    assert "halfstep: --masters: SGD steps 4 bfloat16 parameters in float32" in error
    assert "halfstep: 70 steps recorded, 2 skipped" in error


@pytest.mark.parametrize("trainer", ["sft", "grpo"])
def test_the_trainers_of_trl(trainer, alone, tmp_path):
    pytest.importorskip("trl")
    script = f"bf16_trl.py {trainer}"
    plain, hand = (lines[-2:] for lines in alone(script, f"{script} hand"))
    assert run(script, tmp_path, "--diagnose")[0][-2:] == plain
    under, error = run(script, tmp_path, "--masters", "--guard=1.0")
    assert under[-2:] == hand != plain
    assert error.count("halfstep: --masters: AdamW steps 21 bfloat16 parameters") == 1
    assert error.count("halfstep: --guard: AdamW skips") == 1
    assert "halfstep: 8 steps recorded, 0 skipped" in error


def test_deepspeed(alone, tmp_path):
    pytest.importorskip("deepspeed")

    def weights(out: list[str]) -> list[str]:
        return [line for line in out if line.startswith("weights:")]

    plain, hand = map(weights, alone("bf16_deepspeed.py", "bf16_deepspeed.py hand"))
    assert weights(run("bf16_deepspeed.py", tmp_path, "--diagnose")[0]) == plain
    out, error = run("bf16_deepspeed.py", tmp_path, "--masters", "--guard=1.0")
    under = weights(out)
    assert under == hand
    assert "weights: nan" in plain
    assert under[1:4] == plain[1:4]  # DeepSpeed has float32 masters there, and skips by itself
    assert under[4] == under[5] == under[3] != plain[4]
    assert "--masters: AdamW steps 1 bfloat16 parameter in float32 (store: split)" in error
    assert "--masters: AdamW steps 4 bfloat16 parameters in float32 (store: split)" in error
