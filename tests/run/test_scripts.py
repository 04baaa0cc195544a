"""Training scripts that do not know of halfstep; PyTorch alone is the reference."""

import json
import re
from pathlib import Path

import pytest
from tests import forked

SCRIPTS = Path(__file__).parent / "corpus" / "scripts"
TRAIN = (SCRIPTS.parent / "children" / "work.py").read_text()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_gpt_trainer(dtype, halfstep_run, tmp_path):
    arguments = (SCRIPTS / "gpt_trainer.py", SCRIPTS / "small_settings.py", f"--dtype={dtype}")
    alone = forked.python(*arguments, cwd=tmp_path)
    done = halfstep_run(*arguments)  # to the bit, without a word
    assert done.code == 0, done.err
    assert done.out == alone.out.replace("torch.amp.grad_scaler", "halfstep._tools.run.stand_ins")
    assert "halfstep._tools.run.stand_ins" in done.out
    assert "halfstep: 4 steps recorded, 0 skipped; " in done.err


def test_the_policy_of_the_command_line_holds(halfstep_run):
    """Where PyTorch has no rule on the CPU, ours runs the softmax of the attention in fp32."""
    arguments = (SCRIPTS / "gpt_trainer.py", "--num_steps=1")
    as_torch = halfstep_run("-q", *arguments)
    fp32 = halfstep_run("-q", "--policy", "fp32", *arguments)
    assert "torch.bfloat16" in as_torch.out
    assert "torch.float32" in fp32.out
    assert as_torch.err == fp32.err == ""


def test_a_compiled_model(halfstep_run):
    arguments = (SCRIPTS / "gpt_trainer.py", "--num_steps=1", "--compiled=True")
    done = halfstep_run("-q", "--policy", "fp32", *arguments)
    assert done.code == 0, done.err
    assert "torch.float32" in done.out


def test_the_old_recipe_on_a_machine_without_cuda(halfstep_run, tmp_path):
    """It trains in fp32, and is told so."""
    alone = forked.python(SCRIPTS / "recipe.py", cwd=tmp_path)
    done = halfstep_run(SCRIPTS / "recipe.py")
    assert done.code == 0, done.err
    assert done.out == alone.out
    assert (
        "recipe.py:10: HalfstepWarning: GradScaler for 'cuda', but PyTorch sees no CUDA" in done.err
    )
    assert "recipe.py:13: HalfstepWarning: autocast('cuda'), but PyTorch sees no CUDA" in done.err


def test_compiled_and_recomputed_code_runs_by_the_policy(python, tmp_path):
    """torch.compile and torch.utils.checkpoint look up PyTorch's names too.

    In a process of its own: torch.compile must be imported while the names are replaced.
    """
    policy = ["--policy", "standard; softmax:lower", SCRIPTS / "compiled.py"]
    done = python("-W", "ignore", "-m", "halfstep", "run", "-q", "-o", tmp_path, *policy)
    assert done.code == 0, done.err
    for name in ("inside", "by_the_old_name", "by_the_long_name", "made_outside", "around"):
        assert f"{name} bfloat16 bfloat16 float32\n" in done.out
    assert "island float32 bfloat16 float32\n" in done.out
    assert done.out.count("recomputed bfloat16 bfloat16 float32\n") == 2


def events(folder: Path) -> list[dict]:
    (file,) = folder.glob("*.jsonl")
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("end", "code", "error"),
    [
        ("", 0, None),
        ("raise SystemExit(0)", 0, None),
        ("raise SystemExit(4)", 4, "SystemExit: 4"),
        ("raise ValueError('no')", 1, "ValueError: no"),
        ("import os; os.kill(os.getpid(), 2)", -2, "KeyboardInterrupt"),
    ],
)
def test_the_record_is_complete_however_it_ends(end, code, error, halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text(f"{TRAIN}\ntrain(3)\n{end}\n")
    done = halfstep_run("-o", "record", "train.py", "--lr", "1")
    assert done.code == code
    ran = "all products with gradients ran in bfloat16"
    assert done.err.endswith(f"3 steps recorded, 0 skipped; {ran}: halfstep report record\n")
    first, *_, last = events(tmp_path / "record")
    assert (first["event"], first["command"]) == ("run", ["train.py", "--lr", "1"])
    assert (last["event"], last["steps"], last["error"]) == ("end", 3, error)


@pytest.mark.parametrize(
    ("end", "what"), [("raise ValueError('no')", "error"), ("raise KeyboardInterrupt", "interrupt")]
)
def test_an_end_before_the_first_step_is_told_as_such(end, what, halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text(f"import torch\n{end}\n")
    done = halfstep_run("-o", "record", "train.py")
    told = f"halfstep: no step of an optimizer was completed before the {what}\n"
    assert done.err.endswith(told)


def test_what_trains_after_the_last_line_is_recorded_too(halfstep_run, tmp_path):
    """In a thread, and in a function called at the end; with our autocast still in place."""
    (tmp_path / "train.py").write_text(
        TRAIN + "import atexit, threading, time, torch\n"
        "def late():\n    time.sleep(0.2); train(2); print(torch.autocast.__module__)\n"
        "threading.Thread(target=late).start()\natexit.register(late)\ntrain(2)\n"
    )
    done = halfstep_run("-o", "record", "train.py")
    assert done.out.count("halfstep._tools.run.stand_ins\n") == 2
    kinds = [event["event"] for event in events(tmp_path / "record")]
    assert (kinds.count("step"), kinds[-1]) == (6, "end")


def test_forks_record_themselves(halfstep_run, tmp_path):
    """Forked by hand, or by multiprocessing; they end without a word."""
    (tmp_path / "train.py").write_text(
        TRAIN + "import multiprocessing, os, sys\n"
        "train(1)\n"
        "if os.fork() == 0:\n    train(90)\n    sys.exit()\n"
        "os.wait()\n"
        "child = multiprocessing.get_context('fork').Process(target=train, args=(70,))\n"
        "child.start(); child.join()\n"
    )
    done = halfstep_run("-o", "record", "train.py")
    assert done.err == (
        "halfstep: main process: 1 step recorded, 0 skipped; "
        "all products with gradients ran in bfloat16; "
        "2 processes that it started recorded too: halfstep report record\n"
    )
    for name, steps in ("record", 1), ("record/process-1", 90), ("record/process-2", 70):
        kinds = [event["event"] for event in events(tmp_path / name)]
        assert (kinds.count("step"), kinds.count("end")) == (steps, 1)


def test_the_folder_is_where_the_user_was(halfstep_run, tmp_path):
    """Not where the script has gone, though its last line names it as it was given."""
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "train.py").write_text(f"import os\nos.chdir('elsewhere')\n{TRAIN}\ntrain(1)\n")
    done = halfstep_run("-o", "the record", "train.py")
    assert done.err.endswith("halfstep report 'the record'\n")
    assert events(tmp_path / "the record")[-1]["steps"] == 1


def test_after_an_error_nothing_is_said_of_models_that_were_not_called(halfstep_run, tmp_path):
    for line, has_said in (("import no_such_package", False), ("raise SystemExit(0)", True)):
        (tmp_path / "train.py").write_text(f"{line}\n")
        said = halfstep_run("--amp", "bf16", "train.py").err
        assert ("found nothing to run" in said) is has_said


def test_products_are_counted_with_two_optimizers_of_a_class(halfstep_run):
    assert "2 of 2 products" in halfstep_run("--amp", "bf16", SCRIPTS / "two_adams.py").err


def test_an_optimizer_without_a_hash_steps_under_amp(halfstep_run, tmp_path):
    text = (SCRIPTS / "two_adams.py").read_text()
    no_hash = 'type("Adam", (torch.optim.Adam,), {"__hash__": None})'
    (tmp_path / "train.py").write_text(text.replace("torch.optim.Adam", no_hash))
    assert "TypeError" not in halfstep_run("--amp", "bf16", "train.py").err


def test_a_script_without_a_step(halfstep_run, tmp_path):
    (tmp_path / "train.py").write_text("import sys; sys.stderr = open('other', 'w')\n")
    done = halfstep_run("train.py")
    assert done.err.startswith("halfstep: no optimizer step was seen: ")
    assert "halfstep report" not in done.err  # which could only say the same
    assert (tmp_path / "other").read_text() == ""


@pytest.mark.parametrize("options", [(), ("--amp", "fp16")])
def test_warnings_of_the_program_have_its_lines(options, halfstep_run):
    """Also where a function of halfstep's stands between: a schedule, a loss, a backward pass."""
    told = halfstep_run(*options, SCRIPTS / "warned.py").err
    assert re.findall(r"(\w+\.py):(\d+): UserW", told) == [("warned.py", n) for n in "457"]
