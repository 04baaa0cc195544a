import shutil
import sys
from pathlib import Path

import pytest
import torch
from tests.cli.called import called

from halfstep import Policy
from halfstep._tools.cli import main

pytestmark = pytest.mark.slow

CORPUS = Path(__file__).parent / "corpus" / "tuned"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(CORPUS, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path / "script.py"


def test_it_writes_the_policy(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = called(capsys, "tune", f"{script}:make", "-o", "policy.toml")
    assert (code, err) == (0, "")
    assert out.startswith("fp16: 1 module in fp32 is needed and enough (the model has 4 modules)\n")
    assert out.endswith("written to policy.toml\n")
    assert Policy.load("policy.toml") == Policy.parse("standard; @1:fp32")


def test_options(script: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = called(capsys, "tune", "script:make", "--dtype", "bf16", "--policy", "torch")
    assert (code, out.splitlines()[:2]) == (
        0,
        ["bf16: 4 modules within bounds, nothing has to stay in fp32", "policy: torch"],
    )
    code, out, _ = called(capsys, "tune", "script:make", "--dtype", "bf16", "--error", "1e-7")
    assert (code, "3 modules in fp32 are needed" in out) == (0, True)
    assert not Path("policy.toml").exists()


def test_without_a_policy_that_is_enough_the_exit_code_is_1(script, capsys):
    code, out, _ = called(capsys, "tune", "script.py:late", "-o", "policy.toml")
    assert (code, "NOT within bounds" in out) == (1, True)
    assert Path("policy.toml").exists()


def test_ctrl_c_ends_it(script, capsys):
    assert called(capsys, "tune", "script.py:stops") == (130, "", "\nInterrupted.\n")


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["nothing.py:make"], "nothing.py: No such file or directory"),
        (["script.py"], "'script.py' names no function: write file.py:function or package.module"),
        (["script.py:mak"], "script.py has no function 'mak'; did you mean 'make'?"),
        (["nothing:make"], "there is no module 'nothing' here; for a file write nothing.py:"),
        (["script.py:one"], "script.py:one returned Sequential: return (model, batches, loss_fn)"),
        (["script.py:two"], "script.py:two returned 2 values: return (model, batches, loss_fn)"),
        (["script.py:half"], "script.py:half: results are compared with those in float32, and "),
        (["script.py:no_batches"], "script.py:no_batches: batches is empty"),
        (["script.py:make", "--policy", "standart"], "did you mean 'standard'?"),
        (["script.py:make", "-o", "no/policy.toml"], "there is no folder no to write policy.toml"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(script, capsys, argv, message):
    code, out, err = called(capsys, "tune", *argv)
    assert (code, out) == (2, "")
    assert err.startswith("halfstep tune: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("value", "message"), [("x", "'x' is not a number"), ("0", "0 is not above 0 and finite")]
)
def test_wrong_errors(capsys: pytest.CaptureFixture[str], value: str, message: str) -> None:
    with pytest.raises(SystemExit):
        main(["tune", "script.py:make", "--error", value])
    assert message in capsys.readouterr().err


def test_what_the_script_raises_passes_through(script: Path) -> None:
    script.write_text("import no_such_module\ndef make(): pass\n")
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        main(["tune", f"{script}:make"])
    script.write_text("def make(): return 1 / 0\n")
    with pytest.raises(ZeroDivisionError):
        main(["tune", f"{script}:make"])
    assert not torch.is_autocast_enabled("cpu")


def test_a_target_that_is_no_python_is_one_line(tmp_path, capsys):
    target = tmp_path / "broken.py"
    target.write_text("def make(:\n")
    assert main(["tune", f"{target}:make"]) == 2
    assert capsys.readouterr().err.startswith(f"halfstep tune: {target}:1: ")


def test_the_function_is_looked_for_before_the_file_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text("raise SystemExit('it ran')\ndef make(): ...\ndef other(): ...\n")
    assert called(capsys, "tune", "model.py:made")[2].endswith("did you mean 'make'?\n")
    assert called(capsys, "tune", "model.py:x")[2].endswith("its functions are make, other\n")
    with pytest.raises(SystemExit, match="it ran"):
        called(capsys, "tune", "model.py:make")


@pytest.mark.parametrize(
    "source",
    ["from helper import make", "from helper import *", "globals()['make'] = 1", "make = 1"],
)
def test_a_function_may_come_from_elsewhere(source, script, capsys):
    script.write_text("raise SystemExit('it ran')\n" + source)
    with pytest.raises(SystemExit, match="it ran"):
        called(capsys, "tune", "script.py:make")
