import argparse
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from unittest.mock import Mock

import pytest
from tests import forked
from tests.cli.called import in_an_empty_folder as in_an_empty_folder

from halfstep._tools.cli import _build_parser, main
from halfstep._tools.cli.run import _note_options, add_arguments

pytestmark = pytest.mark.slow

SCRIPTS = Path(__file__).parents[1] / "run" / "corpus" / "scripts"


def test_help(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", "--help"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for word in (
        "--diagnose[=SECONDS]",
        "--policy",
        "--output",
        "--every",
        "--quiet",
        "--amp",
        "--masters",
        "--guard[=MAX_NORM]",
        "--guard-ranks {alone,together}",
        "torchrun",
        "default: 50",
    ):
        assert word in out


@pytest.mark.parametrize("arguments", [[], ["-q"], ["-m"], ["--"]])
def test_without_a_target_it_shows_the_help(arguments, capsys):
    assert main(["run", *arguments]) == 2
    assert capsys.readouterr().out.startswith("usage: halfstep run [options] [-m] target")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sink", "wandb", "train.py"], "unrecognized arguments: --sink"),
        (["--no-such-option", "train.py"], "unrecognized arguments: --no-such-option"),
        (["--pol", "fp32", "train.py"], "unrecognized arguments: --pol; did you mean"),
        (["--every", "-1", "train.py"], "argument --every: '-1' is not a number of steps"),
        (["--every", "x", "train.py"], "argument --every: 'x' is not a number of steps: write 50"),
        (["--amp", "fp8", "train.py"], "argument --amp: 'fp8': choose one of fp16, bf16"),
        (["--masters=split", "train.py"], "argument --masters: ignored explicit argument 'split'"),
        (["--guard-ranks=all", "train.py"], "'all': choose one of alone, together"),
        (["--guard=x", "train.py"], "'x' is not a norm to clip to: write --guard=1.0"),
        (["--guard=0", "train.py"], "'0' is not a norm to clip to"),
        (["--diagnose=x", "train.py"], "'x' is not a number of seconds: write --diagnose=60"),
        (["--diagnose=nan", "train.py"], "'nan' is not a number of seconds"),
        (["--diagnose=-1", "train.py"], "'-1' is not a number of seconds"),
        (["--guard=nan", "train.py"], "'nan' is not a norm to clip to"),
    ],
)
def test_unknown_options_are_errors_of_usage(arguments, words, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["run", *arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "no-such-preset", "train.py"], "'no-such-preset'"),
        (["--policy", "mul:fp32", "train.py"], "got 'mul:fp32'; did you mean 'standard; mul:"),
        (["--policy", "standard; exp:leaf", "a.py"], "policy rule 'exp:leaf': unknown action"),
        (["--policy", "mien.policy", "a.py"], "No such file or directory; did you mean 'mine."),
        (["--policy", "wrong.policy", "a.py"], "wrong.policy: policy rule 'exp:leaf': unknown"),
        (["no-such.py"], "can't open file 'no-such.py': No such file or directory"),
        (["--guard", "1.0", "a.py"], "; if it is the value of --guard: --guard=1.0"),
        (["--amp", "fp16", "--guard", "train.py"], "leave --guard and --masters out, or use --amp"),
        (["--masters", "--amp=fp16", "train.py"], "leave --guard and --masters out, or use --amp"),
        (["--guard-ranks=alone", "train.py"], "ranks of --guard decide: add --guard"),
        (["-o", "train.py/x", "train.py"], "cannot write the record to "),
    ],
)
def test_mistakes_are_one_line_before_the_script_starts(arguments, message, capsys, tmp_path):
    (tmp_path / "train.py").write_text("raise AssertionError('started')")
    (tmp_path / "mine.policy").write_text("standard\n")
    (tmp_path / "wrong.policy").write_text("standard\nexp:leaf\n")
    assert main(["run", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("halfstep run: ")
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "masters", "guard", "target"),
    [
        (["train.py", "--guard"], False, None, ["train.py", "--guard"]),
        (["--masters", "--guard", "train.py", "7"], True, 0.0, ["train.py", "7"]),
        (["--masters", "--guard=0.5", "-m", "train"], True, 0.5, ["train"]),
        (["-o", "out", "--masters", "--", "--guard"], True, None, ["--", "--guard"]),
        (["--every", "3", "--masters", "train.py"], True, None, ["train.py"]),
    ],
)
def test_a_value_of_guard_comes_after_an_equals_sign(words, masters, guard, target):
    given = _build_parser().parse(["run", *words])
    assert (given.masters, given.guard, given.target) == (masters, guard, target)


def test_a_policy_may_be_in_a_file(tmp_path):
    (tmp_path / "my.policy").write_text("fp32\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import halfstep, torch\nmodel = torch.nn.Linear(2, 2)\n"
        "with torch.autocast('cpu'), halfstep.trace(model):\n"
        "    print(model(torch.ones(2)).dtype)\n"
        "import sys; print(sorted({'lightning', 'torch._dynamo',"
        " 'torch.distributed.fsdp'} & set(sys.modules)))\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "halfstep", "run", "--policy", "my.policy", "-o", "out", script],
        capture_output=True,
        text=True,
    )
    assert done.stdout == "torch.float32\n[]\n"
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.returncode == 0


def launched(module: str, *words: object) -> forked.Done:
    code = f"import runpy, sys; sys.argv = {[module, *map(str, words)]}; "
    code += f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    return forked.python("-c", code, cwd=Path.cwd(), environ={"PYTHONWARNINGS": "ignore"})


def test_every_rank_that_torchrun_starts_records_into_one_folder(tmp_path):
    launcher = ("torch.distributed.run", "--nproc-per-node", 2, "-m")
    done = launched(*launcher, "halfstep", "run", SCRIPTS / "ranks.py", "--help")
    assert done.code == 0, done.err
    assert sorted(done.out.splitlines()) == [
        "scaler of halfstep on rank 0",
        "scaler of halfstep on rank 1",
    ]
    (folder,) = (tmp_path / "runs").iterdir()
    assert sorted(file.name for file in folder.iterdir()) == ["rank0.jsonl", "rank1.jsonl"]
    assert done.err.count("halfstep: 3 steps recorded, 0 skipped; ") == 1
    assert done.err.count("halfstep report") == 1


@pytest.mark.skipif(find_spec("accelerate") is None, reason="accelerate is not installed")
def test_accelerate_launch(tmp_path):
    launcher = "accelerate.commands.launch --cpu --num_processes 1 --num_machines 1"
    launcher += " --mixed_precision no --dynamo_backend no -m"
    done = launched(*launcher.split(), "halfstep", "run", "-o", "out", SCRIPTS / "recipe.py")
    assert done.code == 0, done.err
    assert done.err.endswith("(products: float32): halfstep report out\n")
    assert (tmp_path / "out" / "rank0.jsonl").exists()


def test_a_script_that_is_not_there_is_looked_for(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scripts").mkdir()
    for name in ("train.py", "eval.py"):
        (tmp_path / "scripts" / name).write_text("")
    assert main(["run", "scripts/trian.py"]) == 2
    assert capsys.readouterr().err == (
        "halfstep run: can't open file 'scripts/trian.py': No such file or directory; "
        "did you mean 'scripts/train.py'?\n"
    )


def test_a_folder_that_may_not_be_listed_has_no_near_names(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(Path, "iterdir", Mock(side_effect=PermissionError))
    assert main(["run", "trian.py"]) == 2
    assert capsys.readouterr().err == (
        "halfstep run: can't open file 'trian.py': No such file or directory\n"
    )


@pytest.mark.parametrize(
    ("source", "is_told"),
    [
        ("from torch.amp import autocast", True),
        ("parser.add_argument('--amp')", False),
        ("def main(amp): ...", False),
    ],
)
def test_an_option_after_a_script_that_does_not_know_it(source, is_told, tmp_path, capsys):
    script = tmp_path / "train.py"
    script.write_text(source)
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    _note_options(str(script), ["--amp=fp16", "--other"], parser)
    assert ("--amp comes after" in capsys.readouterr().err) == is_told
