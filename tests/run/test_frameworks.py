"""Frameworks that make autocast and the scaler themselves."""

import os
import sys
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


def alone_and_by_hand(script: str, folder: Path) -> list[list[str]]:
    """Return the lines that a script prints without the runner, as it is and with our calls."""
    name, *words = script.split()
    calls = [[SCRIPTS / name, *words], [SCRIPTS / name, *words, "hand"]]
    return [
        out.splitlines() for out in forked.one_after_another(*calls, cwd=folder, warnings="ignore")
    ]


@pytest.mark.parametrize(
    ("framework", "num_policies", "recorded"),
    # The first scale is too large for fp16.
    [("lightning", 2, "8 steps recorded, 1 skipped"), ("transformers", 4, "4 steps recorded, 0 s")],
)
def test_a_script_computes_as_alone(framework, num_policies, recorded, tmp_path):
    pytest.importorskip(framework)
    script = f"{framework}_script.py"
    (printed,) = forked.one_after_another([SCRIPTS / script], cwd=tmp_path, warnings="ignore")
    under, error = run(script, tmp_path, "--policy", "torch")
    lines = [
        [line for line in out if "runtime" not in line] for out in (printed.splitlines(), under)
    ]
    assert lines[0] == lines[1]
    assert "torch.bfloat16" in under
    assert error.count("policy: torch\n") == num_policies
    assert f"halfstep: {recorded}" in error
    if framework == "lightning":
        assert "torch.float16" in under
        assert "scaler: halfstep._tools.run.stand_ins\n" in error


def test_masters_and_guard_in_what_accelerate_launches(tmp_path):
    pytest.importorskip("accelerate")
    alone, hand = alone_and_by_hand("bf16_accelerate.py", tmp_path)
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
    assert under.out.splitlines() == hand != alone
    assert "halfstep: --masters: AdamW steps 4 bfloat16 parameters in float32" in under.err
    assert under.err.count("halfstep: --guard: ") == 1
    assert "1 process of the program recorded" in under.err


def test_masters_and_guard_in_the_trainer_of_transformers(tmp_path):
    pytest.importorskip("transformers")
    alone, hand = (lines[-1] for lines in alone_and_by_hand("bf16_transformers.py", tmp_path))
    under, error = run("bf16_transformers.py", tmp_path, "--masters", "--guard")
    assert under[-1] == hand != alone
    assert error.count("halfstep: --masters: AdamW steps 16 bfloat16 parameters") == 1
    assert "halfstep: 6 steps recorded, 0 skipped" in error


def test_masters_and_guard_in_lightning(tmp_path):
    pytest.importorskip("lightning")
    alone, hand = alone_and_by_hand("bf16_lightning.py", tmp_path)
    under, error = run("bf16_lightning.py", tmp_path, "--masters", "--guard=1.0")
    assert under == hand
    assert [one == other for one, other in zip(under, alone, strict=True)] == [False] * 5
    assert "nan" in alone
    assert "nan" not in under
    assert "halfstep: --masters: SGD steps 4 bfloat16 parameters in float32" in error
    assert "halfstep: 70 steps recorded, 2 skipped" in error


@pytest.mark.parametrize("trainer", ["sft", "grpo"])
def test_the_trainers_of_trl(trainer, tmp_path):
    pytest.importorskip("trl")
    script = f"bf16_trl.py {trainer}"
    alone, hand = (lines[-2:] for lines in alone_and_by_hand(script, tmp_path))
    assert run(script, tmp_path, "--diagnose")[0][-2:] == alone
    under, error = run(script, tmp_path, "--masters", "--guard=1.0")
    assert under[-2:] == hand != alone
    assert error.count("halfstep: --masters: AdamW steps 21 bfloat16 parameters") == 1
    assert error.count("halfstep: --guard: AdamW skips") == 1
    assert "halfstep: 8 steps recorded, 0 skipped" in error


def test_deepspeed(tmp_path):
    pytest.importorskip("deepspeed")

    def weights(out: list[str]) -> list[str]:
        return [line for line in out if line.startswith("weights:")]

    alone, hand = map(weights, alone_and_by_hand("bf16_deepspeed.py", tmp_path))
    assert weights(run("bf16_deepspeed.py", tmp_path, "--diagnose")[0]) == alone
    out, error = run("bf16_deepspeed.py", tmp_path, "--masters", "--guard=1.0")
    under = weights(out)
    assert under == hand
    assert "weights: nan" in alone
    assert under[1:4] == alone[1:4]  # DeepSpeed has float32 masters there, and skips by itself
    assert under[4] == under[5] == under[3] != alone[4]
    assert "--masters: AdamW steps 1 bfloat16 parameter in float32 (store: split)" in error
    assert "--masters: AdamW steps 4 bfloat16 parameters in float32 (store: split)" in error
